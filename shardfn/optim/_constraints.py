"""Constraints: rules that change updates so that the parameters satisfy bounds after the step."""

from collections.abc import Callable

import torch
from torch import Tensor

from shardfn.core import tree_flatten, tree_unflatten

from ._base import EmptyState, GradientTransformation, Needs
from ._checks import check_finite
from ._leaves import check_params, check_shapes, leaves_like, wide
from ._pair import as_transformation
from ._types import OptState, Params, Updates


def keep_params_nonnegative() -> GradientTransformation:
    """Keeps parameters at 0 or more: `p = max(p + u, 0)`. Put the rule last in a `chain`. For some leaves use `masked`.

    Example:
        >>> tx = keep_params_nonnegative()
        >>> tx.update([torch.tensor([-3.0, 3.0])], tx.init([]), [torch.tensor([1.0, 1.0])])[0]
        [tensor([-1.,  3.], dtype=torch.float64)]
    """
    return project_params(lambda x: x.clamp(min=0), by_element=True)


def clamp_params(lower: float | None = None, upper: float | None = None) -> GradientTransformation:
    """Keeps parameters between two bounds: `p = min(max(p + u, lower), upper)`. Put the rule last in a `chain`.

    Args:
        lower: lower bound. None: no bound.
        upper: upper bound. None: no bound.

    Raises:
        ValueError: there is no bound, or `lower` is larger than `upper`.

    Example:
        >>> from shardfn.optim import chain, sgd
        >>> tx, w = chain(sgd(1.0), clamp_params(-0.5, 0.5)), [torch.zeros(2)]
        >>> tx.apply([torch.tensor([1.0, -0.2])], tx.init(w), w)[0]
        [tensor([-0.5000,  0.2000])]
    """
    bounds = {k: x for k, x in {"lower": lower, "upper": upper}.items() if x is not None}
    check_finite("clamp_params", **bounds)
    if not bounds or (lower is not None and upper is not None and lower > upper):
        raise ValueError(f"clamp_params: lower={lower!r} and upper={upper!r} are not the bounds of an interval.")
    return project_params(lambda x: x.clamp(lower, upper), by_element=True)


def project_params(projection: Callable[[Tensor], Tensor], by_element: bool = False) -> GradientTransformation:
    """Projects each leaf after the update: `p = projection(p + u)`. Put the rule last in a `chain`.

    If a leaf is cut, parameters and updates are gathered in each step, and the projection gets the whole leaf, unless
    `by_element` is set. `masked(project_params(f), mask)` projects some leaves.

    Args:
        projection: function from a leaf to a leaf of the same shape.
        by_element: whether each element of the result depends only on the same element of the leaf. Then the projection
            gets this rank's block.

    Returns:
        A rule without memory. Updates are float64, where `p' - p` is exact.

    Raises:
        ValueError: (on use) params are missing, or a projection changes a shape.

    Example:
        >>> from shardfn.optim import chain, sgd
        >>> ball = project_params(lambda x: x / x.norm().clamp(min=1.0))
        >>> tx, w = chain(sgd(1.0), ball), [torch.zeros(2)]
        >>> tx.update([torch.tensor([-3.0, -4.0])], tx.init(w), w)[0]
        [tensor([0.6000, 0.8000], dtype=torch.float64)]
    """

    def init_fn(params: Params) -> EmptyState:
        del params
        return EmptyState()

    def project_tree(updates: Updates, params: Params) -> tuple[list[Tensor], list[Tensor], object]:
        check_params("project_params", params)
        ps, treedef = tree_flatten(params)
        us = leaves_like(updates, treedef, "updates", "params")
        check_shapes(treedef, ps, updates=us)
        new = [projection((wide(p) + u).to(p.dtype)).to(p.dtype) for p, u in zip(ps, us, strict=True)]
        check_shapes(treedef, ps, projection=new)
        return ps, new, treedef

    def update_fn(updates: Updates, state: OptState, params: Params = None) -> tuple[Updates, OptState]:
        ps, new, treedef = project_tree(updates, params)
        return tree_unflatten(treedef, [x.double() - p.double() for x, p in zip(new, ps, strict=True)]), state

    def apply_fn(grads: Updates, state: OptState, params: Params) -> tuple[Params, OptState]:
        with torch.no_grad():
            ps, new, _ = project_tree(grads, params)
            for p, x in zip(ps, new, strict=True):
                p.copy_(x)
        return params, state

    # An update without `specs`: the given leaves are whole, or blocks are sufficient.
    needs = Needs("element" if by_element else "leaf", ascends=True)
    return as_transformation(GradientTransformation(init_fn, update_fn, apply_fn, needs))
