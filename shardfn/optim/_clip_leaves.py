"""Clipping by leaves and by units: bounds on root mean squares, and on gradients relative to parameters."""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from shardfn.core import explains_keywords, raise_all, tree_flatten, tree_map, tree_paths, tree_unflatten

from ._base import GradientTransformation, Needs, stateless
from ._checks import positive
from ._decide import per_leaf, resolved
from ._hyper import beside, root
from ._leaves import check_params, check_shapes, leaves_like, spec_leaves, wide
from ._no_rule import MEANT
from ._norm import squares_of
from ._types import Params, Specs, Updates
from ._unit_norm import unit_squares

Axis = int | tuple[int, ...] | None
# As in optax, for kernels with outputs in the last dims: number of dims of a leaf -> number of dims of a unit.
_UNITS = {0: 0, 1: 1, 2: 1, 3: 1, 4: 3, 5: 4}


@explains_keywords(**MEANT)
def clip_by_block_rms(threshold: float | int) -> GradientTransformation:
    """Scales each leaf to a root mean square of at most `threshold`: `u = g / max(1, rms(g) / threshold)`.

    The mean is over all blocks of a leaf: one psum. If the root mean square is not finite, the update is NaN in the
    elements that were not finite, or everywhere.

    Args:
        threshold: the bound, > 0.

    Returns:
        A rule without memory.

    Raises:
        ValueError: the bound is not a finite number > 0.

    Example:
        >>> clip_by_block_rms(1.0).update([torch.tensor([2.0]), torch.tensor([0.5])], ())[0]
        [tensor([1.]), tensor([0.5000])]
    """
    positive("clip_by_block_rms", threshold=threshold)
    return _clip_by_block_rms(threshold, lambda params: tree_map(lambda x: x.numel(), params))


def _clip_by_block_rms(threshold: float | int, sizes: Any) -> GradientTransformation:
    sizes_of = per_leaf(sizes, int, "clip_by_block_rms")

    def update_fn(updates: Updates, params: Params, specs: Specs) -> Updates:
        del params
        gs, treedef = tree_flatten(updates)
        if not gs:
            return updates
        squares = squares_of(gs, None if specs is None else spec_leaves(specs, updates))
        numbers = [max(n, 1) for n in sizes_of(updates, gs, treedef, specs)]
        rms = root(squares / torch.tensor(numbers, dtype=squares.dtype, device=squares.device))
        by = (rms / threshold).clamp(min=1.0).unbind()
        rows = zip(gs, by, [None] * len(gs) if specs is None else spec_leaves(specs, updates), strict=True)
        return tree_unflatten(treedef, [(wide(g) / beside([g], x, g, cut)[0]).to(g.dtype) for g, x, cut in rows])

    def decide_leaves(params: Params) -> GradientTransformation:
        return _clip_by_block_rms(threshold, resolved(sizes, params, int, "clip_by_block_rms"))

    return stateless(update_fn)._replace(needs=Needs("leaf", decide=decide_leaves, ascends=True))


@explains_keywords(**MEANT)
def adaptive_grad_clip(clipping: float | int, eps: float | int = 1e-3, axis: Axis = None) -> GradientTransformation:
    """Scales the gradient of each unit to a norm of at most `clipping * max(|p|, eps)`, for the unit's parameters p.

    A unit is a slice of a leaf along the dims `axis`, such as the weights of one output. By default a unit is a whole
    vector or scalar, a column of a matrix or of a leaf of 3 dims (dim 0), dims 0 to 2 of 4 dims, and dims 0 to 3 of 5
    dims: as in optax, for kernels with outputs in the last dim. In modules of torch outputs are the first dim, so pass
    for example `axis=1` for matrices and `axis=(1, 2, 3)` for the kernels of a convolution, each in a separate
    `masked`. The norm of a unit is over all blocks of the leaf: one psum for each set of axes.

    Args:
        clipping: the largest ratio of the norms, > 0.
        eps: lower bound of the norm of parameters, > 0, so that leaves of zeros can begin to move.
        axis: dims of a unit, of every leaf. None: chosen by the number of dims.

    Returns:
        A rule without memory.

    Raises:
        ValueError: a number is out of range, or (on use) params are missing, or leaves have no such dims.

    Example:
        >>> params, grads = [torch.eye(2)], [torch.tensor([[3.0, 0.1], [4.0, 0.0]])]
        >>> adaptive_grad_clip(0.5).update(grads, (), params)[0]
        [tensor([[0.3000, 0.1000],
                [0.4000, 0.0000]])]

    References:
        Brock et al., High-Performance Large-Scale Image Recognition Without Normalization, 2021,
        https://arxiv.org/abs/2102.06171
    """
    positive("adaptive_grad_clip", clipping=clipping, eps=eps)
    return _adaptive_grad_clip(clipping, eps, lambda params: _unit_dims(params, axis))


def _adaptive_grad_clip(clipping: float | int, eps: float | int, units: Any) -> GradientTransformation:
    dims_of = per_leaf(units, frozenset, "adaptive_grad_clip")

    def update_fn(updates: Updates, params: Params, specs: Specs) -> Updates:
        check_params("adaptive_grad_clip", params)
        ps, treedef = tree_flatten(params)
        gs = leaves_like(updates, treedef, "updates", "params")
        check_shapes(treedef, ps, updates=gs)
        dims = dims_of(params, ps, treedef, specs)
        cuts = None if specs is None else spec_leaves(specs, params)
        squares = unit_squares([*gs, *ps], [*dims, *dims], None if cuts is None else [*cuts, *cuts])
        norms = [root(x) for x in squares]
        rows = zip(gs, norms[: len(gs)], norms[len(gs) :], strict=True)
        return tree_unflatten(treedef, [_clip_leaf(g, norm, clipping * p.clamp(min=eps)) for g, norm, p in rows])

    def decide_leaves(params: Params) -> GradientTransformation:
        return _adaptive_grad_clip(clipping, eps, resolved(units, params, frozenset, "adaptive_grad_clip"))

    return stateless(update_fn)._replace(needs=Needs("leaf", decide=decide_leaves, ascends=True))


def _clip_leaf(g: Tensor, norm: Float[Tensor, "..."], most: Float[Tensor, "..."]) -> Tensor:
    # Not `norm > most`: a NaN norm must make the unit NaN.
    return torch.where(norm < most, wide(g), wide(g) * (most / norm.clamp(min=1e-6))).to(g.dtype)


def _unit_dims(params: Params, axis: Axis) -> Params:
    """Returns the dims of a unit, for each whole leaf."""
    leaves, treedef = tree_flatten(params)
    given = None if axis is None else (axis,) if isinstance(axis, int) else tuple(axis)
    wrong, out = [], []
    for path, x in zip(tree_paths(params, "params"), leaves, strict=True):
        if given is None and x.ndim in _UNITS:
            vector = sum(n != 1 for n in x.shape) <= 1
            out.append(frozenset(range(x.ndim if vector else _UNITS[x.ndim])))
        elif given is not None and all(-x.ndim <= dim < x.ndim for dim in given):
            out.append(frozenset(dim % x.ndim for dim in given))
        else:
            wrong.append(f"{path} has shape {tuple(x.shape)}")
    need = "leaves of at most 5 dims; pass axis=" if given is None else f"leaves with the dims axis={axis!r}"
    raise_all(ValueError, f"adaptive_grad_clip needs {need}; use masked(..., mask) for others:", wrong)
    return tree_unflatten(treedef, out)
