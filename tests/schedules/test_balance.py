"""Covers `schedules.balance`: no cut has a cheaper most expensive stage, by an exhaustive search."""

import itertools
import random

import pytest

from shardfn.schedules import balance


def _stages(costs: list[float], cut: tuple[int, ...], first: float, last: float) -> list[float]:
    starts = [sum(cut[:i]) for i in range(len(cut))]
    out = [sum(costs[s : s + n]) for s, n in zip(starts, cut, strict=True)]
    out[0] += first
    out[-1] += last
    return out


def test_no_cut_is_cheaper() -> None:
    draw = random.Random(0)
    for _ in range(200):
        num, costs = draw.randint(1, 4), [float(draw.randint(0, 9)) for _ in range(draw.randint(4, 9))]
        first, last = float(draw.choice([0, 0, 7])), float(draw.choice([0, 5]))
        cuts = [
            tuple(b - a for a, b in itertools.pairwise((0, *inner, len(costs))))
            for inner in itertools.combinations(range(1, len(costs)), num - 1)
        ]

        def rank(cut: tuple[int, ...]) -> tuple[float, float, tuple[int, ...]]:
            by_stage = _stages(costs, cut, first, last)  # noqa: B023  # called within this turn
            return max(by_stage), sum(c * c for c in by_stage), cut

        assert balance(costs, num, first=first, last=last) == min(cuts, key=rank)


def test_a_hundred_layers_on_thirty_five_stages() -> None:
    cut = balance([1.0] * 105, 35, first=0.5, last=1.5)
    assert sum(cut) == 105 and len(cut) == 35 and cut[-1] == 2 and max(cut) == 4


@pytest.mark.parametrize(
    ("costs", "num", "said"),
    [
        ([1.0, 1.0], 3, "2 layers cannot be cut in 3 stages"),
        pytest.param([1.0], 0, "cannot", marks=pytest.mark.nightly),
        pytest.param([1.0, -1.0], 1, "not negative", marks=pytest.mark.nightly),
    ],
)
def test_layers_that_cannot_be_cut_are_refused(costs: list[float], num: int, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        balance(costs, num)
