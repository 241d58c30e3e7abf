"""Bounds: clipping of gradients, and constraints on parameters.

Clipping rules come before an optimizer. Constraints are rules that change updates so that the parameters satisfy
bounds after the step.
"""

from collections.abc import Callable, Sequence, Set
from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from shardfn import collectives, core
from shardfn._torch import foreach_mul_

from . import _base as base
from ._checks import MEANT, check_finite, check_positive
from ._decide import resolve_per_leaf, resolve_prefix
from ._elementwise import safe_root, vary_number
from ._leaves import check_params, check_shapes, is_disjoint, leaves_like, spec_leaves, wide
from ._norm import block_squares, exact_scale, global_norm, is_exact, join_limbs, leaf_squares
from ._pair import as_transformation


@core.explains_keywords(**MEANT)
def clip(max_delta: float | int) -> base.GradientTransformation:
    """Clips every element: `u = min(max(g, -max_delta), max_delta)`. NaN stays NaN.

    Args:
        max_delta: the bound, > 0.

    Raises:
        ValueError: the bound is not a finite number > 0.

    Example:
        >>> clip(1.0).update([torch.tensor([-3.0, 0.5])], ())[0]
        [tensor([-1.0000,  0.5000])]
    """
    check_positive("clip", max_delta=max_delta)

    def update_fn(updates: base.Updates, params: base.Params, specs: base.Specs) -> base.Updates:
        del params, specs
        return core.tree_map(lambda g: g.clamp(-max_delta, max_delta), updates)

    return base.stateless(update_fn)._replace(needs=base.Needs("element", ascends=True))


@core.explains_keywords(**MEANT)
def clip_by_global_norm(max_norm: float | int) -> base.GradientTransformation:
    """Scales the whole tree to a norm of at most `max_norm`: `u = g * max_norm / max(|g|, max_norm)`.

    The form is optax's: no 1e-6 in the denominator as in torch, so a tree within the bound is returned bit for bit. The
    norm is global (see `global_norm`): one psum. If the norm is not finite, every update is NaN, so that a failed step
    does not look like a small step.

    Args:
        max_norm: the bound, > 0.

    Raises:
        ValueError: the bound is not a finite number > 0.

    Example:
        >>> clip_by_global_norm(1.0).update([torch.tensor([3.0, 4.0])], ())[0]
        [tensor([0.6000, 0.8000])]

    References:
        Pascanu et al., On the difficulty of training Recurrent Neural Networks, 2012, https://arxiv.org/abs/1211.5063
    """
    check_positive("clip_by_global_norm", max_norm=max_norm)

    return _scale_to_norm(max_norm, global_norm)


def _scale_to_norm(
    max_norm: float | int, norm_of: Callable[[base.Updates, base.Specs], Tensor]
) -> base.GradientTransformation:
    def norm_scale(updates: base.Updates, specs: base.Specs) -> Float[Tensor, ""]:
        norm = norm_of(updates, specs)
        return torch.where(norm.isfinite(), max_norm / norm.clamp(min=max_norm), torch.nan)

    def init_fn(params: base.Params) -> base.EmptyState:
        del params
        return base.EmptyState()

    def update_fn(
        updates: base.Updates,
        state: base.OptState,
        params: base.Params = None,
        *,
        specs: base.Specs = None,
        donate: bool = False,
    ) -> tuple[base.Updates, base.OptState]:
        del params
        gs, treedef = core.tree_flatten(updates)
        if donate and gs and is_disjoint(gs):
            with torch.no_grad():
                foreach_mul_(gs, norm_scale(updates, specs))
            return updates, state
        scales = vary_number(gs, norm_scale(updates, specs), updates, specs) if gs else ()
        return core.tree_unflatten(treedef, [(g * s).to(g.dtype) for g, s in zip(gs, scales, strict=True)]), state

    def specialize_clip(
        params: base.Params, stats: Tensor | None, phase: base.Phase | None
    ) -> base.GradientTransformation:
        del params, phase
        return _scale_to_norm(max_norm, norm_of if stats is None else lambda updates, specs: stats.sum().sqrt())

    measure = base.Measure(block_squares, additive=True)
    needs = base.Needs("element", measure, bind_stats=specialize_clip, donates=True, ascends=True)
    return base.GradientTransformation(init_fn, update_fn, needs=needs)


Axis = int | tuple[int, ...] | None
# As in optax, for kernels with outputs in the last dims: number of dims of a leaf -> number of dims of a unit.
_UNITS = {0: 0, 1: 1, 2: 1, 3: 1, 4: 3, 5: 4}


@core.explains_keywords(**MEANT)
def clip_by_block_rms(threshold: float | int) -> base.GradientTransformation:
    """Scales each leaf to a root mean square of at most `threshold`: `u = g / max(1, rms(g) / threshold)`.

    The mean is over all blocks of a leaf: one psum. If the root mean square is not finite, the update is NaN in the
    elements that were not finite, or everywhere.

    Args:
        threshold: the bound, > 0.

    Returns:
        The corresponding `GradientTransformation`, without a state.

    Raises:
        ValueError: the bound is not a finite number > 0.

    Example:
        >>> clip_by_block_rms(1.0).update([torch.tensor([2.0]), torch.tensor([0.5])], ())[0]
        [tensor([1.]), tensor([0.5000])]
    """
    check_positive("clip_by_block_rms", threshold=threshold)
    return _clip_by_block_rms(threshold, lambda params: core.tree_map(lambda x: x.numel(), params))


def _clip_by_block_rms(threshold: float | int, sizes: Any) -> base.GradientTransformation:
    sizes_of = resolve_per_leaf(sizes, int, "clip_by_block_rms")

    def update_fn(updates: base.Updates, params: base.Params, specs: base.Specs) -> base.Updates:
        del params
        gs, treedef = core.tree_flatten(updates)
        if not gs:
            return updates
        squares = leaf_squares(gs, None if specs is None else spec_leaves(specs, updates))
        numbers = [max(n, 1) for n in sizes_of(updates, gs, treedef, specs)]
        rms = safe_root(squares / torch.tensor(numbers, dtype=squares.dtype, device=squares.device))
        by = (rms / threshold).clamp(min=1.0).unbind()
        rows = zip(gs, by, [None] * len(gs) if specs is None else spec_leaves(specs, updates), strict=True)
        return core.tree_unflatten(
            treedef, [(wide(g) / vary_number([g], x, g, cut)[0]).to(g.dtype) for g, x, cut in rows]
        )

    def decide_leaves(params: base.Params) -> base.GradientTransformation:
        return _clip_by_block_rms(threshold, resolve_prefix(sizes, params, int, "clip_by_block_rms"))

    return base.stateless(update_fn)._replace(needs=base.Needs("leaf", resolve_masks=decide_leaves, ascends=True))


@core.explains_keywords(**MEANT)
def adaptive_grad_clip(
    clipping: float | int, eps: float | int = 1e-3, axis: Axis = None
) -> base.GradientTransformation:
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
        The corresponding `GradientTransformation`, without a state.

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
    check_positive("adaptive_grad_clip", clipping=clipping, eps=eps)
    return _adaptive_grad_clip(clipping, eps, lambda params: _unit_dims(params, axis))


def _adaptive_grad_clip(clipping: float | int, eps: float | int, units: Any) -> base.GradientTransformation:
    dims_of = resolve_per_leaf(units, frozenset, "adaptive_grad_clip")

    def update_fn(updates: base.Updates, params: base.Params, specs: base.Specs) -> base.Updates:
        check_params("adaptive_grad_clip", params)
        ps, treedef = core.tree_flatten(params)
        gs = leaves_like(updates, treedef, "updates", "params")
        check_shapes(treedef, ps, updates=gs)
        dims = dims_of(params, ps, treedef, specs)
        cuts = None if specs is None else spec_leaves(specs, params)
        squares = unit_squares([*gs, *ps], [*dims, *dims], None if cuts is None else [*cuts, *cuts])
        norms = [safe_root(x) for x in squares]
        rows = zip(gs, norms[: len(gs)], norms[len(gs) :], strict=True)
        return core.tree_unflatten(treedef, [_clip_leaf(g, norm, clipping * p.clamp(min=eps)) for g, norm, p in rows])

    def decide_leaves(params: base.Params) -> base.GradientTransformation:
        return _adaptive_grad_clip(clipping, eps, resolve_prefix(units, params, frozenset, "adaptive_grad_clip"))

    return base.stateless(update_fn)._replace(needs=base.Needs("leaf", resolve_masks=decide_leaves, ascends=True))


def _clip_leaf(g: Tensor, norm: Float[Tensor, "..."], most: Float[Tensor, "..."]) -> Tensor:
    # Not `norm > most`: a NaN norm must make the unit NaN.
    return torch.where(norm < most, wide(g), wide(g) * (most / norm.clamp(min=1e-6))).to(g.dtype)


def _unit_dims(params: base.Params, axis: Axis) -> base.Params:
    """Returns the dims of a unit, for each whole leaf."""
    leaves, treedef = core.tree_flatten(params)
    given = None if axis is None else (axis,) if isinstance(axis, int) else tuple(axis)
    wrong, out = [], []
    for path, x in zip(core.tree_paths(params, "params"), leaves, strict=True):
        if given is None and x.ndim in _UNITS:
            vector = sum(n != 1 for n in x.shape) <= 1
            out.append(frozenset(range(x.ndim if vector else _UNITS[x.ndim])))
        elif given is not None and all(-x.ndim <= dim < x.ndim for dim in given):
            out.append(frozenset(dim % x.ndim for dim in given))
        else:
            wrong.append(f"{path} has shape {tuple(x.shape)}")
    need = "leaves of at most 5 dims; pass axis=" if given is None else f"leaves with the dims axis={axis!r}"
    core.raise_all(ValueError, f"adaptive_grad_clip needs {need}; use masked(..., mask) for others:", wrong)
    return core.tree_unflatten(treedef, out)


Axes = tuple[str, ...]


def unit_squares(
    leaves: Sequence[Tensor], dims: Sequence[Set[int]], specs: Sequence[core.P] | None
) -> list[Float[Tensor, "..."]]:
    """Returns the sum of squares of each leaf along its `dims`, over all blocks. In the result, these dims have size 1.

    Along other dims the result is a block, like the leaf. Sums over the same mesh axes are one psum.

    Args:
        leaves: local blocks.
        dims: for each leaf, dims to sum over.
        specs: spec of each leaf. None: leaves are whole.

    Example:
        >>> unit_squares([torch.tensor([[3.0, 1.0], [4.0, 1.0]])], [{0}], None)
        [tensor([[25.,  2.]])]
    """
    rows = list(zip(leaves, dims, strict=True))
    axes = [()] * len(rows) if specs is None else [_cutting_axes(spec, d) for spec, d in zip(specs, dims, strict=True)]
    if not is_exact():
        return _reduce_over(collectives.psum, [_reduce_along(wide(x).square(), d, torch.sum) for x, d in rows], axes)
    tops = _reduce_over(
        collectives.pmax, [_reduce_along(x.detach().abs().double(), d, torch.amax) for x, d in rows], axes
    )
    limbs = _reduce_over(
        collectives.psum, [_unit_limbs(x, top, d) for (x, d), top in zip(rows, tops, strict=True)], axes
    )
    exact = [join_limbs(x, top) for x, top in zip(limbs, tops, strict=True)]
    return [y.to(wide(x).dtype) for x, y in zip(leaves, exact, strict=True)]


def _cutting_axes(spec: core.P, dims: Set[int]) -> Axes:
    """Returns the mesh axes that cut a leaf along some dims, in the mesh's order."""
    mesh = collectives.current_mesh()
    axes = mesh.axes(tuple(name for dim in sorted(dims) for name in spec.dim_axes(dim)))
    return tuple(name for name in mesh.axis_names if name in axes)


def _reduce_along(x: Tensor, dims: Set[int], f: Callable[..., Tensor]) -> Tensor:
    if not dims:
        return x
    shape = [1 if dim in dims else size for dim, size in enumerate(x.shape)]
    return f(x, dim=sorted(dims), keepdim=True) if x.numel() else x.new_zeros(shape)


def _unit_limbs(x: Tensor, top: Float[Tensor, "..."], dims: Set[int]) -> Int64[Tensor, "2 ..."]:
    """Returns the `exact_limbs` of each unit."""
    square = (x.detach().double() * exact_scale(top)).square() * float(1 << 30)
    high = square.floor()
    low = (square - high) * float(1 << 30)
    return torch.stack([_reduce_along(limb.long(), dims, torch.sum) for limb in (high, low)])


def _reduce_over(reduce: Callable[..., Tensor], values: Sequence[Tensor], axes: Sequence[Axes]) -> list[Tensor]:
    """Reduces each value over the value's axes, with one call for values of equal dtype and axes."""
    groups: dict[tuple[Axes, torch.dtype], list[int]] = {}
    for i, (x, names) in enumerate(zip(values, axes, strict=True)):
        groups.setdefault((names, x.dtype), []).append(i)
    out = list(values)
    for (names, _), index in groups.items():
        if not names:
            continue
        whole = reduce(torch.cat([values[i].reshape(-1) for i in index]), names)
        # Used with blocks, which vary: the transpose of the cast is the sum over blocks.
        whole = collectives.pvary(whole, names) if collectives.transforming() or whole.requires_grad else whole
        for i, part in zip(index, whole.split([values[i].numel() for i in index]), strict=True):
            out[i] = part.view(values[i].shape)
    return out


def keep_params_nonnegative() -> base.GradientTransformation:
    """Keeps parameters at 0 or more: `p = max(p + u, 0)`. Put the rule last in a `chain`. For some leaves use `masked`.

    Example:
        >>> tx = keep_params_nonnegative()
        >>> tx.update([torch.tensor([-3.0, 3.0])], tx.init([]), [torch.tensor([1.0, 1.0])])[0]
        [tensor([-1.,  3.], dtype=torch.float64)]
    """
    return project_params(lambda x: x.clamp(min=0), by_element=True)


def clamp_params(lower: float | None = None, upper: float | None = None) -> base.GradientTransformation:
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


def project_params(projection: Callable[[Tensor], Tensor], by_element: bool = False) -> base.GradientTransformation:
    """Projects each leaf after the update: `p = projection(p + u)`. Put the rule last in a `chain`.

    If a leaf is cut, parameters and updates are gathered in each step, and the projection gets the whole leaf, unless
    `by_element` is set. `masked(project_params(f), mask)` projects some leaves.

    Args:
        projection: function from a leaf to a leaf of the same shape.
        by_element: whether each element of the result depends only on the same element of the leaf. Then the projection
            gets this rank's block.

    Returns:
        The corresponding `GradientTransformation`, without a state. Updates are float64, where `p' - p` is exact.

    Raises:
        ValueError: (on use) params are missing, or a projection changes a shape.

    Example:
        >>> from shardfn.optim import chain, sgd
        >>> ball = project_params(lambda x: x / x.norm().clamp(min=1.0))
        >>> tx, w = chain(sgd(1.0), ball), [torch.zeros(2)]
        >>> tx.update([torch.tensor([-3.0, -4.0])], tx.init(w), w)[0]
        [tensor([0.6000, 0.8000], dtype=torch.float64)]
    """

    def init_fn(params: base.Params) -> base.EmptyState:
        del params
        return base.EmptyState()

    def project_tree(updates: base.Updates, params: base.Params) -> tuple[list[Tensor], list[Tensor], object]:
        check_params("project_params", params)
        ps, treedef = core.tree_flatten(params)
        us = leaves_like(updates, treedef, "updates", "params")
        check_shapes(treedef, ps, updates=us)
        new = [projection((wide(p) + u).to(p.dtype)).to(p.dtype) for p, u in zip(ps, us, strict=True)]
        check_shapes(treedef, ps, projection=new)
        return ps, new, treedef

    def update_fn(
        updates: base.Updates, state: base.OptState, params: base.Params = None
    ) -> tuple[base.Updates, base.OptState]:
        ps, new, treedef = project_tree(updates, params)
        return core.tree_unflatten(treedef, [x.double() - p.double() for x, p in zip(new, ps, strict=True)]), state

    def apply_fn(grads: base.Updates, state: base.OptState, params: base.Params) -> tuple[base.Params, base.OptState]:
        with torch.no_grad():
            ps, new, _ = project_tree(grads, params)
            for p, x in zip(ps, new, strict=True):
                p.copy_(x)
        return params, state

    # An update without `specs`: the given leaves are whole, or blocks are sufficient.
    needs = base.Needs("element" if by_element else "leaf", ascends=True)
    return as_transformation(base.GradientTransformation(init_fn, update_fn, apply_fn, needs))
