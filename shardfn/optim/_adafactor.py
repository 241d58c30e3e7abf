"""Adafactor, built of rules that use the root mean square of a leaf."""

from collections.abc import Callable

import torch
from torch import Tensor

from shardfn.core import explains_keywords, tree_flatten, tree_map, tree_unflatten

from ._average_params import ema
from ._base import GradientTransformation, Needs, stateless
from ._chain import chain
from ._checks import check_positive
from ._decay import add_decayed_weights
from ._factored import scale_by_factored_rms
from ._learning_rate import scale_by_learning_rate
from ._leaves import check_params, leaves_like, spec_leaves
from ._norm import block_squares, over_blocks
from ._types import LearningRate, Mask, Params, Specs, Updates
from ._unsupported import MEANT


@explains_keywords(**MEANT)
def adafactor(
    learning_rate: LearningRate | None = None,
    min_dim_size_to_factor: int = 128,
    decay_rate: float = 0.8,
    *,
    multiply_by_parameter_scale: bool = True,
    clipping_threshold: float | None = 1.0,
    momentum: float | None = None,
    weight_decay_rate: float | None = None,
    weight_decay_mask: Mask = None,
) -> GradientTransformation:
    """Adafactor: Adam without a mean of gradients. Second moments of a matrix are two vectors.

    Names and defaults are optax's: `u = scale_by_factored_rms(g)`, then `u / max(1, rms(u) / clipping_threshold)`,
    times the learning rate, times `max(rms(p), 0.001)`, averaged by `momentum`, plus `weight_decay_rate * p` (not
    multiplied by the learning rate). Then `p = p - u`. Root mean squares are of whole leaves.

    Args:
        learning_rate: a number >= 0, or a schedule. None: 1.
        min_dim_size_to_factor: see `scale_by_factored_rms`. For the other options, write a `chain`.
        decay_rate: see `scale_by_factored_rms`.
        multiply_by_parameter_scale: whether steps are relative to the root mean square of the leaf.
        clipping_threshold: > 0. None: no clipping.
        momentum: momentum in [0, 1). None keeps no average.
        weight_decay_rate: >= 0. None: no decay.
        weight_decay_mask: leaves that decay, as for `add_decayed_weights`.

    Returns:
        A rule.

    Raises:
        ValueError: a number is out of range, or (on use) the mask or the state does not match the params.

    Example:
        >>> tx, w = adafactor(0.1), [torch.ones(2)]
        >>> tx.update([torch.ones(2)], tx.init(w), w)[0]
        [tensor([-0.1000, -0.1000])]

    References:
        Shazeer & Stern, Adafactor: Adaptive Learning Rates with Sublinear Memory Cost, 2018,
        https://arxiv.org/abs/1804.04235
    """
    rules = [scale_by_factored_rms(True, decay_rate, 0, min_dim_size_to_factor)]
    if clipping_threshold is not None:
        check_positive("adafactor", clipping_threshold=clipping_threshold)
        rules.append(_scale_by_rms(lambda rms: 1 / (rms / clipping_threshold).clamp(min=1.0)))
    rules.append(_negate_updates() if learning_rate is None else scale_by_learning_rate(learning_rate))
    if multiply_by_parameter_scale:
        rules.append(_scale_by_rms(lambda rms: rms.clamp(min=1e-3), of_params=True))
    if momentum is not None:
        rules.append(ema(momentum, debias=False))
    if weight_decay_rate is not None:
        rules += [_negate_updates(), add_decayed_weights(weight_decay_rate, weight_decay_mask), _negate_updates()]
    return chain(*rules)


def _negate_updates() -> GradientTransformation:
    rule = stateless(lambda updates, params, specs: tree_map(torch.neg, updates))
    return rule._replace(needs=Needs("element"))


def _scale_by_rms(factor: Callable[[Tensor], Tensor], of_params: bool = False) -> GradientTransformation:
    """Multiplies each leaf by a function of the root mean square of the update, or of the parameter."""

    def update_fn(updates: Updates, params: Params, specs: Specs) -> Updates:
        us, treedef = tree_flatten(updates)
        if not us:
            return updates
        if of_params:
            check_params("adafactor", params)
        xs = leaves_like(params, treedef, "params", "updates") if of_params else us
        # The sum of squares and the number of elements, of all blocks.
        local = torch.stack([torch.stack([(s := block_squares(x)), s.new_tensor(x.numel())]) for x in xs])
        total = local if specs is None else over_blocks(local, spec_leaves(specs, updates))
        by = factor((total[:, 0] / total[:, 1].clamp(min=1)).sqrt()).unbind()
        return tree_unflatten(treedef, [(u * c.to(u.device)).to(u.dtype) for u, c in zip(us, by, strict=True)])

    return stateless(update_fn)._replace(needs=Needs("leaf", ascends=True))
