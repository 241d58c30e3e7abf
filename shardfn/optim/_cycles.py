"""Schedules in pieces: constants, warm restarts, and one-cycle schedules. The names and arguments are optax's."""

import itertools
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from shardfn.core import explains_keywords

from ._checks import finite, not_negative, num_steps, positive
from ._schedules import (
    MEANT_BY_SCHEDULES,
    cosine_decay_schedule,
    float_count,
    join_schedules,
    warmup_cosine_decay_schedule,
)
from ._types import Count, Number, Schedule


def piecewise_constant_schedule(
    init_value: Number, boundaries_and_scales: Mapping[int, float | int] | None = None
) -> Schedule:
    """Constants: from each boundary on, the value is multiplied by the boundary's scale.

    Args:
        init_value: the value before the first boundary.
        boundaries_and_scales: count, >= 1 -> factor, >= 0. None: there are no boundaries.

    Raises:
        ValueError: a boundary is not an int >= 1, a scale is negative, or a number is not finite.

    Example:
        >>> schedule = piecewise_constant_schedule(1.0, {2: 0.5, 4: 0.5})
        >>> [schedule(n).item() for n in range(6)]
        [1.0, 1.0, 0.5, 0.5, 0.25, 0.25]
    """
    finite("piecewise_constant_schedule", init_value=init_value)
    pieces = sorted((boundaries_and_scales or {}).items())
    for boundary, scale in pieces:
        num_steps("piecewise_constant_schedule", boundary=boundary)
        not_negative("piecewise_constant_schedule", **{f"the scale at {boundary}": scale})

    def schedule_fn(count: Count) -> Float[Tensor, ""]:
        n = float_count(count)
        value = n * 0 + init_value
        for boundary, scale in pieces:
            value = torch.where(n < boundary, value, value * scale)
        return value.float()

    return schedule_fn


def sgdr_schedule(cosine_kwargs: Iterable[Mapping[str, Any]]) -> Schedule:
    """Cosine decay with warm restarts: a sequence of `warmup_cosine_decay_schedule`s with separate arguments.

    Args:
        cosine_kwargs: the arguments of each cycle, by name. For example, `warmup_steps=0` begins a cycle at
            `peak_value`.

    Raises:
        ValueError: there is no cycle, or a cycle's arguments are out of range. See `warmup_cosine_decay_schedule`.
        TypeError: a cycle lacks an argument, or has an unknown one.

    Example:
        >>> cycle = {"init_value": 0.0, "peak_value": 1.0, "warmup_steps": 1, "decay_steps": 3}
        >>> [round(sgdr_schedule([cycle, cycle])(n).item(), 6) for n in range(6)]
        [0.0, 1.0, 0.5, 0.0, 1.0, 0.5]

    References:
        Loshchilov & Hutter, SGDR: Stochastic Gradient Descent with Warm Restarts, 2016,
            https://arxiv.org/abs/1608.03983
    """
    cycles = [dict(cycle) for cycle in cosine_kwargs]
    if not cycles:
        raise ValueError("sgdr_schedule: there are no cycles. Give the arguments of at least one.")
    schedules = [_cosine_cycle(**cycle) for cycle in cycles]
    ends = list(itertools.accumulate(cycle["decay_steps"] for cycle in cycles))
    return join_schedules(schedules, ends[:-1])


def _cosine_cycle(
    init_value: Number, peak_value: Number, warmup_steps: int, decay_steps: int, end_value: Number = 0.0,
    exponent: Number = 1.0,
) -> Schedule:  # fmt: skip
    if warmup_steps or not peak_value:  # a peak of 0 is refused by the schedule
        return warmup_cosine_decay_schedule(init_value, peak_value, warmup_steps, decay_steps, end_value, exponent)
    return cosine_decay_schedule(peak_value, decay_steps, end_value / peak_value, exponent)


@explains_keywords(**MEANT_BY_SCHEDULES | {"total_steps": "transition_steps={value!r}"})
def linear_onecycle_schedule(
    transition_steps: int,
    peak_value: Number,
    pct_start: float | int = 0.3,
    pct_final: float | int = 0.85,
    div_factor: float | int = 25.0,
    final_div_factor: float | int = 1e4,
) -> Schedule:
    """Returns three lines: up to the peak, down to the first value, and down to almost 0.

    The values are `peak / div_factor` at 0, `peak` at `pct_start * steps`, `peak / div_factor` at `pct_final * steps`,
    and `peak / (div_factor * final_div_factor)` from `transition_steps` on.

    Args:
        transition_steps: length of the whole, >= 1.
        peak_value: the largest value.
        pct_start: the part of the steps before the peak, in [0, 1). The boundaries are rounded down to counts.
        pct_final: the part of the steps before the last line, in (pct_start, 1).
        div_factor: the peak over the first value, > 0.
        final_div_factor: the first value over the last, > 0.

    Raises:
        ValueError: a number is out of range, or two boundaries have the same count.

    Example:
        >>> schedule = linear_onecycle_schedule(10, 1.0, 0.2, 0.6, div_factor=2.0, final_div_factor=4.0)
        >>> [schedule(n).item() for n in (0, 2, 4, 6, 10)]
        [0.5, 1.0, 0.75, 0.5, 0.125]

    References:
        Smith & Topin, Super-Convergence: Very Fast Training of Neural Networks Using Large Learning Rates, 2017,
        https://arxiv.org/abs/1708.07120
    """
    who = "linear_onecycle_schedule"
    num_steps(who, transition_steps=transition_steps)
    positive(who, div_factor=div_factor, final_div_factor=final_div_factor)
    ends = [int(pct_start * transition_steps), int(pct_final * transition_steps), transition_steps]
    scales = [div_factor, 1.0 / div_factor, 1.0 / final_div_factor]
    return _interpolate_pieces(who, peak_value / div_factor, ends, scales, lambda a, b, x: (b - a) * x + a)


@explains_keywords(**MEANT_BY_SCHEDULES | {"total_steps": "transition_steps={value!r}"})
def cosine_onecycle_schedule(
    transition_steps: int,
    peak_value: Number,
    pct_start: float | int = 0.3,
    div_factor: float | int = 25.0,
    final_div_factor: float | int = 1e4,
) -> Schedule:
    """Two half cosines: from `peak / div_factor` up to the peak at `pct_start * steps`, then down to almost 0.

    The last value, from `transition_steps` on, is `peak / (div_factor^2 * final_div_factor)`, as in optax.

    Args:
        transition_steps: length of the whole, >= 1.
        peak_value: the largest value.
        pct_start: the part of the steps before the peak, in [0, 1). The boundary is rounded down to a count.
        div_factor: the peak over the first value, > 0.
        final_div_factor: further factor of the last value, > 0.

    Raises:
        ValueError: a number is out of range, or two boundaries have the same count.

    Example:
        >>> schedule = cosine_onecycle_schedule(8, 1.0, 0.5, div_factor=2.0, final_div_factor=4.0)
        >>> [round(schedule(n).item(), 4) for n in (0, 2, 4, 8)]
        [0.5, 0.75, 1.0, 0.125]

    References:
        Smith & Topin, Super-Convergence: Very Fast Training of Neural Networks Using Large Learning Rates, 2017,
        https://arxiv.org/abs/1708.07120
    """
    who = "cosine_onecycle_schedule"
    num_steps(who, transition_steps=transition_steps)
    positive(who, div_factor=div_factor, final_div_factor=final_div_factor)
    ends, scales = (
        [int(pct_start * transition_steps), transition_steps],
        [div_factor, 1 / (div_factor * final_div_factor)],
    )
    return _interpolate_pieces(
        who, peak_value / div_factor, ends, scales, lambda a, b, x: b + (a - b) / 2 * (torch.cos(math.pi * x) + 1)
    )


def _interpolate_pieces(
    who: str, init_value: Number, ends: list[int], scales: list[float], between: Callable[[Any, Any, Tensor], Tensor]
) -> Schedule:
    """Interpolates from `init_value` at 0, piece by piece. Each piece multiplies the value by a scale."""
    finite(who, peak_value=init_value)
    if ends[0] < 0 or any(a >= b for a, b in itertools.pairwise(ends)):
        raise ValueError(
            f"{who}: its pieces would end at the counts {ends}, which must increase and not be negative. Give a"
            " pct_start >= 0, each pct larger than the one before it and below 1, and enough transition_steps."
        )
    values = list(itertools.accumulate(scales, lambda value, scale: value * scale, initial=init_value))
    pieces = list(zip([0, *ends], ends, values, values[1:], strict=False))

    def schedule_fn(count: Count) -> Float[Tensor, ""]:
        n = float_count(count)
        value = n * 0 + values[-1]
        for start, end, a, b in reversed(pieces):
            value = torch.where(n < end, between(a, b, (n - start) / max(end - start, 1)), value)
        return value.float()

    return schedule_fn
