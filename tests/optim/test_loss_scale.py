"""Covers loss scales: the rules against a plain oracle over random overflows, published traces, purity, errors."""

import random
from typing import Any

import pytest
import torch

from shardfn import optim


class Oracle:
    """The rules in plain Python, written from their description."""

    def __init__(self, init, window, hysteresis, consecutive, min_scale, factor) -> None:
        self.s, self.i, self.last, self.h = float(init), 0, -1, hysteresis
        self.window, self.full, self.consecutive = window, hysteresis, consecutive
        self.floor, self.factor = min_scale, factor
        self.hit_floor = False

    def step(self, overflow: bool) -> float:
        self.hit_floor = False
        if overflow:
            if self.full == 1 or self.h == 1:
                if self.s == self.floor:
                    self.hit_floor = True
                else:
                    self.s = max(self.s / self.factor, self.floor)
            else:
                self.h -= 1
            self.last = self.i
        else:
            if self.consecutive:
                self.h = self.full
            stable = self.i - self.last - 1
            if stable > 0 and stable % self.window == 0:
                if not self.consecutive:
                    self.h = self.full
                self.s *= self.factor
        self.i += 1
        return self.s


def trace(overflows: list[int], **options: Any) -> list[float]:
    rule = optim.dynamic_loss_scale(**options)
    state, out = rule.init(), []
    for overflow in overflows:
        state = rule.update(state, torch.tensor(not overflow))
        out.append(state.scale.item())
    return out


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("seed", "rate", "options"),
    [
        (0, 0.02, {"init": 2.0**16, "window": 40, "hysteresis": 2, "consecutive": False, "min_scale": 1.0}),
        pytest.param(
            1,
            0.3,
            {"init": 2.0**10, "window": 3, "hysteresis": 4, "consecutive": False, "min_scale": 0.25},
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            2,
            0.2,
            {"init": 2.0**12, "window": 9, "hysteresis": 3, "consecutive": True, "min_scale": 2.0},
            marks=pytest.mark.nightly,
        ),
        (3, 0.1, {"init": 1000.0, "window": 30, "hysteresis": 1, "consecutive": False, "min_scale": 3.0}),
    ],
)
def test_random_overflows_give_the_oracles_trace(seed: int, rate: float, options: dict) -> None:
    draw = random.Random(seed)
    overflows = []
    while len(overflows) < 10_000:  # bursts, so that the floor is reached and hysteresis used up
        overflows += [int(draw.random() < rate)] * draw.choice((1, 1, 1, 2, 12))
    del overflows[10_000:]
    oracle = Oracle(factor=2.0, **options)
    rule = optim.dynamic_loss_scale(**options)
    state, floors = rule.init(), 0
    for n, overflow in enumerate(overflows):
        want = oracle.step(bool(overflow))
        state = rule.update(state, torch.tensor(not overflow))
        assert state.scale.item() == want, n
        assert bool(state.exhausted) == oracle.hit_floor, n
        floors += oracle.hit_floor
    assert int(state.count) == 10_000
    assert floors or rate < 0.1


def test_published_traces() -> None:
    pattern = [1, 1, 1] + [0] * 12 + [1, 0, 1]
    want = [65536, 32768] + [16384] * 5 + [32768] * 4 + [65536] * 6 + [32768]
    assert trace(pattern, window=4) == want
    assert trace([1, 0] * 3, consecutive=True) == [65536] * 6
    assert trace([1, 0] * 3) == [65536, 65536, 32768, 32768, 16384, 16384]
    assert trace([0] * 10, window=4) == [65536] * 4 + [131072] * 4 + [262144] * 2
    plain: Any = {"window": 2, "hysteresis": 1}
    assert trace([0] * 10, init=2.0**8, **plain) == [256, 256, 512, 512, 1024, 1024, 2048, 2048, 4096, 4096]
    assert trace([1] * 8, init=2.0**4, **plain) == [8, 4, 2, 1, 1, 1, 1, 1]
    assert trace([1] * 8, init=2.0**4, min_scale=2.0, **plain) == [8, 4, 2, 2, 2, 2, 2, 2]
    two: Any = {"window": 2, "hysteresis": 2}
    assert trace([1] * 8, init=2.0**4, **two) == [16, 8, 4, 2, 1, 1, 1, 1]
    assert trace([1, 1, 0, 0, 0, 1], init=2.0**8, **two) == [256, 128, 128, 128, 256, 256]


def test_update_is_pure_and_maps_over_a_population() -> None:
    rule = optim.dynamic_loss_scale(window=2, hysteresis=1)
    state = rule.init()
    before = [x.clone() for x in state]
    rule.update(state, torch.tensor(False))
    assert all(torch.equal(a, b) for a, b in zip(state, before, strict=True))
    many = type(state)(*(x.expand(2) for x in state))
    assert torch.func.vmap(rule.update)(many, torch.tensor([True, False])).scale.tolist() == [2.0**16, 2.0**15]


def test_the_scale_stays_in_the_range_of_float32() -> None:
    assert trace([0] * 6 + [1], init=2.0**125, window=1, hysteresis=1)[-2:] == [2.0**127, 2.0**126]


def test_floor_and_arguments() -> None:
    rule = optim.dynamic_loss_scale(init=2.0, hysteresis=1, min_scale=1.0)
    state = rule.update(rule.init(), torch.tensor(False))
    rule.check(state)
    state = rule.update(state, torch.tensor(False))
    with pytest.raises(FloatingPointError, match=r"at its floor 1\.0"):
        rule.check(state)
    rule.check(rule.update(state, torch.tensor(True)))
    optim.dynamic_loss_scale(init=2.0, hysteresis=1, raise_at_min=False).check(state)
    wrong: Any = ({"init": 0.5}, {"window": 0}, {"hysteresis": 0}, {"factor": 1.0}, {"min_scale": 0.0})
    for bad in wrong:
        with pytest.raises(ValueError, match="dynamic_loss_scale"):
            optim.dynamic_loss_scale(**bad)
    with pytest.raises(ValueError, match="static_loss_scale"):
        optim.static_loss_scale(-1.0)
