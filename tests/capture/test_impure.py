"""Covers draws inside captured functions: torch's are the eager step's, others are refused; caches stay clean."""

import functools
import random
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor

import shardfn as sf


def drawn(p: dict, x: Tensor) -> Tensor:
    """Draws in every way that models do: in place, dropout, by shape, like a tensor."""
    scale = torch.empty(1, dtype=x.dtype).uniform_(-float(numpy.log(2.0)), float(numpy.log(2.0))).exp()
    h = torch.nn.functional.dropout(torch.tanh(x @ p["w"]) * scale, 0.3)
    return h.square().mean() + torch.rand(3).sum() + torch.randn_like(x).mean()


def losses(f: Any, steps: int = 3) -> tuple[list[float], Tensor]:
    step = sf.sharded_step(f, sf.optim.sgd(0.1), mesh=sf.make_mesh({"dp": 1}))
    state = step.init({"w": torch.eye(4)})
    torch.manual_seed(3)
    out = []
    for i in range(steps):
        state, metrics = step(state, torch.full((2, 4), float(i)))
        out.append(metrics["loss"].item())
    return out, torch.get_rng_state()


@pytest.mark.filterwarnings("ignore:the loss draws from torch")
def test_draws_of_a_captured_step_are_those_of_the_eager_one() -> None:
    (want, after), (got, state) = losses(drawn), losses(sf.jit(drawn, backend="graph"))
    assert got == want and len(set(got)) == 3
    assert torch.equal(after, state)  # the first call, which captured, has drawn as often as the others


def test_numbers_drawn_at_the_capture_are_refused_with_the_line() -> None:
    def of_python(p: dict, x: Tensor) -> Tensor:
        return (x @ p["w"]).mean() * random.random()

    def of_numpy(p: dict, x: Tensor) -> Tensor:
        return (x @ p["w"]).mean() * float(numpy.random.rand())

    for f, name in ((of_python, r"random\.random"), (of_numpy, r"numpy\.random\.rand")):
        before = numpy.random.get_state(legacy=True)
        with pytest.raises(sf.CaptureError, match=rf"test_impure.py:\d+ in {f.__name__}: .*draws from {name}"):
            losses(sf.jit(f, backend="graph"))
        assert str(before) == str(numpy.random.get_state(legacy=True))
        losses(f)  # an eager step may

    def passed(p: dict, batch: dict) -> Tensor:
        return (batch["x"] @ p["w"]).mean() * batch["draw"].mean()

    step = sf.sharded_step(sf.jit(passed, backend="graph"), sf.optim.sgd(0.0), mesh=sf.make_mesh({"dp": 1}))
    state = step.init({"w": torch.eye(4)})
    for number in (random.random(), random.random()):
        state, metrics = step(state, {"x": torch.ones(2, 4), "draw": torch.full((2,), number)})
        assert metrics["loss"].item() == pytest.approx(number)


@pytest.mark.nightly
def test_values_cached_by_a_capture_are_forgotten() -> None:
    @functools.lru_cache
    def positions(n: int) -> tuple[Tensor, int]:
        return torch.arange(0.5, n), n

    @functools.lru_cache
    def other(n: int) -> int:
        return n

    other(3)

    def f(p: dict, x: Tensor) -> Tensor:
        return (x @ p["w"] * positions(4)[0]).mean()

    got = losses(sf.jit(f, backend="graph"))[0]
    assert losses(f)[0] == got == losses(sf.jit(f, backend="graph"))[0]
    assert other.cache_info().currsize == 1
