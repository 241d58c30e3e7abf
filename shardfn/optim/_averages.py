"""Averages of parameters: a moving average, lookahead, and schedule-free steps.

`average_params`: a moving average of the parameters, in addition to the rule that trains the parameters.

`lookahead`: a fast rule steps, and every few steps slow parameters move a part of the way to the fast parameters.

`schedule_free`: an average in place of a decaying learning rate.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from shardfn import core

from . import _base as base
from ._adam import bias_corrections
from ._checks import check_decay_rate, check_not_negative, check_num_steps, check_positive
from ._elementwise import map_leaves, select_tree, vary_number
from ._learning_rate import check_rate, evaluate_schedule
from ._leaves import check_params, check_state, leaves_like, wide, zero_count, zeros_like
from ._needs import join_needs, refuse_phases
from ._norm import dtype_of_squares
from ._pair import apply_updates, as_transformation, inplace

Decay = base.Number | Callable[[Tensor], Any]


class AverageParamsState(NamedTuple):
    """Average, and the state of the rule that trains.

    Attributes:
        count: int32, 0-d: steps taken.
        average: tree like params, float32 at least.
        inner: the state of the rule.
    """

    count: Int[Tensor, ""]  # pyright: ignore[reportIncompatibleMethodOverride]  # as in all states
    average: core.PyTree
    inner: base.OptState


def average_params(
    inner: base.GradientTransformation | base.Pair, decay: Decay = 0.999, *, debias: bool = False
) -> base.GradientTransformation:
    """Trains by `inner` and averages the parameters: `a = decay a + (1 - decay) p`, with `a` = the first parameters.

    With `debias` the first parameters have no weight: `a = m / (1 - decay^t)`, where `m = decay m + (1 - decay) p`
    begins at zero, as optax's `ema` averages updates. The state holds `a`, computed as `a = r a + (1 - r) p` with the
    rate `r = decay (1 - decay^(t-1)) / (1 - decay^t)`.

    The average is a part of the optimizer's state: sharded, offloaded, saved and restored with the state. With master
    copies, the copies are averaged. `sf.eval_state(state)` is the state to evaluate and export. Put the rule outermost,
    so that the average uses the parameters after the whole step.

    Args:
        inner: the wrapped optimizer.
        decay: a number in [0, 1), or a function of the number of steps taken before: `lambda t: t / (t + 1)` gives the
            mean of the parameters after each step.
        debias: whether the weight of the first parameters is removed. `decay` must then be a number.

    Returns:
        The corresponding `GradientTransformation`, with an `AverageParamsState` as state.

    Raises:
        ValueError: `decay` is outside [0, 1), or a function although `debias` is set.

    Example:
        >>> from shardfn.optim import sgd
        >>> tx, w = average_params(sgd(1.0), decay=0.5), [torch.zeros(1)]
        >>> w, state = tx.apply([torch.ones(1)], tx.init(w), w)
        >>> w, state.average
        ([tensor([-1.])], [tensor([-0.5000])])

    References:
        Polyak & Juditsky, Acceleration of Stochastic Approximation by Averaging, 1992;
        Izmailov et al., Averaging Weights Leads to Wider Optima, 2018, https://arxiv.org/abs/1803.05407
    """
    if not callable(decay):
        check_decay_rate("average_params", decay=decay)
        return _AverageParams(as_transformation(inner), _debiased_rates(decay) if debias else decay).rule()
    if debias:
        raise ValueError(
            "average_params(debias=True) expected a number as decay, got a function. Let the function return 0 for t ="
            " 0, so that the first parameters have no weight, or leave debias out."
        )
    return _AverageParams(as_transformation(inner), decay).rule()


def _debiased_rates(decay: base.Number) -> Decay:
    """Returns the rates of an average without the first value. The first rate is 0."""

    def rate_at(count: Tensor) -> Tensor:
        before, after = (bias_corrections(t, decay, decay)[0] for t in (count, count + 1))
        return decay * before / after

    return rate_at


@dataclass(frozen=True, eq=False)
class _AverageParams:
    tx: base.GradientTransformation
    decay: Decay

    def rule(self) -> base.GradientTransformation:
        """Returns the optimizer as a `GradientTransformation`."""
        needs = join_needs([self.tx], lambda tx: _AverageParams(tx, self.decay).rule(), states=lambda s: (s.inner,))
        return base.GradientTransformation(
            self.init, self.update, self.apply, needs._replace(ascends=self.tx.needs.ascends)
        )

    def init(self, params: base.Params) -> AverageParamsState:
        # Copies: the average must not share the memory of parameters that are written.
        average = core.tree_map(lambda p: p.detach().to(wide(p).dtype, copy=True), params)
        return AverageParamsState(zero_count(params), average, self.tx.init(params))

    def update(
        self, updates: base.Updates, state: base.OptState, params: base.Params = None, *, specs: base.Specs = None
    ) -> tuple[base.Updates, base.OptState]:
        check_params("average_params", params)
        old = self._leaf_columns(state, params)[0]
        updates, inner = self.tx.update(updates, state.inner, params, specs=specs)
        new, treedef = core.tree_flatten(apply_updates(params, updates))
        rows = zip(old, new, self._leaf_rates(state, params, specs), strict=True)
        average = [(d * a + (1 - d) * p.to(a.dtype)).to(a.dtype) for a, p, d in rows]
        return updates, AverageParamsState(state.count + 1, core.tree_unflatten(treedef, average), inner)

    @torch.no_grad()
    def apply(
        self, grads: base.Updates, state: base.OptState, params: base.Params, *, specs: base.Specs = None
    ) -> tuple[base.Params, base.OptState]:
        old, treedef = self._leaf_columns(state, params)
        rates = self._leaf_rates(state, params, specs)
        params, inner = inplace(self.tx)(grads, state.inner, params, specs=specs)
        for a, p, d in zip(old, leaves_like(params, treedef, "params", "params"), rates, strict=True):
            a.mul_(d).add_((1 - d) * p.to(a.dtype))
        return params, AverageParamsState(state.count.add_(1), state.average, inner)

    def _leaf_columns(self, state: base.OptState, params: base.Params) -> tuple[list[Tensor], Any]:
        check_state("average_params", state, AverageParamsState)
        treedef = core.tree_flatten(params)[1]
        return leaves_like(state.average, treedef, "state.average", "params"), treedef

    def _leaf_rates(self, state: AverageParamsState, params: base.Params, specs: base.Specs) -> list[Any]:
        """Returns the decay for each leaf."""
        decay = self.decay(state.count.clone()) if callable(self.decay) else self.decay
        return vary_number(core.tree_flatten(params)[0], decay, params, specs)


class EmaState(NamedTuple):
    """Running average of updates.

    Attributes:
        count: int32, 0-d: steps taken.
        ema: tree like params.
    """

    count: Int[Tensor, ""]  # pyright: ignore[reportIncompatibleMethodOverride]  # optax's name
    ema: core.PyTree


def ema(decay: base.Number, debias: bool = True) -> base.GradientTransformation:
    """Averages updates: `m = decay m + (1 - decay) u`, `u = m / (1 - decay^t)`. For parameters see `average_params`.

    Args:
        decay: decay in [0, 1).
        debias: whether to divide by `1 - decay^t`.

    Returns:
        The corresponding `GradientTransformation`, with an `EmaState` as state.

    Raises:
        ValueError: `decay` is out of range.

    Example:
        >>> import torch
        >>> tx = ema(0.5)
        >>> tx.update([torch.ones(1)], tx.init([torch.zeros(1)]))[0]
        [tensor([1.])]
    """
    check_decay_rate("ema", decay=decay)

    def average_leaf(u: Tensor, ema: Tensor, decay: base.Number, by: Tensor) -> tuple[Tensor, Tensor]:
        m = decay * wide(ema) + (1 - decay) * wide(u)
        return (m / by if debias else m).to(ema.dtype), m.to(ema.dtype)

    def init_fn(params: base.Params) -> EmaState:
        return EmaState(zero_count(params), zeros_like(params))

    def update_fn(
        updates: base.Updates, state: base.OptState, params: base.Params = None, *, specs: base.Specs = None
    ) -> tuple[base.Updates, base.OptState]:
        del params
        check_state("ema", state, EmaState)
        count = state.count + 1
        by = bias_corrections(count, decay, decay)[0]
        us, new = map_leaves(average_leaf, 2, updates, of={"ema": state.ema}, specs=specs, decay=decay, by=by)
        return us, EmaState(count, new)

    return base.GradientTransformation(init_fn, update_fn, needs=base.Needs("element", ascends=True))


class LookaheadState(NamedTuple):
    """The slow parameters, and the state of the fast rule.

    Attributes:
        fast_state: the state of the fast rule.
        steps_since_sync: int32, 0-d: steps since slow and fast parameters were equal.
        slow: tree like params.
    """

    fast_state: base.OptState
    steps_since_sync: Int[Tensor, ""]
    slow: core.PyTree


def lookahead(
    fast_optimizer: base.GradientTransformation | base.Pair,
    sync_period: int,
    slow_step_size: base.Number,
    reset_state: bool = False,
) -> base.GradientTransformation:
    """Steps by a fast rule. Every `sync_period` steps `slow = slow + slow_step_size (p - slow)`, `p = slow`.

    Gradients are computed at the fast parameters, the parameters of the step. The slow parameters are a part of the
    optimizer's state (optax has pairs of parameters). `sf.eval_state(state)` is the state to evaluate and export. Put
    the rule outermost.

    Args:
        fast_optimizer: the wrapped optimizer.
        sync_period: number of fast steps for each step of the slow parameters, >= 1.
        slow_step_size: fraction of the way that the slow parameters move, > 0.
        reset_state: whether the state of the fast rule is reset after each slow step.

    Returns:
        The corresponding `GradientTransformation`, with a `LookaheadState` as state.

    Raises:
        ValueError: a number is out of range, or the rule averages gradients for itself.

    Example:
        >>> from shardfn.optim import inplace, sgd
        >>> tx, w = lookahead(sgd(1.0), sync_period=2, slow_step_size=0.5), [torch.zeros(1)]
        >>> state = tx.init(w)
        >>> for _ in range(2):
        ...     w, state = inplace(tx)([torch.ones(1)], state, w)
        >>> w, state.slow
        ([tensor([-1.])], [tensor([-1.])])

    References:
        Zhang et al., Lookahead Optimizer: k steps forward, 1 step back, 2019, https://arxiv.org/abs/1907.08610
    """
    check_num_steps("lookahead", sync_period=sync_period)
    check_positive("lookahead", slow_step_size=slow_step_size)
    tx = as_transformation(fast_optimizer)
    refuse_phases("lookahead", tx)
    return _Lookahead(tx, sync_period, slow_step_size, reset_state).rule()


@dataclass(frozen=True)
class _Lookahead:
    tx: base.GradientTransformation
    period: int
    size: base.Number
    reset: bool

    def rule(self) -> base.GradientTransformation:
        """Returns the optimizer as a `GradientTransformation`."""
        needs = join_needs([self.tx], lambda tx: replace(self, tx=tx).rule(), states=lambda s: (s.fast_state,))
        return base.GradientTransformation(self.init, self.update, needs=needs._replace(ascends=self.tx.needs.ascends))

    def init(self, params: base.Params) -> LookaheadState:
        return LookaheadState(
            self.tx.init(params), zero_count(params), core.tree_map(lambda p: p.detach().clone(), params)
        )

    def update(
        self, updates: base.Updates, state: base.OptState, params: base.Params = None, *, specs: base.Specs = None
    ) -> tuple[base.Updates, base.OptState]:
        check_params("lookahead", params)
        check_state("lookahead", state, LookaheadState)
        ps, treedef = core.tree_flatten(params)
        slow = leaves_like(state.slow, treedef, "state.slow", "params")
        updates, fast = self.tx.update(updates, state.fast_state, params, specs=specs)
        syncs = state.steps_since_sync == self.period - 1
        if self.reset:
            fast = select_tree(syncs, self.tx.init(params), fast)
        new = core.tree_flatten(apply_updates(params, updates))[0]
        us = leaves_like(updates, treedef, "updates", "params")
        out, after = list[Tensor](), list[Tensor]()
        for p, u, x, s, size in zip(ps, us, new, slow, vary_number(ps, self.size, params, specs), strict=True):
            step = wide(s) + size * (wide(x) - wide(s))
            after.append(torch.where(syncs, step, wide(s)).to(s.dtype))
            # In a dtype that holds the difference exactly, so that fast and slow parameters are equal afterwards.
            out.append(torch.where(syncs, step.to(s.dtype).double() - p.double(), u.double()))
        count = (state.steps_since_sync + 1) % self.period
        return core.tree_unflatten(treedef, out), LookaheadState(fast, count, core.tree_unflatten(treedef, after))


class ScheduleFreeState(NamedTuple):
    """The sequence that the rule steps.

    Attributes:
        step_count: int32, 0-d: steps taken.
        b1: 0-d: the part of the average in the parameters.
        weight_sum: 0-d: the sum of the weights of all steps.
        max_lr: 0-d: the largest learning rate so far.
        base_optimizer_state: the state of the rule.
        z: tree like params: the sequence.
    """

    step_count: Int[Tensor, ""]
    b1: Float[Tensor, ""]
    weight_sum: Float[Tensor, ""]
    max_lr: Float[Tensor, ""]
    base_optimizer_state: base.OptState
    z: core.PyTree


def schedule_free(
    base_optimizer: base.GradientTransformation | base.Pair,
    learning_rate: base.LearningRate,
    b1: float = 0.9,
    weight_lr_power: float = 2.0,
) -> base.GradientTransformation:
    """Trains at `y = (1 - b1) z + b1 x`, where the rule steps `z` and `x` is the average of all `z`.

    The weight of a step in the average is the largest learning rate so far to the power `weight_lr_power`. The
    parameters of the step are y. The parameters to evaluate and export are x, from `sf.eval_state(state)`. Use a rule
    without momentum, for example `adamw(lr, b1=0.0)`, and a learning rate that warms up and does not decay. Put the
    rule outermost.

    Args:
        base_optimizer: the rule that steps z.
        learning_rate: learning rate of the rule. A schedule is called with the number of this step, from 1 on, as in
            optax.
        b1: part of the average in y, in (0, 1).
        weight_lr_power: power of the learning rate in the weights, >= 0.

    Returns:
        The corresponding `GradientTransformation`, with a `ScheduleFreeState` as state.

    Raises:
        ValueError: a number is out of range, or the rule averages gradients for itself.

    Example:
        >>> from shardfn.optim import sgd
        >>> tx, w = schedule_free(sgd(1.0), 1.0, b1=0.5), [torch.zeros(1)]
        >>> tx.update([torch.ones(1)], tx.init(w), w)[0]
        [tensor([-1.], dtype=torch.float64)]

    References:
        Defazio et al., The Road Less Scheduled, 2024, https://arxiv.org/abs/2405.15682
    """
    check_rate("schedule_free", learning_rate)
    check_not_negative("schedule_free", weight_lr_power=weight_lr_power)
    if not 0 < b1 < 1:
        raise ValueError(f"schedule_free: b1={b1!r} must be a number in (0, 1).")
    tx = as_transformation(base_optimizer)
    refuse_phases("schedule_free", tx)
    return _ScheduleFree(tx, learning_rate, b1, weight_lr_power).rule()


@dataclass(frozen=True)
class _ScheduleFree:
    tx: base.GradientTransformation
    learning_rate: base.LearningRate
    b1: float
    power: float

    def rule(self) -> base.GradientTransformation:
        """Returns the optimizer as a `GradientTransformation`."""
        again = lambda tx: _ScheduleFree(tx, self.learning_rate, self.b1, self.power).rule()  # noqa: E731
        needs = join_needs([self.tx], again, states=lambda s: (s.base_optimizer_state,))
        return base.GradientTransformation(self.init, self.update, needs=needs._replace(ascends=self.tx.needs.ascends))

    def init(self, params: base.Params) -> ScheduleFreeState:
        count = zero_count(params)
        number = torch.zeros((), dtype=dtype_of_squares(core.tree_leaves(params)), device=count.device)
        b1 = torch.full_like(number, self.b1)
        z = core.tree_map(lambda p: p.detach().clone(), params)
        return ScheduleFreeState(count, b1, number, number.clone(), self.tx.init(params), z)

    def update(
        self, updates: base.Updates, state: base.OptState, params: base.Params = None, *, specs: base.Specs = None
    ) -> tuple[base.Updates, base.OptState]:
        check_params("schedule_free", params)
        check_state("schedule_free", state, ScheduleFreeState)
        ys, treedef = core.tree_flatten(params)
        old = leaves_like(state.z, treedef, "state.z", "params")
        count, total = state.step_count + 1, state.weight_sum
        rate = self.learning_rate
        lr = torch.as_tensor(
            evaluate_schedule(rate, count) if callable(rate) else rate, dtype=total.dtype, device=total.device
        )
        largest = torch.maximum(state.max_lr, lr)
        weight = largest**self.power
        total = total + weight
        # A rate of 0 until now has no weight.
        part = torch.where(total == 0, 0.0, weight / torch.where(total == 0, 1.0, total))
        updates, inner = self.tx.update(updates, state.base_optimizer_state, params, specs=specs)
        z = apply_updates(state.z, updates)
        out = [
            self._leaf_update(y, before, after, c)
            for y, before, after, c in zip(
                ys, old, core.tree_leaves(z), vary_number(ys, part, params, specs), strict=True
            )
        ]
        new = ScheduleFreeState(count, state.b1, total, largest, inner, z)
        return core.tree_unflatten(treedef, out), new

    def _leaf_update(self, y: Tensor, old: Tensor, new: Tensor, part: Tensor) -> Tensor:
        """Returns the update of y, in a dtype without rounding."""
        y, old, new = (wide(x).double() for x in (y, old, new))
        x = _average_leaf(y, old, self.b1)
        x = x + part * (new - x)
        return self.b1 * x + (1 - self.b1) * new - y


def schedule_free_eval_params(state: ScheduleFreeState, params: base.Params) -> base.Params:
    """Returns the average x, at which to evaluate: `x = (y - (1 - b1) z) / b1`, where y are the parameters.

    For trees of plain tensors, of the same layout. For the state of a step use `sf.eval_state`.

    Args:
        state: the state of `schedule_free`.
        params: tree of tensors: the parameters after the step.

    Returns:
        A tree like params.

    Raises:
        ValueError: `state` is another rule's, or does not match `params`.

    Example:
        >>> from shardfn.optim import sgd
        >>> tx, w = schedule_free(sgd(1.0), 1.0, b1=0.5), [torch.zeros(1)]
        >>> schedule_free_eval_params(tx.init(w), w)
        [tensor([0.])]
    """
    check_state("schedule_free_eval_params", state, ScheduleFreeState)
    ys, treedef = core.tree_flatten(params)
    pairs = zip(ys, leaves_like(state.z, treedef, "state.z", "params"), strict=True)
    return core.tree_unflatten(treedef, [_average_leaf(y.double(), z.double(), state.b1).to(y.dtype) for y, z in pairs])


def _average_leaf(y: Tensor, z: Tensor, b1: float | Tensor) -> Tensor:
    return (y - (1 - b1) * z) / b1
