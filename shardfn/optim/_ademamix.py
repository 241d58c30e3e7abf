"""AdEMAMix: Adam with a second, slow mean of the gradients."""

from typing import Any, NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor

from shardfn.core import PyTree, explains_keywords

from ._adam import bias_corrections, corrected_root
from ._base import GradientTransformation
from ._chain import chain
from ._checks import check_decay_rate, check_not_negative
from ._decay import add_decayed_weights
from ._elementwise import elementwise, keep_zeros
from ._learning_rate import check_rate, evaluate_schedule, scale_by_learning_rate
from ._leaves import wide
from ._types import LearningRate, Mask, Number, Schedule
from ._unsupported import MEANT


class ScaleByAdemamixState(NamedTuple):
    """Moments of AdEMAMix.

    Attributes:
        count: int32, 0-d: steps taken.
        m1: tree like params: fast mean of the gradients.
        m2: tree like params: slow mean of the gradients.
        nu: tree like params: mean of the squared gradients.
    """

    count: Int[Tensor, ""]  # pyright: ignore[reportIncompatibleMethodOverride]  # optax's name
    m1: PyTree
    m2: PyTree
    nu: PyTree


def scale_by_ademamix(
    b1: Number = 0.9,
    b2: Number = 0.999,
    b3: Number | Schedule = 0.9999,
    alpha: Number | Schedule = 6.0,
    eps: Number = 1e-8,
    eps_root: Number = 0.0,
) -> GradientTransformation:
    """Adds a slow mean to Adam's direction: `u = (m1_hat + alpha m2) / (sqrt(nu_hat + eps_root) + eps)`.

    As in Adam, `m1_hat = m1 / (1 - b1^t)` and `nu_hat = nu / (1 - b2^t)`.
    The means are `m1 = b1 m1 + (1 - b1) g` and `m2 = b3 m2 + (1 - b3) g`. The slow mean is not corrected for bias, so
    it fills up over thousands of steps. States are elementwise: every ZeRO stage and memory is possible.

    Args:
        b1: rate of the fast mean, in [0, 1).
        b2: rate of the squares, in [0, 1).
        b3: rate of the slow mean, in [0, 1), or a schedule. The paper lets `b3` grow from `b1` during training.
        alpha: weight of the slow mean, >= 0, or a schedule. The paper lets `alpha` grow from 0.
        eps: constant outside the root, >= 0.
        eps_root: constant inside the root, >= 0.

    Returns:
        A rule with a `ScaleByAdemamixState`.

    Raises:
        ValueError: a number is out of range.

    Example:
        >>> tx = scale_by_ademamix(b3=0.5, alpha=2.0)
        >>> tx.update([torch.tensor([0.5])], tx.init([torch.zeros(1)]))[0]
        [tensor([2.])]

    References:
        Pagliardini et al., The AdEMAMix Optimizer: Better, Faster, Older, 2024, https://arxiv.org/abs/2409.03137
    """
    who = "scale_by_ademamix"
    check_decay_rate(who, b1=b1, b2=b2, **({} if callable(b3) else {"b3": b3}))
    check_not_negative(who, eps=eps, eps_root=eps_root, **({} if callable(alpha) else {"alpha": alpha}))

    def numbers_at(count: Tensor) -> dict[str, Any]:
        c1, c2 = bias_corrections(count, b1, b2)
        slow, weight = (evaluate_schedule(x, count - 1) if callable(x) else x for x in (b3, alpha))
        return {"b1": b1, "b2": b2, "b3": slow, "alpha": weight, "eps": eps, "eps_root": eps_root, "c1": c1, "c2": c2}

    init_fns = {"m1": keep_zeros, "m2": torch.clone, "nu": torch.clone}
    return elementwise(who, ScaleByAdemamixState, _leaf_direction, init_fns, numbers_at)


@explains_keywords(**MEANT)
def ademamix(
    learning_rate: LearningRate,
    b1: Number = 0.9,
    b2: Number = 0.999,
    b3: Number | Schedule = 0.9999,
    alpha: Number | Schedule = 5.0,
    eps: Number = 1e-8,
    eps_root: Number = 0.0,
    weight_decay: Number = 0.0,
    mask: Mask = None,
) -> GradientTransformation:
    """AdEMAMix: `p = p - lr * (u + weight_decay * p)`, with u of `scale_by_ademamix`.

    The names and defaults are optax's.

    Args:
        learning_rate: a number >= 0, or a schedule.
        b1: rate of the fast mean, in [0, 1).
        b2: rate of the squares, in [0, 1).
        b3: rate of the slow mean, in [0, 1), or a schedule.
        alpha: weight of the slow mean, >= 0, or a schedule.
        eps: constant outside the root, >= 0.
        eps_root: constant inside the root, >= 0.
        weight_decay: factor of the decay, >= 0. It is multiplied by the learning rate.
        mask: leaves that decay: a tree (or prefix) of bools, or a function from params to such a tree. None: all.

    Returns:
        A rule.

    Raises:
        ValueError: a number is out of range, or (on use) the mask or the state does not match the params.

    Example:
        >>> tx = ademamix(0.1, b3=0.5, alpha=2.0)
        >>> tx.update([torch.ones(1)], tx.init([torch.zeros(1)]), [torch.zeros(1)])[0]
        [tensor([-0.2000])]

    References:
        Pagliardini et al., The AdEMAMix Optimizer: Better, Faster, Older, 2024, https://arxiv.org/abs/2409.03137
    """
    check_rate("ademamix", learning_rate)
    direction, decay = scale_by_ademamix(b1, b2, b3, alpha, eps, eps_root), add_decayed_weights(weight_decay, mask)
    return chain(direction, decay, scale_by_learning_rate(learning_rate))


def _leaf_direction(
    g: Tensor, m1: Tensor, m2: Tensor, nu: Tensor, b1: Number, b2: Number, b3: Number, alpha: Number, eps: Number,
    eps_root: Number, c1: Tensor, c2: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Returns the update of a leaf, and the next moments."""
    kept, dtype = nu.dtype, wide(nu).dtype
    g = g.to(dtype)
    m1, m2 = b1 * m1.to(dtype) + (1 - b1) * g, b3 * m2.to(dtype) + (1 - b3) * g
    nu = b2 * nu.to(dtype) + (1 - b2) * g.square()
    u = (m1 / c1 + alpha * m2) / (corrected_root(nu, c2, eps_root) + eps)
    return u.to(kept), m1.to(kept), m2.to(kept), nu.to(kept)
