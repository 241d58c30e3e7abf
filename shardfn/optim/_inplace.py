"""Adds updates to parameters: as a pure function, and in place."""

from collections.abc import Callable

import torch

from shardfn.core import tree_flatten, tree_unflatten

from ._base import GradientTransformation
from ._kernels import foreach_add_
from ._leaves import check_shapes, leaves_like, wide
from ._pair import as_transformation
from ._types import OptState, Pair, Params, Specs, Updates


def apply_updates(params: Params, updates: Updates) -> Params:
    """Returns the stepped parameters `p + u`, in the dtypes of `params`. Pure.

    Args:
        params: tree of tensors.
        updates: tree of the same structure and shapes.

    Returns:
        A tree like `params`.

    Raises:
        ValueError: the trees differ in structure or shapes.

    Example:
        >>> apply_updates([torch.ones(2)], [torch.tensor([1.0, -1.0])])
        [tensor([2., 0.])]
    """
    ps, treedef = tree_flatten(params)
    us = leaves_like(updates, treedef, "updates", "params")
    check_shapes(treedef, ps, updates=us)
    return tree_unflatten(treedef, [(wide(p) + u).to(p.dtype) for p, u in zip(ps, us, strict=True)])


def inplace(tx: GradientTransformation | Pair) -> Callable[..., tuple[Params, OptState]]:
    """Returns the in-place form of `tx`.

    The rule's `apply`, or else `update` and an addition into the parameters' buffers.

    Args:
        tx: any rule.

    Returns:
        `f(grads, state, params, *, specs=None) -> (params, state)`, which donates its arguments.

    Example:
        >>> from shardfn.optim import EmptyState, identity
        >>> w = torch.ones(2)
        >>> _ = inplace(identity())([torch.ones(2)], EmptyState(), [w])
        >>> w
        tensor([2., 2.])
    """
    tx = as_transformation(tx)
    if tx.apply is not None:
        return tx.apply

    @torch.no_grad()
    def apply_fn(grads: Updates, state: OptState, params: Params, *, specs: Specs = None) -> tuple[Params, OptState]:
        updates, state = tx.update(grads, state, params, specs=specs)
        ps, treedef = tree_flatten(params)
        us = leaves_like(updates, treedef, "updates", "params")
        check_shapes(treedef, ps, updates=us)
        if ps:
            foreach_add_(ps, us)
        return params, state

    return apply_fn
