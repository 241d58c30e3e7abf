"""Stochastic gradient descent, with momentum."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardfn.core import PyTree, explains_keywords

from ._base import GradientTransformation, Needs
from ._chain import chain
from ._checks import check_decay_rate, check_not_negative
from ._decay import add_decayed_weights
from ._fused import fused, pad_for_fused
from ._hyper import as_number, is_zero, map_leaves
from ._kernels import foreach_add_, foreach_mul_, fused_sgd_
from ._learning_rate import check_rate, next_rate, on_device, scale_by_learning_rate
from ._leaves import (
    Columns,
    check_state,
    wide,
    zeros_like,
)
from ._types import LearningRate, Number, OptState, Params, Specs, Updates
from ._unsupported import MEANT


class TraceState(NamedTuple):
    """Momentum.

    Attributes:
        trace: tree like params.
    """

    trace: PyTree


def trace(decay: Number, nesterov: bool = False) -> GradientTransformation:
    """Heavy-ball momentum: `t = g + decay * t` and `u = t`, or with Nesterov `u = g + decay * t`.

    Args:
        decay: decay in [0, 1), or a 0-d tensor.
        nesterov: whether the mean looks one step ahead.

    Returns:
        A rule with a `TraceState`.

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

    def trace_leaf(g: Tensor, trace: Tensor, decay: Number) -> tuple[Tensor, Tensor]:
        t = wide(g) + decay * wide(trace)
        u = wide(g) + decay * t if nesterov else t
        return u.to(trace.dtype), t.to(trace.dtype)

    def init_fn(params: Params) -> TraceState:
        return TraceState(zeros_like(params))

    def update_fn(
        updates: Updates, state: OptState, params: Params = None, *, specs: Specs = None
    ) -> tuple[Updates, OptState]:
        del params
        check_state("trace", state, TraceState)
        us, new = map_leaves(trace_leaf, 2, updates, of={"trace": state.trace}, specs=specs, decay=decay)
        return us, TraceState(new)

    return GradientTransformation(init_fn, update_fn, needs=Needs("element", ascends=True))


@explains_keywords(**MEANT)
def sgd(
    learning_rate: LearningRate,
    momentum: Number | None = None,
    nesterov: bool = False,
    weight_decay: Number = 0.0,
) -> GradientTransformation:
    """Gradient descent: `g = g + weight_decay * p; t = g + momentum * t; p = p - lr * t`.

    The rule is torch's: decay is an L2 penalty that enters the momentum.

    Args:
        learning_rate: a number >= 0, or a schedule.
        momentum: momentum in [0, 1). None keeps no trace.
        nesterov: whether to step along `g + momentum * t`. Needs momentum.
        weight_decay: factor of the L2 penalty, >= 0.

    Returns:
        A rule. `apply` is one fused kernel per dtype.

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
            _step_leaves(p, t[0] if t else [], g, rate, momentum, nesterov, as_number(weight_decay))

    traced = momentum is not None
    apply_fn = fused(
        "sgd", step_leaves, lambda state: next_rate(learning_rate, state[-1]), num=len(rules) + 1,
        at=-2 if traced else -1,
        kind=TraceState if traced else None, fields=("trace",) if traced else (), widen=_is_on_cpu, narrow=True,
    )  # fmt: skip
    return GradientTransformation(pure.init, pure.update, apply_fn, Needs("element"))


def _step_leaves(
    p: list[Tensor], t: list[Tensor], g: list[Tensor], lr: float | Tensor, momentum: Number | None, nesterov: bool,
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
