"""Covers `LowRankWeight`: every operation on it equals the same operation on the sum of its parts."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import shardfn as sf
from shardfn.core import tree_leaves, tree_map
from shardfn.lora import LowRankWeight

F = torch.nn.functional
M, N, R, L = 4, 6, 2, 3


def _parts(*stack: int) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    shapes = [(*stack, M, N), (*stack, M, R), (*stack, R, N)]
    w, left, right = (torch.randn(s, generator=g, dtype=torch.float64, requires_grad=True) for s in shapes)
    return w, left, right


def _rows(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


PRODUCTS: dict[str, Callable[[Any], Tensor]] = {
    "linear": lambda w: F.linear(_rows(2, 3, N), w),
    "linear with a bias": lambda w: F.linear(_rows(3, N), w, _rows(M)),
    "linear of a vector": lambda w: F.linear(_rows(N), w),
    "matmul": lambda w: _rows(2, 3, M) @ w,
    "matmul from the left": lambda w: w @ _rows(N, 3),
    "transposed": lambda w: _rows(3, N) @ w.t(),
    "transposed by mT": lambda w: _rows(3, N) @ w.mT,
    "transposed by dims": lambda w: torch.matmul(_rows(3, N), w.transpose(0, 1)),
    "mm": lambda w: torch.mm(_rows(3, M), w),
    "addmm": lambda w: torch.addmm(_rows(N), _rows(3, M), w),
    "einsum": lambda w: torch.einsum("bti,io->bto", _rows(2, 3, M), w),
    "einsum with the last dim": lambda w: torch.einsum("ti,oi->to", _rows(3, N), w),
    "einsum from the left": lambda w: torch.einsum("oi,ti->to", w, _rows(3, N)),
}
OTHERS: dict[str, Callable[[Any], Tensor]] = {
    "a norm": lambda w: w.square().sum(),
    "a view": lambda w: _rows(3, N) @ w.view(2, M // 2, N)[1].t(),
    "rows": lambda w: F.embedding(torch.tensor([0, 2]), w),
    "a sum": lambda w: w + 1,
    "both operands": lambda w: w @ w.t(),
    "a concatenation": lambda w: torch.cat([w, w]),
    "a vector": lambda w: w @ _rows(N),
    "the second of a linear": lambda w: F.linear(w, _rows(3, N)),
    "a product of one's own": lambda w: sf.nn.Product(
        torch.matmul, (lambda dy, b, _: dy @ b.mT, lambda dy, a, _: a.mT @ dy)
    )(_rows(3, M), w),
}


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=pytest.mark.nightly if i % 3 else ()) for i, x in enumerate(PRODUCTS | OTHERS)]
)
def test_it_is_the_sum(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    f, parts = (PRODUCTS | OTHERS)[name], _parts()
    w, left, right = parts
    want = f(w + 0.5 * left @ right)
    if name in PRODUCTS:  # and is never made for them
        monkeypatch.setattr(LowRankWeight, "whole", lambda self: pytest.fail("the sum is made"))
    got = f(LowRankWeight.of(w, left, right, 0.5))
    torch.testing.assert_close(got, want)
    grads, wanted = (torch.autograd.grad(y.square().sum(), parts) for y in (got, want))
    torch.testing.assert_close(grads, wanted)


def test_its_attributes_are_those_of_a_tensor() -> None:
    w = LowRankWeight.of(*_parts(), 1.0)
    assert isinstance(w, Tensor) and tuple(w.shape) == (M, N) and w.numel() == M * N and w.size(-1) == N
    assert w.requires_grad and not w.is_leaf and w.dtype == torch.float64 and w.ndim == 2 and len(w) == M


@pytest.mark.parametrize(
    "way",
    [
        "unbind",
        pytest.param("index", marks=pytest.mark.nightly),
        pytest.param("iterate", marks=pytest.mark.nightly),
        "scan",
        pytest.param("remat", marks=pytest.mark.nightly),
    ],
)
def test_layers_of_a_stack_keep_their_parts(way: str) -> None:
    parts = _parts(L)
    x = _rows(5, M)

    def layer(x: Tensor, w: Any) -> Tensor:
        assert type(w) is LowRankWeight or way == "plain"
        return torch.tanh(x @ w @ _rows(N, M))

    def run(w: Any) -> Tensor:
        if way == "scan":
            return sf.scan(lambda h, w: (layer(h, w), None), x, w)[0]
        h = x
        for l in range(L):
            own = w.unbind(0)[l] if way == "unbind" else list(w)[l] if way == "iterate" else w[l]
            h = sf.remat(layer)(h, own) if way == "remat" else layer(h, own)
        return h

    got = run(LowRankWeight.of(*parts, 2.0))
    way, asked = "plain", way
    want = run(parts[0] + 2.0 * parts[1] @ parts[2])
    assert asked != "plain"
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(torch.autograd.grad(got.sum(), parts), torch.autograd.grad(want.sum(), parts))


def test_it_is_a_node_of_trees() -> None:
    w = LowRankWeight.of(*_parts(), 1.0)
    assert [tuple(x.shape) for x in tree_leaves({"w": w})] == [(M, N), (M, R), (R, N)]
    assert type(tree_map(lambda x: 2 * x, w)) is LowRankWeight
    assert tree_map(lambda x: x.ndim, w) == {"weight": 2, "left": 2, "right": 2}


def test_parts_that_do_not_fit_are_refused() -> None:
    w, left, right = _parts()
    with pytest.raises(ValueError, match=r"left \(4, 2\) and right \(6, 2\) do not make a weight \(4, 6\)"):
        LowRankWeight.of(w, left, right.mT, 1.0)


def test_past_torchs_functions_it_is_the_sum() -> None:
    """An autograd.Function receives it unopened, and its gradient goes to the parts."""

    class Own(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            return 2 * ctx.saved_tensors[0] * grads[0]

    parts = _parts()
    got = Own.apply(LowRankWeight.of(*parts, 3.0))
    want = (parts[0] + 3.0 * parts[1] @ parts[2]).square()
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(torch.autograd.grad(got.sum(), parts), torch.autograd.grad(want.sum(), parts))
