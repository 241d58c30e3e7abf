"""Momentum: stochastic gradient descent, and Lion, which takes the sign of an interpolated momentum."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardfn._torch import foreach_add_, foreach_mul, foreach_mul_, foreach_sign, fused_sgd_
from shardfn.core import PyTree, explains_keywords

from . import _base as base
from ._chain import chain
from ._checks import MEANT, check_decay_rate, check_not_negative
from ._decide import resolve_prefix
from ._elementwise import as_number, is_zero, map_leaves
from ._fused import fused, pad_for_fused
from ._learning_rate import add_decayed_weights, check_rate, decay_flags, next_rate, on_device, scale_by_learning_rate
from ._leaves import Columns, check_state, is_any, split_columns, wide, zeros_like


class TraceState(NamedTuple):
    """Momentum.

    Attributes:
        trace: tree like params.
    """

    trace: PyTree


def trace(decay: base.Number, nesterov: bool = False) -> base.GradientTransformation:
    """Heavy-ball momentum: `t = g + decay * t` and `u = t`, or with Nesterov `u = g + decay * t`.

    Args:
        decay: decay in [0, 1), or a 0-d tensor.
        nesterov: whether the mean looks one step ahead.

    Returns:
        The corresponding `GradientTransformation`, with a `TraceState` as state.

    Raises:
        ValueError: `decay` is outside [0, 1).

    Example:
        >>> tx = trace(0.5)
        >>> _, state = tx.update([torch.ones(1)], tx.init([torch.zeros(1)]))
        >>> tx.update([torch.ones(1)], state)[0]
        [tensor([1.5000])]

    References:
        Sutskever et al., On the importance of initialization and momentum in deep learning, 2013,
        https://proceedings.mlr.press/v28/sutskever13.html
    """
    check_decay_rate("trace", decay=decay)

    def trace_leaf(g: Tensor, trace: Tensor, decay: base.Number) -> tuple[Tensor, Tensor]:
        t = wide(g) + decay * wide(trace)
        u = wide(g) + decay * t if nesterov else t
        return u.to(trace.dtype), t.to(trace.dtype)

    def init_fn(params: base.Params) -> TraceState:
        return TraceState(zeros_like(params))

    def update_fn(
        updates: base.Updates, state: base.OptState, params: base.Params = None, *, specs: base.Specs = None
    ) -> tuple[base.Updates, base.OptState]:
        del params
        check_state("trace", state, TraceState)
        us, new = map_leaves(trace_leaf, 2, updates, of={"trace": state.trace}, specs=specs, decay=decay)
        return us, TraceState(new)

    return base.GradientTransformation(init_fn, update_fn, needs=base.Needs("element", ascends=True))


@explains_keywords(**MEANT)
def sgd(
    learning_rate: base.LearningRate,
    momentum: base.Number | None = None,
    nesterov: bool = False,
    weight_decay: base.Number = 0.0,
) -> base.GradientTransformation:
    """Gradient descent: `g = g + weight_decay * p; t = g + momentum * t; p = p - lr * t`.

    The rule is torch's: decay is an L2 penalty that enters the momentum.

    Args:
        learning_rate: a number >= 0, or a schedule.
        momentum: momentum in [0, 1). None keeps no trace.
        nesterov: whether to step along `g + momentum * t`. Needs momentum.
        weight_decay: factor of the L2 penalty, >= 0.

    Returns:
        The corresponding `GradientTransformation`. `apply` is one fused kernel per dtype.

    Raises:
        ValueError: a number is out of range, or `nesterov` is True without momentum.

    Example:
        >>> tx = sgd(0.1)
        >>> tx.update([torch.ones(1)], tx.init([torch.zeros(1)]), [torch.zeros(1)])[0]
        [tensor([-0.1000])]
    """
    check_rate("sgd", learning_rate)
    check_not_negative("sgd", weight_decay=weight_decay)
    if nesterov and is_zero(momentum):
        raise ValueError(f"sgd: nesterov=True has no effect with momentum={momentum!r}. Give a momentum > 0.")
    rules = [] if is_zero(weight_decay) else [add_decayed_weights(weight_decay)]
    rules += [trace(momentum, nesterov)] if momentum is not None else []
    pure = chain(*rules, scale_by_learning_rate(learning_rate))

    def step_leaves(columns: Columns, decays: bool, device: torch.device, lr: Any) -> None:
        del decays
        for p, *t, g in pad_for_fused(columns):
            rate = on_device(lr, device)
            _step_momentum(p, t[0] if t else [], g, rate, momentum, nesterov, as_number(weight_decay))

    traced = momentum is not None
    apply_fn = fused(
        "sgd", step_leaves, lambda state: next_rate(learning_rate, state[-1]), num=len(rules) + 1,
        at=-2 if traced else -1,
        kind=TraceState if traced else None, fields=("trace",) if traced else (), widen=_is_on_cpu, narrow=True,
    )  # fmt: skip
    return base.GradientTransformation(pure.init, pure.update, apply_fn, base.Needs("element"))


def _step_momentum(
    p: list[Tensor], t: list[Tensor], g: list[Tensor], lr: float | Tensor, momentum: base.Number | None, nesterov: bool,
    decay: float,
) -> None:  # fmt: skip
    by = as_number(momentum or 0.0)
    if t and not by:  # torch's kernel takes a trace only with a momentum: here the trace is the stored gradient
        foreach_mul_(t, by)
        foreach_add_(t, g)
        foreach_add_(t, p, alpha=decay)
        t, g, decay = [], t, 0.0
    fused_sgd_(
        p, g, t, lr=lr, momentum=by, nesterov=nesterov, weight_decay=decay, dampening=0.0, maximize=False,
        is_first_step=False,
    )  # fmt: skip


def _is_on_cpu(param: Tensor) -> bool:
    # torch 2.13's fused SGD on a CPU does not move parameters of half precision, except a tail of 15 or less.
    return param.device.type == "cpu"


class ScaleByLionState(NamedTuple):
    """Momentum of Lion.

    Attributes:
        mu: tree like params.
    """

    mu: PyTree


def scale_by_lion(b1: base.Number = 0.9, b2: base.Number = 0.99) -> base.GradientTransformation:
    """Returns the sign rule: `u = sign(b1 mu + (1 - b1) g)`, then `mu = b2 mu + (1 - b2) g`.

    The sign of 0 is 0: a row without gradients does not move. The sign of a value that is not finite is NaN. With 0, a
    weight would silently stop moving.

    Args:
        b1: rate inside the sign, in [0, 1).
        b2: rate of the momentum, in [0, 1).

    Returns:
        The corresponding `GradientTransformation`, with a `ScaleByLionState` as state.

    Raises:
        ValueError: a rate is outside [0, 1).

    Example:
        >>> tx = scale_by_lion()
        >>> tx.update([torch.tensor([0.5, 0.0])], tx.init([torch.zeros(2)]))[0]
        [tensor([1., 0.])]

    References:
        Chen et al., Symbolic Discovery of Optimization Algorithms, 2023, https://arxiv.org/abs/2302.06675
    """
    check_decay_rate("scale_by_lion", b1=b1, b2=b2)

    def init_fn(params: base.Params) -> ScaleByLionState:
        return ScaleByLionState(zeros_like(params))

    def update_fn(
        updates: base.Updates, state: base.OptState, params: base.Params = None, *, specs: base.Specs = None
    ) -> tuple[base.Updates, base.OptState]:
        del params
        check_state("scale_by_lion", state, ScaleByLionState)
        us, mu = map_leaves(_leaf_direction, 2, updates, of={"mu": state.mu}, specs=specs, b1=b1, b2=b2)
        return us, ScaleByLionState(mu)

    return base.GradientTransformation(init_fn, update_fn, needs=base.Needs("element", ascends=True))


@explains_keywords(**MEANT)
def lion(
    learning_rate: base.LearningRate,
    b1: base.Number = 0.9,
    b2: base.Number = 0.99,
    weight_decay: base.Number = 1e-3,
    mask: base.Mask = None,
) -> base.GradientTransformation:
    """Lion with decoupled decay: `p = p - lr * (sign(b1 mu + (1 - b1) g) + weight_decay * p)`.

    One moment instead of Adam's two. Every element moves by lr, so use an lr 3 to 10 times smaller than for AdamW, and
    a `weight_decay` 3 to 10 times larger. For example, lr 1e-4 instead of 3e-4 to 1e-3.

    Args:
        learning_rate: a number >= 0, or a schedule.
        b1: rate inside the sign, in [0, 1).
        b2: rate of the momentum, in [0, 1).
        weight_decay: factor of the decay, >= 0. It is multiplied by the learning rate.
        mask: leaves that decay: a tree (or prefix) of bools, or a function from params to such a tree. None: all.

    Returns:
        The corresponding `GradientTransformation`.

    Raises:
        ValueError: a number is out of range, or (on use) the mask or the state does not match the params.

    Example:
        >>> tx = lion(0.1, weight_decay=0.0)
        >>> tx.update([torch.tensor([-3.0])], tx.init([torch.zeros(1)]), [torch.zeros(1)])[0]
        [tensor([0.1000])]

    References:
        Chen et al., Symbolic Discovery of Optimization Algorithms, 2023, https://arxiv.org/abs/2302.06675
    """
    check_rate("lion", learning_rate)
    decay = add_decayed_weights(weight_decay, mask)
    pure = chain(scale_by_lion(b1, b2), decay, scale_by_learning_rate(learning_rate))

    def step_leaves(columns: Columns, decays: bool, device: torch.device, lr: Any) -> None:
        decay = as_number(weight_decay) if decays else 0.0
        for p, mu, g in split_columns(columns):
            _step_by_sign(p, mu, g, on_device(lr, device), as_number(b1), as_number(b2), decay)

    apply_fn = fused(
        "lion", step_leaves, lambda state: next_rate(learning_rate, state[-1]), num=3, kind=ScaleByLionState,
        fields=("mu",), flags=decay_flags(weight_decay, mask), widen=is_any,
    )  # fmt: skip

    def decide_decay(params: base.Params) -> base.GradientTransformation:
        return lion(learning_rate, b1, b2, weight_decay, resolve_prefix(mask, params, bool, "mask"))

    return base.GradientTransformation(
        pure.init, pure.update, apply_fn, base.Needs("element", resolve_masks=decide_decay)
    )


def _step_by_sign(
    p: list[Tensor], mu: list[Tensor], g: list[Tensor], lr: float | Tensor, b1: float, b2: float, decay: float
) -> None:
    # The same expression as the pure rule, not a lerp: near 0 another rounding would change the sign.
    mix = foreach_mul(mu, b1)
    foreach_add_(mix, foreach_mul(g, 1 - b1))
    u = foreach_sign(mix)
    foreach_add_(u, mix, alpha=0.0)  # NaN where mix is not finite
    if decay:
        foreach_add_(u, p, alpha=decay)
    foreach_mul_(u, -lr)
    foreach_add_(p, u)
    foreach_mul_(mu, b2)
    foreach_add_(mu, g, alpha=1 - b2)


def _leaf_direction(g: Tensor, mu: Tensor, b1: base.Number, b2: base.Number) -> tuple[Tensor, Tensor]:
    """Returns the update of a leaf, and the next momentum."""
    return _sign_of(_mix_moment(g, mu, b1)).to(mu.dtype), _mix_moment(g, mu, b2).to(mu.dtype)


def _mix_moment(g: Tensor, mu: Tensor, b: base.Number) -> Tensor:
    mu = wide(mu)
    return b * mu + (1 - b) * g.to(mu.dtype)


def _sign_of(x: Tensor) -> Tensor:
    return x.sign() + 0.0 * x
