"""Covers the schedules: values, counts as ints and tensors, joints, refusals."""

import itertools
import math
from collections.abc import Callable

import pytest
import torch

from shardfn import optim
from shardfn.optim import Schedule


def values(schedule: Schedule, num: int) -> list[float]:
    return [schedule(n).item() for n in range(num)]


@pytest.mark.parametrize(
    "warmup", [10, pytest.param(15, marks=pytest.mark.nightly), pytest.param(19, marks=pytest.mark.nightly), 33]
)
def test_warmup_starts_at_min_ends_at_max_and_stays(warmup: int) -> None:
    rates = values(optim.warmup_constant_schedule(1e-5, 1e-2, warmup), 3 * warmup)
    assert rates[0] == pytest.approx(1e-5, rel=1e-7)
    assert rates[warmup:] == pytest.approx([1e-2] * (2 * warmup), rel=1e-7)
    assert all(a < b for a, b in itertools.pairwise(rates[: warmup + 1]))
    for n in range(warmup):
        assert rates[n] == pytest.approx(1e-5 + (1e-2 - 1e-5) * n / warmup, abs=1e-9, rel=1e-7)


@pytest.mark.parametrize(
    "warmup", [10, pytest.param(15, marks=pytest.mark.nightly), pytest.param(19, marks=pytest.mark.nightly), 33]
)
def test_warmup_then_linear_decay(warmup: int) -> None:
    total = 4 * warmup
    rates = values(optim.warmup_linear_decay_schedule(0.0, 0.1, warmup, total, 0.01), total + 5)
    for n, rate in enumerate(rates):
        down = 0.1 + (0.01 - 0.1) * min((n - warmup) / (total - warmup), 1)
        assert rate == pytest.approx(0.1 * n / warmup if n < warmup else down, abs=1e-9, rel=1e-7)


@pytest.mark.parametrize("exponent", [1.0, 2.0])
def test_warmup_then_cosine_decay(exponent: float) -> None:
    rates = values(optim.warmup_cosine_decay_schedule(0.001, 0.1, 10, 110, 0.01, exponent), 130)
    for n, rate in enumerate(rates):
        half = (0.5 * (1 + math.cos(math.pi * min((n - 10) / 100, 1)))) ** exponent
        want = 0.001 + (0.1 - 0.001) * n / 10 if n < 10 else 0.01 + (0.1 - 0.01) * half
        assert rate == pytest.approx(want, abs=1e-9, rel=1e-7)


def test_cosine_decay() -> None:
    rates = values(optim.cosine_decay_schedule(2.0, 8, alpha=0.25), 12)
    want = [2.0 * (0.75 * 0.5 * (1 + math.cos(math.pi * min(n, 8) / 8)) + 0.25) for n in range(12)]
    assert rates == pytest.approx(want, rel=1e-7)
    assert (rates[0], rates[8], rates[11]) == (2.0, 0.5, 0.5)


def test_linear() -> None:
    assert values(optim.linear_schedule(1.0, 0.0, 4, transition_begin=2), 8) == [1, 1, 1, 0.75, 0.5, 0.25, 0, 0]


def test_constant() -> None:
    assert values(optim.constant_schedule(0.125), 3) == [0.125] * 3


def test_joined_pieces_count_from_their_start() -> None:
    joined = optim.join_schedules([optim.linear_schedule(0.0, 4.0, 4)] * 3, [2, 5])
    assert values(joined, 10) == [0, 1, 0, 1, 2, 0, 1, 2, 3, 4]


SCHEDULES = [
    optim.constant_schedule(0.3),
    optim.linear_schedule(0.1, 0.3, 7),
    optim.cosine_decay_schedule(0.3, 9),
    optim.warmup_constant_schedule(0.0, 0.3, 3),
    optim.warmup_linear_decay_schedule(0.0, 0.3, 3, 9),
    optim.warmup_cosine_decay_schedule(0.0, 0.3, 3, 9),
    optim.polynomial_schedule(0.3, 0.0, 2, 7),
    optim.exponential_decay(0.3, 2, 0.5, staircase=True, end_value=0.01),
    optim.piecewise_constant_schedule(0.3, {2: 0.5, 8: 0.1}),
    optim.sgdr_schedule([{"init_value": 0.0, "peak_value": 0.3, "warmup_steps": n, "decay_steps": 4} for n in (1, 0)]),
    optim.linear_onecycle_schedule(20, 0.3),
    optim.cosine_onecycle_schedule(20, 0.3),
]


@pytest.mark.parametrize(
    "schedule", [pytest.param(x, marks=pytest.mark.nightly if i % 3 else ()) for i, x in enumerate(SCHEDULES)]
)
def test_ints_and_tensors_agree_and_give_float32_scalars(schedule: Schedule) -> None:
    for n in (0, 2, 3, 8, 100):
        for dtype in (torch.int32, torch.int64):
            rate = schedule(torch.tensor(n, dtype=dtype))
            assert rate.shape == () and rate.dtype == torch.float32
            assert torch.equal(rate, schedule(n))
    assert schedule(torch.tensor(3, device="meta")).device.type == "meta"


def test_counts_beyond_float32() -> None:
    rate = optim.linear_schedule(-0.5, 0.5, 1 << 26)((1 << 25) + 1)
    assert rate.item() == 2.0**-26


@pytest.mark.parametrize("size", [None, -5, 0, 2.5, True])
@pytest.mark.parametrize(
    "make",
    [
        lambda size: optim.linear_schedule(0.0, 1.0, size),
        pytest.param(lambda size: optim.cosine_decay_schedule(1.0, size), marks=pytest.mark.nightly),
        pytest.param(lambda size: optim.warmup_constant_schedule(0.0, 1.0, size), marks=pytest.mark.nightly),
        lambda size: optim.warmup_linear_decay_schedule(0.0, 1.0, size, 10),
        pytest.param(lambda size: optim.warmup_cosine_decay_schedule(0.0, 1.0, size, 10), marks=pytest.mark.nightly),
        pytest.param(lambda size: optim.warmup_cosine_decay_schedule(0.0, 1.0, 3, size), marks=pytest.mark.nightly),
        lambda size: optim.join_schedules([optim.constant_schedule(1.0)] * 2, [size]),
        pytest.param(lambda size: optim.polynomial_schedule(0.0, 1.0, 2, size), marks=pytest.mark.nightly),
        pytest.param(lambda size: optim.exponential_decay(1.0, size, 0.5), marks=pytest.mark.nightly),
        lambda size: optim.piecewise_constant_schedule(1.0, {size: 0.5}),
        pytest.param(lambda size: optim.linear_onecycle_schedule(size, 1.0), marks=pytest.mark.nightly),
        pytest.param(lambda size: optim.cosine_onecycle_schedule(size, 1.0), marks=pytest.mark.nightly),
    ],
)
def test_sizes_below_1_are_refused(make: Callable[[object], Schedule], size: object) -> None:
    # A value of another type is stopped by the shape checks already, where these are on.
    with pytest.raises((ValueError, TypeError)):
        make(size)


@pytest.mark.parametrize("size", [0, -5])
def test_refusals_name_the_argument(size: int) -> None:
    with pytest.raises(ValueError, match=f"warmup_constant_schedule: warmup_steps={size} must be an int >= 1"):
        optim.warmup_constant_schedule(0.0, 1.0, size)


def test_other_refusals() -> None:
    with pytest.raises(ValueError, match=r"must be above warmup_steps=10, got 10. Did you mean 20"):
        optim.warmup_cosine_decay_schedule(0.0, 1.0, 10, 10)
    with pytest.raises(ValueError, match="peak_value=0"):
        optim.warmup_cosine_decay_schedule(0.0, 0.0, 10, 20)
    with pytest.raises(ValueError, match="must increase"):
        optim.join_schedules([optim.constant_schedule(1.0)] * 3, [5, 5])
    with pytest.raises(ValueError, match="boundaries"):
        optim.join_schedules([optim.constant_schedule(1.0)] * 3, [5])
    with pytest.raises(ValueError, match="value=nan"):
        optim.constant_schedule(math.nan)
    with pytest.raises(ValueError, match=r"polynomial_schedule: power=-1 must be a finite number > 0"):
        optim.polynomial_schedule(1.0, 0.0, -1, 5)
    with pytest.raises(ValueError, match=r"exponential_decay: decay_rate=0.0 must be a finite number > 0"):
        optim.exponential_decay(1.0, 5, 0.0)
    with pytest.raises(ValueError, match=r"the scale at 3=-0.5 must be a finite number >= 0"):
        optim.piecewise_constant_schedule(1.0, {3: -0.5})
    with pytest.raises(ValueError, match="at least one cycle"):
        optim.sgdr_schedule([])
    with pytest.raises(ValueError, match=r"would end at the counts \[0, 0, 1\], which must increase"):
        optim.linear_onecycle_schedule(1, 1.0)
    with pytest.raises(ValueError, match="transition_begin=-1"):
        optim.linear_schedule(0.0, 1.0, 3, -1)
