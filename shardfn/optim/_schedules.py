"""Schedules: a count of steps to a learning rate.

A schedule takes a count (an int, or an int tensor on any device) and returns a float32 0-d tensor on the same device. A
schedule computes in float64 and never reads the count back to Python, so graphs can capture schedules. The names and
arguments are optax's.
"""

import itertools
import math
from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from shardfn.core import explains_keywords

from ._checks import finite, not_negative, num_steps, positive
from ._types import Count, Number, Schedule

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


def constant_schedule(value: Number) -> Schedule:
    """Returns a schedule with the same value at every step.

    Example:
        >>> constant_schedule(0.5)(7)
        tensor(0.5000)
    """
    finite("constant_schedule", value=value)
    return lambda count: (float_count(count) * 0 + value).float()


@explains_keywords(**MEANT_BY_SCHEDULES)
def linear_schedule(
    init_value: Number, end_value: Number, transition_steps: int, transition_begin: int = 0
) -> Schedule:
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
    finite("linear_schedule", init_value=init_value, end_value=end_value)
    num_steps("linear_schedule", transition_steps=transition_steps)
    not_negative("linear_schedule", transition_begin=transition_begin)

    def schedule_fn(count: Count) -> Float[Tensor, ""]:
        done = ((float_count(count) - transition_begin) / transition_steps).clamp(0, 1)
        return (init_value * (1 - done) + end_value * done).float()

    return schedule_fn


@explains_keywords(**MEANT_BY_SCHEDULES)
def polynomial_schedule(
    init_value: Number, end_value: Number, power: Number, transition_steps: int, transition_begin: int = 0
) -> Schedule:
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
    finite("polynomial_schedule", init_value=init_value, end_value=end_value)
    positive("polynomial_schedule", power=power)
    num_steps("polynomial_schedule", transition_steps=transition_steps)
    not_negative("polynomial_schedule", transition_begin=transition_begin)

    def schedule_fn(count: Count) -> Float[Tensor, ""]:
        left = 1 - ((float_count(count) - transition_begin) / transition_steps).clamp(0, 1)
        return ((init_value - end_value) * left**power + end_value).float()

    return schedule_fn


@explains_keywords(**MEANT_BY_SCHEDULES)
def exponential_decay(
    init_value: Number,
    transition_steps: int,
    decay_rate: float | int,
    transition_begin: int = 0,
    staircase: bool = False,
    end_value: Number | None = None,
) -> Schedule:
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
    finite("exponential_decay", init_value=init_value, **({} if end_value is None else {"end_value": end_value}))
    positive("exponential_decay", decay_rate=decay_rate)
    num_steps("exponential_decay", transition_steps=transition_steps)
    not_negative("exponential_decay", transition_begin=transition_begin)

    def schedule_fn(count: Count) -> Float[Tensor, ""]:
        times = (float_count(count) - transition_begin).clamp(min=0) / transition_steps
        value = init_value * decay_rate ** (times.floor() if staircase else times)
        if end_value is not None:
            value = value.clamp(min=end_value) if decay_rate < 1 else value.clamp(max=end_value)
        return value.float()

    return schedule_fn


@explains_keywords(**MEANT_BY_SCHEDULES)
def cosine_decay_schedule(
    init_value: Number, decay_steps: int, alpha: Number = 0.0, exponent: Number = 1.0
) -> Schedule:
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
    finite("cosine_decay_schedule", init_value=init_value, alpha=alpha)
    not_negative("cosine_decay_schedule", exponent=exponent)
    num_steps("cosine_decay_schedule", decay_steps=decay_steps)

    def schedule_fn(count: Count) -> Float[Tensor, ""]:
        done = (float_count(count) / decay_steps).clamp(0, 1)
        cosine = ((1 + torch.cos(math.pi * done)) / 2) ** exponent
        return (init_value * ((1 - alpha) * cosine + alpha)).float()

    return schedule_fn


@explains_keywords(**MEANT_BY_SCHEDULES)
def warmup_constant_schedule(init_value: Number, peak_value: Number, warmup_steps: int) -> Schedule:
    """Returns a line from `init_value` at 0 to `peak_value` at `warmup_steps`, then constant.

    Raises:
        ValueError: `warmup_steps` is 0, negative or None, or a value is not finite.

    Example:
        >>> [warmup_constant_schedule(0.0, 1.0, 2)(n).item() for n in range(4)]
        [0.0, 0.5, 1.0, 1.0]
    """
    num_steps("warmup_constant_schedule", warmup_steps=warmup_steps)
    return linear_schedule(init_value, peak_value, warmup_steps)


@explains_keywords(**MEANT_BY_SCHEDULES)
def warmup_linear_decay_schedule(
    init_value: Number, peak_value: Number, warmup_steps: int, decay_steps: int, end_value: Number = 0.0
) -> Schedule:
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
    init_value: Number,
    peak_value: Number,
    warmup_steps: int,
    decay_steps: int,
    end_value: Number = 0.0,
    exponent: Number = 1.0,
) -> Schedule:
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
    finite("warmup_cosine_decay_schedule", peak_value=peak_value, end_value=end_value)
    if peak_value == 0:
        raise ValueError("warmup_cosine_decay_schedule: peak_value=0 has no decay. Use linear_schedule.")
    up = linear_schedule(init_value, peak_value, warmup_steps)
    down = cosine_decay_schedule(peak_value, decay_steps - warmup_steps, end_value / peak_value, exponent)
    return join_schedules([up, down], [warmup_steps])


def join_schedules(schedules: Sequence[Schedule], boundaries: Sequence[int]) -> Schedule:
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
            f"{len(schedules)} schedules need {max(0, len(schedules) - 1)} boundaries, not {len(boundaries)}."
        )
    for boundary in boundaries:
        num_steps("join_schedules", boundary=boundary)
    if any(a >= b for a, b in itertools.pairwise(boundaries)):
        raise ValueError(f"join_schedules: boundaries={list(boundaries)} must increase.")

    def schedule_fn(count: Count) -> Float[Tensor, ""]:
        value = schedules[0](count)
        for start, piece in zip(boundaries, schedules[1:], strict=True):
            value = torch.where(float_count(count) < start, value, piece(count - start))
        return value

    return schedule_fn


def float_count(count: Count) -> Float[Tensor, ""]:
    """Returns a count in the dtype of schedules, float64."""
    return torch.as_tensor(count).to(torch.float64)


def _check_warmup(who: str, warmup_steps: int, decay_steps: int) -> None:
    num_steps(who, warmup_steps=warmup_steps, decay_steps=decay_steps)
    if decay_steps <= warmup_steps:
        raise ValueError(
            f"{who}: decay_steps={decay_steps} counts from 0 and must exceed warmup_steps={warmup_steps}."
            f" Did you mean {warmup_steps + decay_steps}?"
        )
