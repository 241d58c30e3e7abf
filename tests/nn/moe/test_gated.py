"""Covers the second half of SwiGLU's experts: bits and derivatives of its parts, and the memory that it keeps."""

import warnings

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

from shardfn.nn import DeferredGradients
from shardfn.nn.moe import _gated

COUNTS = torch.tensor([2, 0, 4, 1])


def _operands(dtype: torch.dtype = torch.float64, f: int = 5) -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(0)
    shapes = (9, 2 * f), (4, 3, f)
    x, w = (torch.randn(s, dtype=torch.float64, generator=made).to(dtype).requires_grad_() for s in shapes)
    return x, w


def _run(x: Tensor, w: Tensor) -> Tensor:
    return _gated.gated_product(x, w, COUNTS)


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("f", [5, 16, 33])
def test_it_has_the_bits_of_its_parts(exact: bool, f: int) -> None:
    x, w = _operands(torch.float32, f)
    y, parts = _gated.gated_product(x, w, COUNTS, batch_invariant=exact), _gated._apply_in_parts(x, w, COUNTS, exact)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(1))
    assert torch.equal(y, parts)
    for mine, theirs in zip(*(torch.autograd.grad(out, (x, w), dy) for out in (y, parts)), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.nightly
def test_derivatives_are_those_of_finite_differences() -> None:
    operands = _operands(f=2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch's rules of forward derivatives, when first loaded
        assert gradcheck(_run, operands, check_forward_ad=True, check_batched_grad=True)
    assert gradgradcheck(_run, operands)


def test_a_map_over_rows_is_that_of_each() -> None:
    x, w = _operands()
    mapped = torch.func.vmap(_run, (0, None))(torch.stack([x, 2 * x]), w)
    torch.testing.assert_close(mapped, torch.stack([_run(x, w), _run(2 * x, w)]))


def test_it_keeps_its_operands_alone() -> None:
    x, w = _operands()
    kept: list[int] = []

    def pack(t: Tensor) -> Tensor:
        kept.append(t.data_ptr())
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        _run(x, w)
    assert set(kept) == {t.data_ptr() for t in (x, w, COUNTS)}


def test_a_backward_in_two_parts_puts_off_the_gradient_of_the_matrices() -> None:
    x, w = _operands()
    wanted = torch.autograd.grad(_run(x, w).square().sum(), (x, w))
    deferred = DeferredGradients([w])
    with deferred.recorded():
        loss = _run(x, w).square().sum()
    none, of_x = deferred.first([loss], [torch.ones_like(loss)], [x])
    assert none is None
    torch.testing.assert_close(of_x, wanted[0])
    torch.testing.assert_close(deferred.rest()[0], wanted[1])
