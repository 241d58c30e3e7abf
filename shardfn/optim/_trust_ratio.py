"""The trust ratio, the ratio of the norms of parameter and update, for LAMB, and LARS.

LARS: momentum of gradients, with each leaf scaled by the ratio of the norms of parameter and gradient.
"""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from shardfn import core

from . import _base as base
from ._chain import chain
from ._checks import MEANT, check_decay_rate, check_not_negative
from ._elementwise import is_zero, safe_root, vary_number
from ._learning_rate import add_decayed_weights, check_rate, scale_by_learning_rate
from ._leaves import check_params, check_shapes, leaves_like, spec_leaves
from ._masks import masked
from ._momentum import trace
from ._norm import leaf_squares


def scale_by_trust_ratio(
    min_coeff: float | int = 0.01,
    max_coeff: float | int = 10.0,
    *,
    min_norm: float | int = 0.0,
    trust_coefficient: float | int = 1.0,
    eps: float | int = 0.0,
) -> base.GradientTransformation:
    """Scales each leaf by `c = clamp(trust_coefficient |p| / (|u| + eps), min_coeff, max_coeff)`, 1 if a norm is 0.

    The norms are over all blocks of a leaf: one psum for both. optax's rule has no bounds, like
    `scale_by_trust_ratio(0.0, math.inf)`.

    Args:
        min_coeff: lower bound, >= 0.
        max_coeff: upper bound, >= `min_coeff`, possibly infinite.
        min_norm: lower bound of both norms, >= 0.
        trust_coefficient: factor of the ratio, >= 0.
        eps: added to the norm of the update, >= 0.

    Returns:
        The corresponding `GradientTransformation`, without a state.

    Raises:
        ValueError: the bounds are out of range, or (on use) params are missing or do not match.

    Example:
        >>> scale_by_trust_ratio().update([torch.tensor([2.0])], (), [torch.tensor([1.0])])[0]
        [tensor([1.])]

    References:
        You et al., Large Batch Optimization for Deep Learning: Training BERT in 76 minutes, 2019,
        https://arxiv.org/abs/1904.00962
    """
    bounds = {"min_coeff": min_coeff} | ({} if max_coeff == math.inf else {"max_coeff": max_coeff})
    check_not_negative(
        "scale_by_trust_ratio", **bounds, min_norm=min_norm, trust_coefficient=trust_coefficient, eps=eps
    )
    if max_coeff < min_coeff:
        raise ValueError(f"scale_by_trust_ratio: max_coeff={max_coeff!r} is less than min_coeff={min_coeff!r}.")

    def update_fn(updates: base.Updates, params: base.Params, specs: base.Specs) -> base.Updates:
        check_params("scale_by_trust_ratio", params)
        ps, treedef = core.tree_flatten(params)
        us = leaves_like(updates, treedef, "updates", "params")
        check_shapes(treedef, ps, updates=us)
        cuts = None if specs is None else spec_leaves(specs, params)
        ratios = trust_ratios(ps, us, cuts, min_coeff, max_coeff, min_norm, trust_coefficient, eps)
        return core.tree_unflatten(treedef, scaled(us, ratios, cuts))

    return base.stateless(update_fn)._replace(needs=base.Needs("leaf", ascends=True))


def trust_ratios(
    ps: list[Tensor],
    us: list[Tensor],
    specs: list[core.P] | None,
    min_coeff: float | int,
    max_coeff: float | int,
    min_norm: float | int = 0.0,
    trust_coefficient: float | int = 1.0,
    eps: float | int = 0.0,
) -> Float[Tensor, " num_leaves"]:
    """Returns the ratio of `scale_by_trust_ratio` for each leaf.

    Norms of float64 leaves are float64, all other norms float32.
    """

    def ratios_in(index: list[int], dtype: torch.dtype) -> Float[Tensor, " num_leaves"]:
        own = [column[i] for column in (ps, us) for i in index]
        cuts = None if specs is None else [specs[i] for i in index] * 2
        squares = leaf_squares(own, cuts, dtype)
        p, u = (safe_root(x).clamp(min=min_norm) for x in (squares[: len(index)], squares[len(index) :]))
        ratio = trust_coefficient * p / (torch.where(u > 0, u, 1.0) + eps)
        return torch.where((p > 0) & (u > 0), ratio.clamp(min_coeff, max_coeff), 1.0)

    narrow, wide = ([i for i, p in enumerate(ps) if (p.dtype == torch.float64) is w] for w in (False, True))
    if not (narrow and wide):
        return ratios_in(narrow or wide, torch.float64 if wide else torch.float32)
    found = dict(zip(narrow, ratios_in(narrow, torch.float32).double(), strict=True))
    found |= zip(wide, ratios_in(wide, torch.float64), strict=True)
    return torch.stack([found[i] for i in range(len(ps))])


def scaled(us: list[Tensor], ratios: Float[Tensor, " num_leaves"], specs: list[core.P] | None) -> list[Tensor]:
    """Returns each leaf times the leaf's ratio."""
    rows = zip(us, ratios.unbind(), [None] * len(us) if specs is None else specs, strict=True)
    return [(u * vary_number([u], c, u, cut)[0]).to(u.dtype) for u, c, cut in rows]


@core.explains_keywords(**MEANT)
def lars(
    learning_rate: base.LearningRate,
    weight_decay: base.Number = 0.0,
    weight_decay_mask: base.Mask = True,
    trust_coefficient: float | int = 0.001,
    eps: float | int = 0.0,
    trust_ratio_mask: base.Mask = True,
    momentum: base.Number = 0.9,
    nesterov: bool = False,
) -> base.GradientTransformation:
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
        The corresponding `GradientTransformation`.

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
