"""Schedules: a count of steps to a learning rate.

A schedule takes a count (an int, or an int tensor on any device) and returns a float32 0-d tensor on the same device. A
schedule computes in float64 and never reads the count back to Python, so graphs can capture schedules. The names and
arguments are optax's.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from shardfn.core import explains_keywords

from . import _base as base
from ._checks import check_finite, check_not_negative, check_num_steps, check_positive

# Keywords of other libraries, and their names here.
MEANT_BY_SCHEDULES = {
    "lr": "init_value= or peak_value={value!r}",
    "learning_rate": "init_value= or peak_value={value!r}",
    "peak_lr": "peak_value={value!r}",
    "max_lr": "peak_value={value!r}",
    "min_lr": "end_value={value!r}",
    "warmup": "warmup_steps={value!r}",
    "num_warmup_steps": "warmup_steps={value!r}",
    "total_steps": "decay_steps={value!r}, the warm-up included",
    "num_training_steps": "decay_steps={value!r}, the warm-up included",
    "optimizer": "optim.adamw(schedule): a schedule is made first and passed to the optimizer",
}


def constant_schedule(value: base.Number) -> base.Schedule:
    """Returns a schedule with the same value at every step.

    Example:
        >>> constant_schedule(0.5)(7)
        tensor(0.5000)
    """
    check_finite("constant_schedule", value=value)
    return lambda count: (float_count(count) * 0 + value).float()


@explains_keywords(**MEANT_BY_SCHEDULES)
def linear_schedule(
    init_value: base.Number, end_value: base.Number, transition_steps: int, transition_begin: int = 0
) -> base.Schedule:
    """Returns a straight line: `init + (end - init) * clamp((count - begin) / steps, 0, 1)`.

    Args:
        init_value: the value up to `transition_begin`.
        end_value: the value from `transition_begin + transition_steps` on.
        transition_steps: length of the line, >= 1.
        transition_begin: count at which the transition starts, >= 0.

    Raises:
        ValueError: a length is 0, negative or None, or a value is not finite.

    Example:
        >>> linear_schedule(0.0, 1.0, 4)(torch.tensor(1))
        tensor(0.2500)
    """
    check_finite("linear_schedule", init_value=init_value, end_value=end_value)
    check_num_steps("linear_schedule", transition_steps=transition_steps)
    check_not_negative("linear_schedule", transition_begin=transition_begin)

    def schedule_fn(count: base.Count) -> Float[Tensor, ""]:
        done = ((float_count(count) - transition_begin) / transition_steps).clamp(0, 1)
        return (init_value * (1 - done) + end_value * done).float()

    return schedule_fn


@explains_keywords(**MEANT_BY_SCHEDULES)
def polynomial_schedule(
    init_value: base.Number,
    end_value: base.Number,
    power: base.Number,
    transition_steps: int,
    transition_begin: int = 0,
) -> base.Schedule:
    """Returns a power of a line: `(init - end) * (1 - clamp((count - begin) / steps, 0, 1)) ** power + end`.

    Args:
        init_value: the value up to `transition_begin`.
        end_value: the value from `transition_begin + transition_steps` on.
        power: power of the line, > 0. For example, 1 is `linear_schedule`.
        transition_steps: length of the transition, >= 1.
        transition_begin: count at which the transition starts, >= 0.

    Raises:
        ValueError: a length is 0, negative or None, the power is not positive, or a value is not finite.

    Example:
        >>> polynomial_schedule(1.0, 0.0, 2, 4)(2)
        tensor(0.2500)
    """
    check_finite("polynomial_schedule", init_value=init_value, end_value=end_value)
    check_positive("polynomial_schedule", power=power)
    check_num_steps("polynomial_schedule", transition_steps=transition_steps)
    check_not_negative("polynomial_schedule", transition_begin=transition_begin)

    def schedule_fn(count: base.Count) -> Float[Tensor, ""]:
        left = 1 - ((float_count(count) - transition_begin) / transition_steps).clamp(0, 1)
        return ((init_value - end_value) * left**power + end_value).float()

    return schedule_fn


@explains_keywords(**MEANT_BY_SCHEDULES)
def exponential_decay(
    init_value: base.Number,
    transition_steps: int,
    decay_rate: float | int,
    transition_begin: int = 0,
    staircase: bool = False,
    end_value: base.Number | None = None,
) -> base.Schedule:
    """Exponential decay or growth: `init * decay_rate ** (max(count - begin, 0) / steps)`.

    Args:
        init_value: the value up to `transition_begin`.
        transition_steps: the steps after which the value is multiplied by `decay_rate`, >= 1.
        decay_rate: factor, > 0. Above 1 the value grows.
        transition_begin: count at which the transition starts, >= 0.
        staircase: whether the exponent is rounded down, so that the value changes only every `transition_steps`.
        end_value: bound of the value: a lower bound if `decay_rate < 1`, else an upper bound. None: unbounded.

    Raises:
        ValueError: a length is 0, negative or None, the rate is not positive, or a value is not finite.

    Example:
        >>> exponential_decay(1.0, 2, 0.25)(1)
        tensor(0.5000)
    """
    check_finite("exponential_decay", init_value=init_value, **({} if end_value is None else {"end_value": end_value}))
    check_positive("exponential_decay", decay_rate=decay_rate)
    check_num_steps("exponential_decay", transition_steps=transition_steps)
    check_not_negative("exponential_decay", transition_begin=transition_begin)

    def schedule_fn(count: base.Count) -> Float[Tensor, ""]:
        times = (float_count(count) - transition_begin).clamp(min=0) / transition_steps
        value = init_value * decay_rate ** (times.floor() if staircase else times)
        if end_value is not None:
            value = value.clamp(min=end_value) if decay_rate < 1 else value.clamp(max=end_value)
        return value.float()

    return schedule_fn


@explains_keywords(**MEANT_BY_SCHEDULES)
def cosine_decay_schedule(
    init_value: base.Number, decay_steps: int, alpha: base.Number = 0.0, exponent: base.Number = 1.0
) -> base.Schedule:
    """Half a cosine: `init * ((1 - alpha) * ((1 + cos(pi * min(count / steps, 1))) / 2) ** exponent + alpha)`.

    Args:
        init_value: the value at 0.
        decay_steps: length of the decay, >= 1.
        alpha: the last value as a fraction of the first.
        exponent: power of the cosine term.

    Raises:
        ValueError: a length is 0, negative or None, or a value is not finite.

    Example:
        >>> cosine_decay_schedule(1.0, 10)(5)
        tensor(0.5000)

    References:
        Loshchilov & Hutter, SGDR: Stochastic Gradient Descent with Warm Restarts, 2016, https://arxiv.org/abs/1608.03983
    """
    check_finite("cosine_decay_schedule", init_value=init_value, alpha=alpha)
    check_not_negative("cosine_decay_schedule", exponent=exponent)
    check_num_steps("cosine_decay_schedule", decay_steps=decay_steps)

    def schedule_fn(count: base.Count) -> Float[Tensor, ""]:
        done = (float_count(count) / decay_steps).clamp(0, 1)
        cosine = ((1 + torch.cos(math.pi * done)) / 2) ** exponent
        return (init_value * ((1 - alpha) * cosine + alpha)).float()

    return schedule_fn


@explains_keywords(**MEANT_BY_SCHEDULES)
def warmup_constant_schedule(init_value: base.Number, peak_value: base.Number, warmup_steps: int) -> base.Schedule:
    """Returns a line from `init_value` at 0 to `peak_value` at `warmup_steps`, then constant.

    Raises:
        ValueError: `warmup_steps` is 0, negative or None, or a value is not finite.

    Example:
        >>> [warmup_constant_schedule(0.0, 1.0, 2)(n).item() for n in range(4)]
        [0.0, 0.5, 1.0, 1.0]
    """
    check_num_steps("warmup_constant_schedule", warmup_steps=warmup_steps)
    return linear_schedule(init_value, peak_value, warmup_steps)


@explains_keywords(**MEANT_BY_SCHEDULES)
def warmup_linear_decay_schedule(
    init_value: base.Number, peak_value: base.Number, warmup_steps: int, decay_steps: int, end_value: base.Number = 0.0
) -> base.Schedule:
    """Returns a line up to `peak_value` at `warmup_steps`, then a line down to `end_value` at `decay_steps`.

    Args:
        init_value: the value at 0.
        peak_value: the value at `warmup_steps`.
        warmup_steps: length of the warm-up, >= 1.
        decay_steps: length of the whole, warm-up included.
        end_value: the value from `decay_steps` on.

    Raises:
        ValueError: a length is 0, negative or None, `decay_steps <= warmup_steps`, or a value is not finite.

    Example:
        >>> [warmup_linear_decay_schedule(0.0, 1.0, 2, 4)(n).item() for n in range(6)]
        [0.0, 0.5, 1.0, 0.5, 0.0, 0.0]
    """
    _check_warmup("warmup_linear_decay_schedule", warmup_steps, decay_steps)
    up = linear_schedule(init_value, peak_value, warmup_steps)
    down = linear_schedule(peak_value, end_value, decay_steps - warmup_steps)
    return join_schedules([up, down], [warmup_steps])


@explains_keywords(**MEANT_BY_SCHEDULES)
def warmup_cosine_decay_schedule(
    init_value: base.Number,
    peak_value: base.Number,
    warmup_steps: int,
    decay_steps: int,
    end_value: base.Number = 0.0,
    exponent: base.Number = 1.0,
) -> base.Schedule:
    """Returns a line up to `peak_value` at `warmup_steps`, then half a cosine down to `end_value` at `decay_steps`.

    Args:
        init_value: the value at 0.
        peak_value: the value at `warmup_steps`, not 0.
        warmup_steps: length of the warm-up, >= 1.
        decay_steps: length of the whole, warm-up included.
        end_value: the value from `decay_steps` on.
        exponent: power of the cosine term.

    Raises:
        ValueError: a length is 0, negative or None, `decay_steps <= warmup_steps`, or a value is not finite.

    Example:
        >>> [round(warmup_cosine_decay_schedule(0.0, 1.0, 2, 6)(n).item(), 6) for n in (0, 2, 4, 6)]
        [0.0, 1.0, 0.5, 0.0]
    """
    _check_warmup("warmup_cosine_decay_schedule", warmup_steps, decay_steps)
    check_finite("warmup_cosine_decay_schedule", peak_value=peak_value, end_value=end_value)
    if peak_value == 0:
        raise ValueError("warmup_cosine_decay_schedule: peak_value=0 has no decay. Use linear_schedule.")
    up = linear_schedule(init_value, peak_value, warmup_steps)
    down = cosine_decay_schedule(peak_value, decay_steps - warmup_steps, end_value / peak_value, exponent)
    return join_schedules([up, down], [warmup_steps])


def join_schedules(schedules: Sequence[base.Schedule], boundaries: Sequence[int]) -> base.Schedule:
    """Joins schedules: schedule `i` is used from `boundaries[i - 1]` on, and counts from there.

    Args:
        schedules: the pieces.
        boundaries: counts at which each piece after the first begins, increasing and >= 1, for example [100, 1000] for
            three pieces.

    Raises:
        ValueError: the number of boundaries is not the number of pieces minus 1, or boundaries do not increase.

    Example:
        >>> joined = join_schedules([constant_schedule(1.0), constant_schedule(0.1)], [10])
        >>> joined(9), joined(10)
        (tensor(1.), tensor(0.1000))
    """
    if not schedules or len(boundaries) != len(schedules) - 1:
        raise ValueError(
            f"{len(schedules)} schedules need {max(0, len(schedules) - 1)} boundaries, got {len(boundaries)}."
        )
    for boundary in boundaries:
        check_num_steps("join_schedules", boundary=boundary)
    if any(a >= b for a, b in itertools.pairwise(boundaries)):
        raise ValueError(f"join_schedules: boundaries={list(boundaries)} must increase.")

    def schedule_fn(count: base.Count) -> Float[Tensor, ""]:
        value = schedules[0](count)
        for start, piece in zip(boundaries, schedules[1:], strict=True):
            value = torch.where(float_count(count) < start, value, piece(count - start))
        return value

    return schedule_fn


def float_count(count: base.Count) -> Float[Tensor, ""]:
    """Returns a count in the dtype of schedules, float64."""
    return torch.as_tensor(count).to(torch.float64)


def _check_warmup(who: str, warmup_steps: int, decay_steps: int) -> None:
    check_num_steps(who, warmup_steps=warmup_steps, decay_steps=decay_steps)
    if decay_steps <= warmup_steps:
        raise ValueError(
            f"{who}: decay_steps includes the warmup and must be above warmup_steps={warmup_steps}, got {decay_steps}."
            f" Did you mean {warmup_steps + decay_steps}?"
        )


def piecewise_constant_schedule(
    init_value: base.Number, boundaries_and_scales: Mapping[int, float | int] | None = None
) -> base.Schedule:
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
    check_finite("piecewise_constant_schedule", init_value=init_value)
    pieces = sorted((boundaries_and_scales or {}).items())
    for boundary, scale in pieces:
        check_num_steps("piecewise_constant_schedule", boundary=boundary)
        check_not_negative("piecewise_constant_schedule", **{f"the scale at {boundary}": scale})

    def schedule_fn(count: base.Count) -> Float[Tensor, ""]:
        n = float_count(count)
        value = n * 0 + init_value
        for boundary, scale in pieces:
            value = torch.where(n < boundary, value, value * scale)
        return value.float()

    return schedule_fn


def sgdr_schedule(cosine_kwargs: Iterable[Mapping[str, Any]]) -> base.Schedule:
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
        raise ValueError("sgdr_schedule needs the arguments of at least one cycle.")
    schedules = [_cosine_cycle(**cycle) for cycle in cycles]
    ends = list(itertools.accumulate(cycle["decay_steps"] for cycle in cycles))
    return join_schedules(schedules, ends[:-1])


def _cosine_cycle(
    init_value: base.Number, peak_value: base.Number, warmup_steps: int, decay_steps: int, end_value: base.Number = 0.0,
    exponent: base.Number = 1.0,
) -> base.Schedule:  # fmt: skip
    if warmup_steps or not peak_value:  # a peak of 0 is refused by the schedule
        return warmup_cosine_decay_schedule(init_value, peak_value, warmup_steps, decay_steps, end_value, exponent)
    return cosine_decay_schedule(peak_value, decay_steps, end_value / peak_value, exponent)


@explains_keywords(**MEANT_BY_SCHEDULES | {"total_steps": "transition_steps={value!r}"})
def linear_onecycle_schedule(
    transition_steps: int,
    peak_value: base.Number,
    pct_start: float | int = 0.3,
    pct_final: float | int = 0.85,
    div_factor: float | int = 25.0,
    final_div_factor: float | int = 1e4,
) -> base.Schedule:
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
    check_num_steps(who, transition_steps=transition_steps)
    check_positive(who, div_factor=div_factor, final_div_factor=final_div_factor)
    ends = [int(pct_start * transition_steps), int(pct_final * transition_steps), transition_steps]
    scales = [div_factor, 1.0 / div_factor, 1.0 / final_div_factor]
    return _interpolate_pieces(who, peak_value / div_factor, ends, scales, lambda a, b, x: (b - a) * x + a)


@explains_keywords(**MEANT_BY_SCHEDULES | {"total_steps": "transition_steps={value!r}"})
def cosine_onecycle_schedule(
    transition_steps: int,
    peak_value: base.Number,
    pct_start: float | int = 0.3,
    div_factor: float | int = 25.0,
    final_div_factor: float | int = 1e4,
) -> base.Schedule:
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
    check_num_steps(who, transition_steps=transition_steps)
    check_positive(who, div_factor=div_factor, final_div_factor=final_div_factor)
    ends, scales = (
        [int(pct_start * transition_steps), transition_steps],
        [div_factor, 1 / (div_factor * final_div_factor)],
    )
    return _interpolate_pieces(
        who, peak_value / div_factor, ends, scales, lambda a, b, x: b + (a - b) / 2 * (torch.cos(math.pi * x) + 1)
    )


def _interpolate_pieces(
    who: str,
    init_value: base.Number,
    ends: list[int],
    scales: list[float],
    between: Callable[[Any, Any, Tensor], Tensor],
) -> base.Schedule:
    """Interpolates from `init_value` at 0, piece by piece. Each piece multiplies the value by a scale."""
    check_finite(who, peak_value=init_value)
    if ends[0] < 0 or any(a >= b for a, b in itertools.pairwise(ends)):
        raise ValueError(
            f"{who}: its pieces would end at the counts {ends}, which must increase and not be negative. Give a"
            " pct_start >= 0, each pct larger than the one before it and below 1, and enough transition_steps."
        )
    values = list(itertools.accumulate(scales, lambda value, scale: value * scale, initial=init_value))
    pieces = list(zip([0, *ends], ends, values, values[1:], strict=False))

    def schedule_fn(count: base.Count) -> Float[Tensor, ""]:
        n = float_count(count)
        value = n * 0 + values[-1]
        for start, end, a, b in reversed(pieces):
            value = torch.where(n < end, between(a, b, (n - start) / max(end - start, 1)), value)
        return value.float()

    return schedule_fn
