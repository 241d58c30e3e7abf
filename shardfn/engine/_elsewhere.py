"""Stands for a stack whose layers are on several ranks, in code outside of the layers, which must not use it."""

import functools
from typing import Any

import torch
from torch import Tensor

# What tells of a tensor, and not its values.
_METADATA = frozenset({"size", "dim", "ndimension", "numel", "nelement", "is_floating_point", "is_complex", "__hash__"})
_FIELDS = frozenset({"shape", "dtype", "device", "ndim", "requires_grad", "layout"})


class ElsewhereTensor(torch.Tensor):
    """This rank's rows of a stack, for code outside of its layers: with their shape and dtype, and without values.

    Raises:
        ValueError: something is computed from it. The result would be of this rank's layers alone.
    """

    @staticmethod
    def of(x: Tensor) -> "ElsewhereTensor":
        """One like this rank's block of a stacked leaf; for all that look like it the same, as it says no more."""
        with torch._C.DisableTorchFunctionSubclass():
            return _like(tuple(x.shape), x.dtype, x.device)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Tells of it, and computes nothing."""
        del types
        name = getattr(func, "__name__", "")
        field = getattr(getattr(func, "__self__", None), "__name__", "") if name == "__get__" else ""
        if name in _METADATA or field in _FIELDS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        raise ValueError(
            f"the loss of a pipeline uses the stacked layers outside of them, in {field or name}: they are on several"
            " ranks, of which each would use its own alone. Let each layer add its part to what it hands on, or use"
            " what the optimizer has (weight decay)."
        )

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Nothing comes here but by a way that asks no subclass."""
        return cls.__torch_function__(func, types, args, kwargs)


@functools.lru_cache(maxsize=256)
def _like(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> ElsewhereTensor:
    return torch.Tensor._make_wrapper_subclass(  # pyright: ignore[reportAttributeAccessIssue]
        ElsewhereTensor, shape, dtype=dtype, device=device
    )
