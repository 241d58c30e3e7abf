"""Covers nn.moe.permutation, dispatch and combine: order, transposes, derivatives, tails, captures, bits."""

import itertools
import math
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck
from torch.fx.experimental.proxy_tensor import make_fx

import shardfn as sf
from shardfn.nn import moe

NIGHTLY = pytest.mark.nightly
CHOICES = torch.tensor([[0, 2], [2, -1], [0, 3], [3, 3], [-1, -1]])
ROWS = [None, 6, 13, pytest.param(0, marks=NIGHTLY)]


def _drawn(*shape: int, seed: int = 0) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(shape, dtype=torch.float64, generator=draw).requires_grad_()


def _checked(f: Any, *inputs: Tensor) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch's rules of forward derivatives, when first loaded
        assert gradcheck(f, inputs, check_forward_ad=True, check_batched_grad=True)
    assert gradgradcheck(f, inputs)


def test_the_order_is_by_expert_then_token_then_choice() -> None:
    draw = torch.Generator().manual_seed(0)
    for s, k, e in itertools.product((0, 1, 7), (1, 3), (1, 4)):
        experts = torch.randint(-1, e + 1, (s, k), generator=draw)
        p, counts = moe.permutation(experts, e)
        want = sorted(
            (x, i, j)
            for (i, j), x in zip(itertools.product(range(s), range(k)), experts.flatten().tolist(), strict=True)
            if 0 <= x < e
        )
        assert p.source.tolist() == [i for _, i, _ in want] + [-1] * (s * k - len(want))
        places = torch.full((s, k), -1)
        for row, (_, i, j) in enumerate(want):
            places[i, j] = row
        assert torch.equal(p.places, places)
        assert counts.tolist() == [sum(x == g for x, _, _ in want) for g in range(e)]


def test_rows_past_a_static_number_have_no_place() -> None:
    p, counts = moe.permutation(CHOICES, 5, 6)
    assert p.source.tolist() == [0, 2, 0, 1, 2, 3] and counts.tolist() == [2, 0, 2, 2, 0]
    assert p.places.tolist() == [[0, 2], [3, -1], [1, 4], [5, -1], [-1, -1]]
    p, counts = moe.permutation(CHOICES, 5, 13)
    assert p.source.tolist() == [0, 2, 0, 1, 2, 3, 3] + [-1] * 6 and counts.sum() == 7


@pytest.mark.day("13")
@pytest.mark.parametrize("rows", ROWS)
def test_derivatives_are_those_of_finite_differences(rows: int | None) -> None:
    p, _ = moe.permutation(CHOICES, 5, rows)
    _checked(lambda x: moe.dispatch(x, p), _drawn(5, 3))
    _checked(lambda y, w: moe.combine(y, p, w), _drawn(len(p.source), 3), _drawn(5, 2))


def test_combine_and_dispatch_are_transposes() -> None:
    p, _ = moe.permutation(CHOICES, 5)
    x, y = _drawn(5, 3).detach(), _drawn(10, 3, seed=1).detach()
    torch.testing.assert_close((moe.dispatch(x, p) * y).sum(), (x * moe.combine(y, p, torch.ones(5, 2).double())).sum())
    one, _ = moe.permutation(torch.tensor([[3], [0], [2], [0]]), 4)
    assert torch.equal(moe.combine(moe.dispatch(x[:4], one), one, torch.ones(4, 1).double()), x[:4])


def test_a_poisoned_tail_reaches_nothing() -> None:
    p, counts = moe.permutation(CHOICES, 5)
    y, w = _drawn(10, 3).detach(), _drawn(5, 2)
    y[int(counts.sum()) :] = math.nan
    y.requires_grad_()
    out = moe.combine(y, p, w)
    of_y, of_w = torch.autograd.grad(out.square().sum(), (y, w))
    assert all(t.isfinite().all() for t in (out, of_y, of_w))
    assert not of_y[7:].any() and not of_w[4].any() and of_w[1, 1] == 0


def test_weights_wider_than_rows() -> None:
    p, _ = moe.permutation(CHOICES, 5)
    y, w = _drawn(10, 3).detach().bfloat16().requires_grad_(), _drawn(5, 2).detach().float().requires_grad_()
    out = moe.combine(y, p, w)
    of_y, of_w = torch.autograd.grad(out.sum(), (y, w))
    assert (out.dtype, of_y.dtype, of_w.dtype) == (torch.bfloat16, torch.bfloat16, torch.float32)


def _layer(x: Tensor, router: Tensor, w: Tensor) -> Tensor:
    top = (x @ router).softmax(-1).topk(2)
    p, counts = moe.permutation(top.indices, router.shape[1])
    y = moe.grouped(moe.dispatch(x, p), w, counts)
    return moe.combine(y, p, top.values).square().sum()


def _operands() -> tuple[Tensor, Tensor, Tensor]:
    return _drawn(6, 3).detach(), _drawn(3, 4, seed=1).detach(), _drawn(4, 3, 3, seed=2).detach()


def test_choices_inside_of_transforms() -> None:
    x, router, w = _operands()
    leaves = [t.clone().requires_grad_() for t in (x, router, w)]
    want = torch.autograd.grad(_layer(*leaves), leaves)
    got = torch.func.grad(_layer, (0, 1, 2))(x, router, w)
    torch.testing.assert_close(got, want)
    many = torch.stack([x, x.flip(0)])
    mapped = torch.func.vmap(torch.func.grad(_layer, 2), (0, None, None))(many, router, w)
    torch.testing.assert_close(mapped, torch.stack([want[2], want[2]]))
    slope = torch.func.jvp(lambda x: _layer(x, router, w), (x,), (x,))[1]
    torch.testing.assert_close(slope, (want[0] * x).sum())


@pytest.mark.nightly
def test_captures_have_shapes_that_no_choice_decides() -> None:
    x, router, w = _operands()
    gradients = torch.func.grad(_layer, (0, 1, 2))
    graph = make_fx(gradients, tracing_mode="fake")(x, router, w)
    other = x.flip(1)
    for got, want in zip(graph(other, router, w), gradients(other, router, w), strict=True):
        assert torch.equal(got, want)
    params = {"router": router, "w": w}
    loss = lambda params, x: _layer(x, params["router"], params["w"])  # noqa: E731
    eager, captured = (f(params, other) for f in (sf.value_and_grad(loss), sf.jit(sf.value_and_grad(loss))))
    assert torch.equal(eager[0], captured[0])
    assert all(torch.equal(eager[1][name], captured[1][name]) for name in params)
