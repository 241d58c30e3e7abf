"""Covers the ownership of a tensor's memory: views, aliases, foreign memory, and sums in place."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from shardfn.collectives import is_sole_owner, may_be_added_to


def test_memory_with_one_holder_has_one_owner() -> None:
    x = torch.zeros(4)
    assert is_sole_owner(x) and is_sole_owner(x.view(-1))
    other = x[1:]
    assert not is_sole_owner(x) and not is_sole_owner(x.view(-1))
    del other
    assert is_sole_owner(x) and is_sole_owner(x.view(-1))


# Other holders of a tensor's memory; the test asks about an alias of it.
HOLDERS: dict[str, Callable[[Tensor], Any]] = {
    "the tensor itself": lambda x: x,
    "an alias": lambda x: x.detach(),
    "a view": lambda x: x[1:],
    "a view of a view": lambda x: x.view(2, -1).t()[1:],
    "an expanded view": lambda x: x[:1].expand(3),
    "numpy": lambda x: x.numpy(),
    "numpy, of a part": lambda x: x[2:].numpy(),
    "dlpack": lambda x: np.from_dlpack(x),
    "its storage": lambda x: x.untyped_storage(),
    "a parameter": lambda x: torch.nn.Parameter(x),
    "data": lambda x: x.data,
    "another dtype": lambda x: x.view(torch.int32),
    "a graph": lambda x: (torch.ones(4, requires_grad=True) * x).grad_fn,
    "a list of pieces": lambda x: x.split(2),
}


@pytest.mark.parametrize(
    "holder", [pytest.param(x, marks=pytest.mark.nightly if i % 3 else ()) for i, x in enumerate(HOLDERS)]
)
def test_memory_with_another_holder_is_not_written(holder: str) -> None:
    x = torch.ones(4)
    kept = HOLDERS[holder](x)
    alias = x.detach()
    del x
    assert not may_be_added_to(alias) and not may_be_added_to(alias.view(-1))
    del kept
    foreign = "numpy" in holder or holder == "dlpack"  # torch takes no note of when these let go
    assert foreign or (may_be_added_to(alias) and may_be_added_to(alias.view(-1)))


def test_memory_of_others_is_not_written() -> None:
    array = np.ones(4, np.float32)
    assert not may_be_added_to(torch.from_numpy(array).detach())
    assert not may_be_added_to(torch.from_dlpack(array).detach())
    assert not may_be_added_to(torch.frombuffer(bytearray(16), dtype=torch.float32).detach())
    assert not may_be_added_to(torch.ones(4).share_memory_().detach())


class _Wrapped(torch.Tensor):
    """A subclass that holds another tensor, as quantised and distributed ones do."""


class _Held(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        ctx.save_for_backward(y)
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return ctx.saved_tensors[0], None


def test_memory_saved_by_a_function_is_not_written() -> None:
    w, y = torch.ones(3, requires_grad=True), torch.ones(3)
    out = _Held.apply(w, y.view(3)).sum()  # pyright: ignore[reportAttributeAccessIssue]
    del y
    (grad,) = torch.autograd.grad(out, [w], retain_graph=True)
    alias = grad.detach()
    del grad
    assert not may_be_added_to(alias)
    del out
    assert may_be_added_to(alias)


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.ones(1).expand(3),
        pytest.param(lambda: torch.ones(6).as_strided((3, 2), (1, 1)), marks=pytest.mark.nightly),
        pytest.param(lambda: torch.ones(9)[::2], marks=pytest.mark.nightly),
        lambda: torch.ones(3, 3)[:, :2],
        pytest.param(lambda: torch.ones(2).as_subclass(_Wrapped), marks=pytest.mark.nightly),
        pytest.param(lambda: torch.ones(2, dtype=torch.complex64).conj(), marks=pytest.mark.nightly),
        lambda: torch.ones(2, dtype=torch.complex64).conj().imag,
        pytest.param(lambda: torch._efficientzerotensor((3,)), marks=pytest.mark.nightly),
        pytest.param(lambda: torch.eye(3).to_sparse(), marks=pytest.mark.nightly),
    ],
)
def test_only_plain_dense_tensors_are_added_to(make: Callable[[], Tensor]) -> None:
    assert not may_be_added_to(make())


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.ones(2, 3).t(),
        pytest.param(lambda: torch.ones(2, 1, 3).transpose(0, 2), marks=pytest.mark.nightly),
        pytest.param(lambda: torch.ones(0, 3).t(), marks=pytest.mark.nightly),
    ],
)
def test_dense_tensors_are_added_to_in_any_order_of_dims(make: Callable[[], Tensor]) -> None:
    x, y = make().clone(memory_format=torch.preserve_format), torch.arange(make().numel()).view(make().shape)
    assert may_be_added_to(x)
    assert torch.equal(x.detach().clone() + y, x.add_(y))
