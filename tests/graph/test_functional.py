"""Writes of a captured forward as operations that return new values: random programs of views and writes."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from shardfn.capture import capture
from shardfn.engine import prepare
from shardfn.graph import find_op

Draw = Callable[[random.Random, Tensor], Tensor]

VIEWS: list[Draw] = [
    lambda r, x: x.select(d := _dim(r, x), r.randrange(x.shape[d])),
    lambda r, x: x.narrow(d := _dim(r, x), r.randrange(x.shape[d]), 1),
    lambda r, x: x[tuple(slice(r.choice([0, 1]) if n > 1 else 0, None, r.choice([1, 2])) for n in x.shape)],
    lambda r, x: x.transpose(_dim(r, x), _dim(r, x)),
    lambda r, x: x.permute(r.sample(range(x.ndim), x.ndim)),
    lambda r, x: x.unsqueeze(r.randrange(x.ndim + 1)),
    lambda r, x: x.squeeze(),
    lambda r, x: x.view(-1) if x.is_contiguous() else x,
    lambda r, x: x.diagonal() if x.ndim > 1 else x,
    lambda r, x: r.choice(x.split(2, _dim(r, x))),
    lambda r, x: r.choice(x.unbind(_dim(r, x))),
    lambda r, x: x[:],
    lambda r, x: x.expand(1, *x.shape),
    lambda r, x: x.unsqueeze_(0) if x.ndim < 3 else x.transpose_(0, 1),
    lambda r, x: x.detach(),
]
WRITES: list[Callable[[random.Random, Tensor, Tensor], Any]] = [
    lambda r, x, y: x.add_(y),
    lambda r, x, y: x.mul_(2).sub_(y),
    lambda r, x, y: x.copy_(y),
    lambda r, x, y: x.copy_(y.float()),
    lambda r, x, y: x.fill_(y),
    lambda r, x, y: x.masked_fill_(x.detach() > 0.3, 0.5),
    lambda r, x, y: x.tanh_(),
    lambda r, x, y: x.zero_(),
    lambda r, x, y: x.gt_(0.2),
    lambda r, x, y: x.index_fill_(0, torch.zeros(1, dtype=torch.int64), 0.3),
    lambda r, x, y: x.__setitem__(0, y),
]


def _dim(r: random.Random, x: Tensor) -> int:
    return r.randrange(x.ndim)


def program(seed: int) -> Callable[[Tensor, Tensor], list[Tensor]]:
    """A random program of a (4, 3) and a (3,) tensor: looks at them, and writes."""

    def run(x: Tensor, w: Tensor) -> list[Tensor]:
        r = random.Random(seed)
        pool = [x * 1, x.new_zeros(4, 3), (w * w).expand(2, 3).clone(), torch.tensor([1.0, 2.0], dtype=x.dtype)]
        kept: list[Tensor] = []
        for _ in range(r.randrange(4, 16)):
            one, other = r.choice(pool), r.choice(pool)
            kind = r.random()
            if kind < 0.5 and one.ndim and one.numel():
                pool.append(r.choice(VIEWS)(r, one))
            elif kind < 0.9 and one.ndim:
                r.choice(WRITES)(r, one, other.sum() * 0.3)
            else:
                kept.append(one * one)
        return [y * 1 for y in pool + kept]

    return run


def derivatives(out: list[Tensor], given: list[Tensor]) -> list[Tensor]:
    total = torch.stack([(0.1 * i + 1) * (y * y).sum() for i, y in enumerate(out)]).sum()
    if not total.requires_grad:
        return [torch.zeros_like(x) for x in given]
    grads = torch.autograd.grad(total, given, allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for x, g in zip(given, grads, strict=True)]


def inputs() -> list[Tensor]:
    g = torch.Generator().manual_seed(0)
    shapes = (4, 3), (3,)
    return [torch.randn(s, generator=g, dtype=torch.float64).requires_grad_() for s in shapes]


def compare(seed: int) -> bool:
    """Whether torch runs the program; if so, so does its graph without writes, with the same results and gradients."""
    run = program(seed)
    given = inputs()
    try:
        want = run(*given)
        want_grads = derivatives(want, given)
        gm = capture(lambda *xs: run(*[x.requires_grad_() for x in xs]), inputs(), differentiable=True)
    except (
        RuntimeError,
        IndexError,
    ):  # from autograd, as for an overwritten value that a backward needs; or from torch's tracer
        return False
    try:
        gm = prepare(gm)
    except ValueError as error:
        assert any(x in str(error) for x in ("autograd does not see", "a detached view")), (seed, error)
        return False
    assert not any(find_op(n.target).writes for n in gm.graph.nodes if n.op == "call_function"), seed
    got = torch.fx.Interpreter(gm).run(*given)
    for a, b in zip([*got, *derivatives(got, given)], [*want, *want_grads], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14, msg=lambda m: f"seed {seed}: {m}")
    return True


@pytest.mark.nightly
@pytest.mark.parametrize("first", [0, *range(40, 1200, 40)])
def test_a_graph_without_writes_equals_in_place_operations_of_torch(first: int) -> None:
    ran = [compare(seed) for seed in range(first, first + 40)]
    assert sum(ran) > 10
