"""LARS: momentum of gradients, with each leaf scaled by the ratio of the norms of parameter and gradient."""

import math

from shardfn.core import explains_keywords

from ._base import GradientTransformation
from ._chain import chain
from ._checks import check_decay_rate
from ._decay import add_decayed_weights
from ._hyper import is_zero
from ._learning_rate import check_rate, scale_by_learning_rate
from ._mask import masked
from ._sgd import trace
from ._trust_ratio import scale_by_trust_ratio
from ._types import LearningRate, Mask, Number
from ._unsupported import MEANT


@explains_keywords(**MEANT)
def lars(
    learning_rate: LearningRate,
    weight_decay: Number = 0.0,
    weight_decay_mask: Mask = True,
    trust_coefficient: float | int = 0.001,
    eps: float | int = 0.0,
    trust_ratio_mask: Mask = True,
    momentum: Number = 0.9,
    nesterov: bool = False,
) -> GradientTransformation:
    """LARS: `u = g + weight_decay * p; t = momentum * t - lr * c * u; p = p + t`.

    The ratio `c = trust_coefficient |p| / (|u| + eps)` is computed for each whole leaf, over all blocks, and is 1 where
    a norm is 0. Biases and scales of norms are usually left out of both masks.

    Args:
        learning_rate: a number >= 0, or a schedule.
        weight_decay: factor of the decay, >= 0.
        weight_decay_mask: leaves that decay: a tree (or prefix) of bools, or a function from params to such a tree.
        trust_coefficient: factor of the ratio, >= 0.
        eps: added to the norm of u, >= 0.
        trust_ratio_mask: leaves that are scaled by the ratio, in the form of `weight_decay_mask`.
        momentum: momentum in [0, 1).
        nesterov: whether the trace looks one step ahead. Needs momentum.

    Returns:
        A rule.

    Raises:
        ValueError: a number is out of range, or `nesterov` is given without momentum, or (on use) a mask or the state
            does not match the params.

    Example:
        >>> import torch
        >>> tx = lars(0.5, trust_coefficient=0.1)
        >>> tx.update([torch.ones(1)], tx.init([torch.ones(1)]), [torch.ones(1)])[0]
        [tensor([-0.0500])]

    References:
        You et al., Large Batch Training of Convolutional Networks, 2017, https://arxiv.org/abs/1708.03888
    """
    check_rate("lars", learning_rate)
    check_decay_rate("lars", momentum=momentum)
    if nesterov and is_zero(momentum):
        raise ValueError(f"lars: nesterov=True has no effect with momentum={momentum!r}. Give a momentum > 0.")
    trust = scale_by_trust_ratio(0.0, math.inf, trust_coefficient=trust_coefficient, eps=eps)
    return chain(
        add_decayed_weights(weight_decay, weight_decay_mask),
        masked(trust, trust_ratio_mask),
        scale_by_learning_rate(learning_rate),
        trace(momentum, nesterov),
    )
