"""Lion: the sign of an interpolated momentum."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardfn.core import PyTree, explains_keywords

from ._base import GradientTransformation, Needs
from ._chain import chain
from ._checks import check_decay_rate
from ._decay import add_decayed_weights, decay_flags
from ._decide import resolve_prefix
from ._fused import fused
from ._hyper import as_number, map_leaves
from ._kernels import foreach_add_, foreach_mul, foreach_mul_, foreach_sign
from ._learning_rate import check_rate, next_rate, on_device, scale_by_learning_rate
from ._leaves import (
    Columns,
    check_state,
    is_any,
    split_columns,
    wide,
    zeros_like,
)
from ._types import LearningRate, Mask, Number, OptState, Params, Specs, Updates
from ._unsupported import MEANT


class ScaleByLionState(NamedTuple):
    """Momentum of Lion.

    Attributes:
        mu: tree like params.
    """

    mu: PyTree


def scale_by_lion(b1: Number = 0.9, b2: Number = 0.99) -> GradientTransformation:
    """Returns the sign rule: `u = sign(b1 mu + (1 - b1) g)`, then `mu = b2 mu + (1 - b2) g`.

    The sign of 0 is 0: a row without gradients does not move. The sign of a value that is not finite is NaN. With 0, a
    weight would silently stop moving.

    Args:
        b1: rate inside the sign, in [0, 1).
        b2: rate of the momentum, in [0, 1).

    Returns:
        A rule with a `ScaleByLionState`.

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

    def init_fn(params: Params) -> ScaleByLionState:
        return ScaleByLionState(zeros_like(params))

    def update_fn(
        updates: Updates, state: OptState, params: Params = None, *, specs: Specs = None
    ) -> tuple[Updates, OptState]:
        del params
        check_state("scale_by_lion", state, ScaleByLionState)
        us, mu = map_leaves(_leaf_direction, 2, updates, of={"mu": state.mu}, specs=specs, b1=b1, b2=b2)
        return us, ScaleByLionState(mu)

    return GradientTransformation(init_fn, update_fn, needs=Needs("element", ascends=True))


@explains_keywords(**MEANT)
def lion(
    learning_rate: LearningRate,
    b1: Number = 0.9,
    b2: Number = 0.99,
    weight_decay: Number = 1e-3,
    mask: Mask = None,
) -> GradientTransformation:
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
        A rule.

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
            _step_leaves(p, mu, g, on_device(lr, device), as_number(b1), as_number(b2), decay)

    apply_fn = fused(
        "lion", step_leaves, lambda state: next_rate(learning_rate, state[-1]), num=3, kind=ScaleByLionState,
        fields=("mu",), flags=decay_flags(weight_decay, mask), widen=is_any,
    )  # fmt: skip

    def decide_decay(params: Params) -> GradientTransformation:
        return lion(learning_rate, b1, b2, weight_decay, resolve_prefix(mask, params, bool, "mask"))

    return GradientTransformation(pure.init, pure.update, apply_fn, Needs("element", resolve_masks=decide_decay))


def _step_leaves(
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


def _leaf_direction(g: Tensor, mu: Tensor, b1: Number, b2: Number) -> tuple[Tensor, Tensor]:
    """Returns the update of a leaf, and the next momentum."""
    return _sign_of(_mix_moment(g, mu, b1)).to(mu.dtype), _mix_moment(g, mu, b2).to(mu.dtype)


def _mix_moment(g: Tensor, mu: Tensor, b: Number) -> Tensor:
    mu = wide(mu)
    return b * mu + (1 - b) * g.to(mu.dtype)


def _sign_of(x: Tensor) -> Tensor:
    return x.sign() + 0.0 * x
