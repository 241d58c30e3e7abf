"""Covers nn.moe.grouped: derivatives of any order, tails, its two gradients apart, and those of torch's grouped_mm."""

import math
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

import shardfn as sf
from shardfn import P, Zero, kernels, optim
from shardfn.nn import DeferredGradients, moe
from shardfn.testing import assert_parity, distributed

COUNTS = torch.tensor([2, 0, 4, 1])


def _drawn(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(sum(shape))).requires_grad_()


def _operands(transposed: bool, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    return _drawn(9, 3, dtype=dtype), _drawn(4, *((5, 3) if transposed else (3, 5)), dtype=dtype)


@pytest.mark.nightly
@pytest.mark.parametrize("transposed", [False, True])
def test_derivatives_are_those_of_finite_differences(transposed: bool) -> None:
    x, w = _operands(transposed)

    def f(x: Tensor, w: Tensor) -> Tensor:
        return moe.grouped(x, w, COUNTS, transposed)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch's rules of forward derivatives, when first loaded
        assert gradcheck(f, (x, w), check_forward_ad=True, check_batched_grad=True)
    assert gradgradcheck(f, (x, w))
    mapped = torch.func.vmap(f, (0, None))(torch.stack([x, 2 * x]), w)
    torch.testing.assert_close(mapped, torch.stack([f(x, w), 2 * f(x, w)]))


@pytest.mark.parametrize("transposed", [False, True])
def test_a_poisoned_tail_reaches_nothing(transposed: bool) -> None:
    x, w = (t.detach() for t in _operands(transposed))
    x[7:] = math.nan
    leaves = x.requires_grad_(), w.requires_grad_()
    y = moe.grouped(*leaves, COUNTS, transposed)
    dy = torch.ones_like(y)
    dy[7:] = math.nan
    of_x, of_w = torch.autograd.grad(y, leaves, dy)
    assert all(t.isfinite().all() for t in (y, of_x, of_w))
    assert not y[7:].any() and not of_x[7:].any() and not of_w[1].any()


def test_exact_rows_have_derivatives() -> None:
    x, w = _operands(False, torch.float32)
    y = moe.grouped(x, w, COUNTS, batch_invariant=True)
    assert torch.equal(y[:2], kernels.row_linear(x[:2].detach(), kernels.pack_rows(w[0].detach().T), 5))
    torch.testing.assert_close(
        torch.autograd.grad(y.sum(), (x, w)), torch.autograd.grad(moe.grouped(x, w, COUNTS).sum(), (x, w))
    )


def _torchs(x: Tensor, w: Tensor, counts: Tensor, transposed: bool) -> Tensor:
    matrices = w.mT if transposed else w
    return torch.nn.functional.grouped_mm(x, matrices, offs=counts.cumsum(0).int())


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("call", [moe.grouped, _torchs])
def test_gradients_come_apart(call: Any, transposed: bool) -> None:
    x, w = _drawn(7, 4, dtype=torch.float32), _drawn(4, *((8, 4) if transposed else (4, 8)), dtype=torch.float32)
    want = torch.autograd.grad(call(x, w, COUNTS, transposed).square().sum(), (x, w))
    deferred = DeferredGradients([w])
    with deferred.recorded():
        loss = call(x, w, COUNTS, transposed).square().sum()
    none, of_x = deferred.first([loss], [torch.tensor(1.0)], [x])
    assert none is None
    torch.testing.assert_close(of_x, want[0])
    torch.testing.assert_close(deferred.rest()[0], want[1])


def test_products_that_are_not_split() -> None:
    x, w = _drawn(7, 4, dtype=torch.float32), _drawn(4, 4, 8, dtype=torch.float32)
    deferred = DeferredGradients([w])
    with deferred.recorded():
        loss = moe.grouped(x, 2 * w, COUNTS).sum()  # no view of the leaf
    of_w, of_x = deferred.first([loss], [torch.tensor(1.0)], [x])
    want = torch.autograd.grad(moe.grouped(x, 2 * w, COUNTS).sum(), (w, x))
    torch.testing.assert_close((of_w, of_x), want)


def _loss(params: dict[str, Tensor], x: Tensor) -> Tensor:
    top = (x @ params["router"]).softmax(-1).topk(2)
    p, counts = moe.permutation(top.indices, params["router"].shape[1])
    hidden = moe.grouped(moe.dispatch(x, p), params["up"], counts).relu()
    return moe.combine(moe.grouped(hidden, params["down"], counts, True), p, top.values).square().mean()


@distributed(world=2)
def on_two_ranks(stage: int, jitted: bool) -> None:
    shapes = {"router": (5, 3), "up": (3, 5, 7), "down": (3, 5, 7)}
    params = {name: _drawn(*shape).detach() for name, shape in shapes.items()}
    batches = [_drawn(6, 5).detach(), 2 * _drawn(6, 5).detach().flip(0)]
    loss = sf.jit(_loss, backend="graph") if jitted else _loss
    with sf.make_mesh({"dp": 2}) as mesh:
        options = {"specs": P(), "batch": P("dp"), "zero": Zero(stage=stage, axis="dp")}
        assert_parity(loss, optim.adamw(0.1), params, batches, mesh=mesh, reference=_loss, **options)


@pytest.mark.day("3-False")
@pytest.mark.parametrize("stage, jitted", [(3, False), (3, True), pytest.param(1, False, marks=pytest.mark.nightly)])
def test_experts_under_zero_equal_one_device(stage: int, jitted: bool) -> None:
    on_two_ranks(stage, jitted)
