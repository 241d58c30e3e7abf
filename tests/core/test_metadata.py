"""Covers `MetadataTensor`: every subclass answers the same functions without its values, and no other."""

from typing import Any

import pytest
import torch

from shardfn.core import METADATA, MetadataTensor


class _Blind(MetadataTensor):
    """A tensor that has no values at all."""

    @classmethod
    def on_values(cls, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        raise AssertionError(f"{func} reads values")


def test_metadata_is_that_of_a_tensor_with_values() -> None:
    real = torch.arange(12.0).view(3, 4).mT[1:]
    blind = _Blind.empty(real.shape, real.dtype, real.device, real.stride(), real.storage_offset())
    assert len(METADATA) > 30
    for func in METADATA - {torch.Tensor.__hash__}:
        assert func(blind) == func(real), func
    assert blind.stride() == real.stride() and len({blind, blind}) == 1
    assert _Blind.empty((3, 4), torch.int8, torch.device("meta")).stride() == (4, 1)


def test_all_else_is_asked_of_the_values() -> None:
    blind = _Blind.empty((3, 4), torch.float32, torch.device("cpu"))
    for use in (lambda x: x + 1, lambda x: x.T, torch.sum, torch.ops.aten.relu.default):
        with pytest.raises(AssertionError, match="reads values"):
            use(blind)


def test_a_class_may_compute_some_metadata() -> None:
    class Told(_Blind):
        computed = frozenset({torch.Tensor.requires_grad.__get__})  # pyright: ignore[reportAttributeAccessIssue]

        @classmethod
        def on_values(cls, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            return "asked"

    assert Told.empty((), torch.float32, torch.device("cpu")).requires_grad == "asked"
