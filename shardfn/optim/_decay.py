"""`add_decayed_weights`: weight decay as a rule, `u = g + weight_decay * p`."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from shardfn.core import explains_keywords, tree_flatten, tree_unflatten

from ._base import GradientTransformation, Needs, stateless
from ._checks import check_not_negative
from ._decide import resolve_per_leaf, resolve_prefix
from ._hyper import is_zero, vary_number
from ._leaves import check_params, leaves_like, wide
from ._types import Mask, Number, Params, Specs, Updates
from ._unsupported import MEANT


@explains_keywords(**MEANT)
def add_decayed_weights(weight_decay: Number = 0.0, mask: Mask = None) -> GradientTransformation:
    """Adds decay: `u = g + weight_decay * p` on the leaves that the mask names, `u = g` elsewhere.

    Before the moments, the decay is an L2 penalty. After the moments, the decay is decoupled.

    Args:
        weight_decay: factor of the decay, >= 0, or a 0-d tensor.
        mask: leaves that decay: a tree (or prefix) of bools, or a function from params to such a tree, of structure and
            shapes only. None: all.

    Returns:
        A rule without memory.

    Raises:
        ValueError: the factor is negative or not finite, or (on use) params are missing or the mask does not match the
            params.

    Example:
        >>> import torch
        >>> add_decayed_weights(0.1).update([torch.zeros(1)], (), [torch.ones(1)])[0]
        [tensor([0.1000])]

    References:
        Loshchilov & Hutter, Decoupled Weight Decay Regularization, 2017, https://arxiv.org/abs/1711.05101
    """
    check_not_negative("add_decayed_weights", weight_decay=weight_decay)
    flags = decay_flags(weight_decay, mask)

    def update_fn(updates: Updates, params: Params, specs: Specs) -> Updates:
        check_params("add_decayed_weights", params)
        ps, treedef = tree_flatten(params)
        gs = leaves_like(updates, treedef, "updates", "params")
        on, by = flags(params, ps, treedef, specs), vary_number(ps, weight_decay, params, specs)
        return tree_unflatten(
            treedef, [_add_decay(*row) if on else row[0] for *row, on in zip(gs, ps, by, on, strict=True)]
        )

    def decide_leaves(params: Params) -> GradientTransformation:
        return add_decayed_weights(weight_decay, resolve_prefix(mask, params, bool, "mask"))

    return stateless(update_fn)._replace(needs=Needs("element", resolve_masks=decide_leaves, ascends=True))


def decay_flags(weight_decay: Number, mask: Mask) -> Callable[..., Sequence[bool]]:
    """Returns a function from the flattened params to a bool a leaf.

    Whether the leaf decays. False if the factor is 0.
    """
    resolve = resolve_per_leaf(True if mask is None else mask, bool, "mask")

    def leaf_flags(params: Params, leaves: list[Tensor], treedef: Any, specs: Specs = None) -> Sequence[bool]:
        on = resolve(params, leaves, treedef, specs)
        return (False,) * len(leaves) if is_zero(weight_decay) else on

    return leaf_flags


def _add_decay(g: Tensor, p: Tensor, weight_decay: Number) -> Tensor:
    return (wide(g) + weight_decay * p).to(g.dtype)
