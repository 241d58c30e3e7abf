"""Loss scales: keep float16 gradients from underflow to 0.

    gradient of (scale * loss), in float16  ->  divided by scale, in float32  ->  norm, clipping, update

A step whose gradients are not finite is skipped. The scale then follows `update(state, finite) -> state`, a pure
function. Gradients are divided by the same scale. The scale changes after the step. Micikevicius et al., Mixed
Precision Training, 2017, https://arxiv.org/abs/1710.03740
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ._checks import check_positive


class LossScale(NamedTuple):
    """Rule for the scale of the loss.

    Attributes:
        init: `init() -> state`. A state has a field `scale`, float32, 0-d, on the CPU.
        update: `update(state, finite) -> state`: the state after a step with or without finite gradients. Pure.
        check: `check(state)` raises a `FloatingPointError` if training cannot continue. Reads the state on the host.
    """

    init: Callable[[], Any]
    update: Callable[[Any, Bool[Tensor, ""]], Any]
    check: Callable[[Any], None]


class StaticScaleState(NamedTuple):
    """State of `static_loss_scale`.

    Attributes:
        scale: the scale.
    """

    scale: Float[Tensor, ""]


class DynamicScaleState(NamedTuple):
    """State of `dynamic_loss_scale`.

    Attributes:
        scale: the scale of the next step.
        count: int64, 0-d: steps taken, including skipped steps.
        last_overflow: int64, 0-d: number of the last step that overflowed, or -1 without an overflow.
        hysteresis: int64, 0-d: remaining overflows until the scale falls.
        exhausted: whether the last step overflowed with the scale at the floor.
    """

    scale: Float[Tensor, ""]
    count: Int[Tensor, ""]  # pyright: ignore[reportIncompatibleMethodOverride]  # optax's name
    last_overflow: Int[Tensor, ""]
    hysteresis: Int[Tensor, ""]
    exhausted: Bool[Tensor, ""]


def static_loss_scale(scale: float | int) -> LossScale:
    """Returns a constant scale. A step that overflows is skipped.

    Args:
        scale: the factor, > 0. A power of two changes no bit of a gradient that neither overflows nor underflows.

    Raises:
        ValueError: the scale is not a finite number > 0.

    Example:
        >>> rule = static_loss_scale(1024)
        >>> rule.update(rule.init(), torch.tensor(False)).scale
        tensor(1024.)
    """
    check_positive("static_loss_scale", scale=scale)

    def init_fn() -> StaticScaleState:
        return StaticScaleState(torch.tensor(float(scale)))

    def update_fn(state: StaticScaleState, finite: Tensor) -> StaticScaleState:
        del finite
        return state

    return LossScale(init_fn, update_fn, lambda state: None)


def dynamic_loss_scale(
    init: float | int = 2.0**16,
    window: int = 1000,
    hysteresis: int = 2,
    consecutive: bool = False,
    min_scale: float | int = 1.0,
    factor: float | int = 2.0,
    raise_at_min: bool = True,
) -> LossScale:
    """Returns a scale that falls when gradients overflow, and grows otherwise.

    With `i` the number of the step and `l` the number of the last overflow (-1 at first):

        overflow:  hysteresis > 1:  hysteresis -= 1
                   else:            scale = max(scale / factor, min_scale)
        finite:    k = i - l - 1;  if k > 0 and k % window == 0:  scale *= factor, hysteresis refilled

    So the scale grows at the finite step number `window + 1` after an overflow, and then every `window` steps. After a
    fall the hysteresis stays used up, so that each further overflow lowers the scale: for example 65536, 32768, 16384.
    The only upper bound is float32's. The defaults and the trace are DeepSpeed's.

    Args:
        init: the first scale, > 0.
        window: steps between two growths.
        hysteresis: number of overflows that lower the scale, at first and after each growth. 1: every overflow lowers
            the scale.
        consecutive: whether any finite step refills the hysteresis.
        min_scale: the floor, > 0.
        factor: factor of growth and fall, > 1.
        raise_at_min: whether an overflow at the floor is an error, in `check`.

    Raises:
        ValueError: a number is out of range, or `init` is below the floor.
        FloatingPointError: (in `check`, which a step calls) gradients overflow with the scale at the floor.

    Example:
        >>> rule = dynamic_loss_scale(window=2, hysteresis=1)
        >>> state, scales = rule.init(), []
        >>> for finite in (False, True, True, True):
        ...     state = rule.update(state, torch.tensor(finite))
        ...     scales.append(state.scale.item())
        >>> scales
        [32768.0, 32768.0, 32768.0, 65536.0]

    References:
        Micikevicius et al., Mixed Precision Training, 2017, https://arxiv.org/abs/1710.03740
    """
    _check_settings(init, window, hysteresis, min_scale, factor)

    def init_fn() -> DynamicScaleState:
        number = lambda x: torch.tensor(x, dtype=torch.int64)  # noqa: E731
        return DynamicScaleState(
            torch.tensor(float(init)), number(0), number(-1), number(hysteresis), torch.tensor(False)
        )

    def update_fn(state: DynamicScaleState, finite: Tensor) -> DynamicScaleState:
        scale, i, last, left, _ = state
        clean = finite.to(scale.device)
        falls = ~clean & (left == 1)
        # Finite steps since the last overflow, without this step.
        stable = i - last - 1
        grows = clean & (stable > 0) & (stable % window == 0)
        refills = (clean & consecutive) | grows
        # An infinite scale would make every gradient overflow from then on.
        grown = torch.where((scale * factor).isfinite(), scale * factor, scale)
        return DynamicScaleState(
            torch.where(falls, (scale / factor).clamp(min=min_scale), torch.where(grows, grown, scale)),
            i + 1,
            torch.where(clean, last, i),
            torch.where(refills, hysteresis, torch.where(clean | falls, left, left - 1)),
            falls & (scale <= min_scale),
        )

    def check_state(state: DynamicScaleState) -> None:
        if raise_at_min and bool(state.exhausted):
            raise FloatingPointError(
                f"gradients overflow although the loss scale is at its floor {min_scale}: the loss or its gradient is"
                " not finite, or too large for the compute dtype. Look for the first op that gives inf or nan, lower"
                " the learning rate, compute in bfloat16, or pass a lower min_scale (raise_at_min=False goes on)."
            )

    return LossScale(init_fn, update_fn, check_state)


def _check_settings(init: Any, window: Any, hysteresis: Any, min_scale: Any, factor: Any) -> None:
    check_positive("dynamic_loss_scale", init=init, min_scale=min_scale)
    for name, x in (("window", window), ("hysteresis", hysteresis)):
        if isinstance(x, bool) or not isinstance(x, int) or x < 1:
            raise ValueError(f"dynamic_loss_scale: {name} must be an integer >= 1, got {x!r}.")
    if not (math.isfinite(factor) and factor > 1):
        raise ValueError(f"dynamic_loss_scale: factor must be a finite number > 1, got {factor!r}.")
    if init < min_scale:
        raise ValueError(f"dynamic_loss_scale: init {init!r} is below min_scale {min_scale!r}.")
