"""Loss scales: keep float16 gradients from underflow to 0.

    gradient of (scale * loss), in float16  ->  divided by scale, in float32  ->  norm, clipping, update

A step whose gradients are not finite is skipped. The scale then follows `update(state, finite) -> state`, a pure
function. Gradients are divided by the same scale. The scale changes after the step. Micikevicius et al., Mixed
Precision Training, 2017, https://arxiv.org/abs/1710.03740

`apply_if_finite` skips steps with a gradient that is not finite, without a scale.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from shardfn import core
from shardfn._torch import FakeTensor
from shardfn.collectives import transforming

from . import _base as base
from ._checks import check_positive
from ._elementwise import select_tree, vary_number
from ._leaves import check_state, spec_leaves, zero_count
from ._needs import add_measure, bind_stats, join_needs, refuse_phases
from ._norm import over_blocks
from ._pair import apply_updates, as_transformation, inplace


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
                " the learning rate, compute in bfloat16, or pass a lower min_scale (raise_at_min=False continues)."
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


class ApplyIfFiniteState(NamedTuple):
    """Counts of gradients that were not finite.

    Attributes:
        notfinite_count: int32, 0-d: consecutive gradients until now that were not finite.
        last_finite: bool, 0-d: whether the last gradient was finite.
        total_notfinite: int32, 0-d: all gradients that were not finite.
        inner_state: the state of the rule.
    """

    notfinite_count: Int[Tensor, ""]
    last_finite: Bool[Tensor, ""]
    total_notfinite: Int[Tensor, ""]
    inner_state: base.OptState


def apply_if_finite(
    inner: base.GradientTransformation | base.Pair, max_consecutive_errors: int
) -> base.GradientTransformation:
    """Skips a step, including the state of `inner`, if an element of the gradient is infinite or NaN.

    After `max_consecutive_errors` skipped steps in a row, the next step is made nevertheless, so that a failed run
    fails visibly. For example, with 2 the third bad step in a row is made. All ranks decide equally: elements that are
    not finite are counted over all blocks. Put a clip inside. A clip before the rule skips the same steps, because the
    norm makes every element NaN.

    `sharded_step(skip_nonfinite=True)` also tests the loss, skips any number of steps, and counts no steps.

    Args:
        inner: the wrapped optimizer.
        max_consecutive_errors: number of consecutive steps that may be skipped, >= 0.

    Returns:
        The corresponding `GradientTransformation`, with an `ApplyIfFiniteState` as state.

    Raises:
        ValueError: the number is not an int >= 0, or the rule averages gradients for itself.

    Example:
        >>> from shardfn.optim import sgd
        >>> tx, w = apply_if_finite(sgd(1.0), max_consecutive_errors=1), [torch.zeros(1)]
        >>> bad, state = [torch.tensor([torch.nan])], tx.init(w)
        >>> first, state = tx.update(bad, state, w)
        >>> first, tx.update(bad, state, w)[0]
        ([tensor([0.])], [tensor([nan])])
    """
    most = max_consecutive_errors
    if isinstance(most, bool) or not isinstance(most, int) or most < 0:
        raise ValueError(f"apply_if_finite: max_consecutive_errors={most!r} must be an int >= 0.")
    tx = as_transformation(inner)
    refuse_phases("apply_if_finite", tx)
    return _ApplyIfFinite(tx, most).rule()


def count_not_finite(block: Tensor) -> Tensor:
    """Returns the number of elements of a block that are infinite or NaN."""
    return (~block.isfinite()).sum().float()


@dataclass(frozen=True, eq=False)
class _ApplyIfFinite:
    """The rule, in a step where `bad` elements of all gradients are not finite. None: not counted yet.

    Compared by identity, because tensors cannot be compared.
    """

    tx: base.GradientTransformation
    most: int
    bad: Tensor | None = None

    def rule(self) -> base.GradientTransformation:
        """Returns the optimizer as a `GradientTransformation`."""
        needs = join_needs([self.tx], lambda tx: replace(self, tx=tx).rule(), states=lambda s: (s.inner_state,))
        needs = add_measure(needs, self.tx.needs.measure, count_not_finite, self.bind)
        needs = needs._replace(ascends=self.tx.needs.ascends)
        return base.GradientTransformation(self.init, self.update, self.apply, needs)

    def bind(self, params: base.Params, stats: Tensor | None, phase: base.Phase | None) -> base.GradientTransformation:
        bad = None if stats is None else stats.sum()
        return replace(self, tx=bind_stats(self.tx, params, None, phase), bad=bad).rule()

    def init(self, params: base.Params) -> ApplyIfFiniteState:
        count = zero_count(params)
        finite = torch.ones((), dtype=torch.bool, device=count.device)
        return ApplyIfFiniteState(count, finite, count.clone(), self.tx.init(params))

    def update(
        self, updates: base.Updates, state: base.OptState, params: base.Params = None, *, specs: base.Specs = None
    ) -> tuple[base.Updates, base.OptState]:
        finite, steps, counts = self._count_step(updates, state, specs)
        us, inner = self.tx.update(updates, state.inner_state, params, specs=specs)
        leaves, treedef = core.tree_flatten(us)
        rows = zip(leaves, vary_number(leaves, steps, us, specs), strict=True)
        us = core.tree_unflatten(treedef, [torch.where(s, u, 0.0).to(u.dtype) for u, s in rows])
        inner = select_tree(steps, inner, state.inner_state)
        return us, ApplyIfFiniteState(counts[0], finite, counts[1], inner)

    @torch.no_grad()
    def apply(
        self, grads: base.Updates, state: base.OptState, params: base.Params, *, specs: base.Specs = None
    ) -> tuple[base.Params, base.OptState]:
        finite, steps, counts = self._count_step(grads, state, specs)
        inner = state.inner_state
        if transforming() or isinstance(steps, FakeTensor) or steps.is_meta:  # the value cannot be read
            params, inner = self._select_updates(grads, state, params, specs)
        elif bool(steps):
            params, inner = inplace(self.tx)(grads, inner, params, specs=specs)
        old = (state.notfinite_count, state.last_finite, state.total_notfinite)
        for x, new in zip(old, (counts[0], finite, counts[1]), strict=True):
            x.copy_(new)
        return params, state._replace(inner_state=inner)

    def _select_updates(
        self, grads: base.Updates, state: base.OptState, params: base.Params, specs: base.Specs
    ) -> tuple[base.Params, base.OptState]:
        """Returns the pure update, written into the buffers that were given."""
        us, new = self.update(grads, state, params, specs=specs)
        fresh = core.tree_leaves((apply_updates(params, us), new.inner_state))
        for x, y in zip(core.tree_leaves((params, state.inner_state)), fresh, strict=True):
            x.copy_(y)
        return params, state.inner_state

    def _count_step(
        self, grads: base.Updates, state: base.OptState, specs: base.Specs
    ) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
        """Returns whether the gradients are finite, whether the step is made, and the new counts."""
        check_state("apply_if_finite", state, ApplyIfFiniteState)
        bad = self._count_nonfinite(grads, specs) if self.bad is None else self.bad
        finite = (bad == 0).to(state.notfinite_count.device)
        row = torch.where(finite, 0, state.notfinite_count + 1)
        total = state.total_notfinite + (~finite).to(torch.int32)
        return finite, finite | (row > self.most), (row, total)

    def _count_nonfinite(self, grads: base.Updates, specs: base.Specs) -> Tensor:
        leaves: list[Any] = core.tree_leaves(grads)
        if not leaves:
            return torch.zeros(())
        local = torch.stack([count_not_finite(g) for g in leaves])
        return (local if specs is None else over_blocks(local, spec_leaves(specs, grads))).sum()
