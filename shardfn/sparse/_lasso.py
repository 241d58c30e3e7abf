"""Group lasso: a penalty on the norms of groups, in a loss or as a rule of an optimizer.

    loss    + strength sum_k sqrt(|w_k|^2 + 1e-8)
    rule    w_k <- max(0, 1 - strength / |w_k|) w_k      after each step

|w_k| is the norm of all elements of group k, each once. The penalty brings norms near 0, and the rule brings norms to
0. Leaves may be blocks: ranks add the squares of each group, one number for each group.

Yuan and Lin, Model selection and estimation in regression with grouped variables, 2006
Wen et al., Learning Intrinsic Sparse Structures within LSTM, 2017, https://arxiv.org/abs/1709.05027
"""

import itertools
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from shardfn import collectives, core
from shardfn.core import PyTree
from shardfn.optim import GradientTransformation, Needs, ScaleByScheduleState, Schedule, scale_by_schedule, stateless

from ._groups import LeafIndices, WeightGroups, leaf_names

Bounds = tuple[tuple[int, int], ...]


def group_norms(groups: WeightGroups, params: PyTree, specs: PyTree = None) -> dict[str, Float[Tensor, " k"]]:
    """Returns the norms of all groups by family.

    Args:
        groups: groups of the leaves.
        params: tree of leaves, or of this rank's blocks.
        specs: layout of the blocks: a prefix tree of `P`. None: leaves are whole.

    Raises:
        ValueError: lists leaves of the groups that the tree does not have, or of other shapes.

    Example:
        >>> from shardfn.sparse import GroupFamily, LeafIndices
        >>> groups = WeightGroups({"units": GroupFamily(2, (LeafIndices("w", 1),))}, {"w": (2, 2)})
        >>> group_norms(groups, {"w": torch.tensor([[3.0, 0.0], [4.0, 0.0]])})
        {'units': tensor([5., 0.])}
    """
    return {name: x.sqrt() for name, x in group_squares(groups, params, specs).items()}


def group_lasso(groups: WeightGroups, params: PyTree, strength: float, *, specs: PyTree = None) -> Float[Tensor, ""]:
    """Returns the penalty `strength sum_k sqrt(|w_k|^2 + 1e-8)`, a summand of a loss.

    Args:
        groups: groups of the leaves.
        params: the loss's params.
        strength: factor of the penalty.
        specs: compute layout of the params, as `specs(config, tp="tp")`. None: the loss gets whole leaves.

    Raises:
        ValueError: as `group_norms`.

    Example:
        >>> from shardfn.sparse import GroupFamily, LeafIndices
        >>> groups = WeightGroups({"units": GroupFamily(2, (LeafIndices("w", 1),))}, {"w": (2, 2)})
        >>> group_lasso(groups, {"w": torch.tensor([[3.0, 0.0], [4.0, 0.0]])}, 0.5)
        tensor(2.5001)
    """
    squares = group_squares(groups, params, specs)
    return strength * torch.cat([*squares.values()]).add(1e-8).sqrt().sum()


def group_shrink(groups: WeightGroups, strength: float | Schedule) -> GradientTransformation:
    """Shrinks the norm of each group by `strength` after the update, down to exact zeros.

    Put the rule last in a `chain`.

        p = p + u;  p_k <- max(0, 1 - strength / |p_k|) p_k

    The proximal step of `group_lasso` for groups that share no element. An element that is in two places, such as row
    j and column k of a recurrent matrix, is multiplied by both factors. A group at 0 stays at 0 while its gradient
    is 0, which holds for units whose biases belong to the group.

    Updates of Adam have the size of the learning rate in each element, so norms of groups of n elements move by up to
    lr * sqrt(n) a step. A strength far below removes no group, and a large first strength removes groups that have not
    learnt yet. A schedule that follows the learning rate, after a time of 0, has neither problem.

    Args:
        groups: groups of the leaves.
        strength: learning rate times the factor of the penalty, >= 0, or a schedule of the number of steps taken.

    Returns:
        The corresponding `GradientTransformation`, with a count as state only if `strength` is a schedule. Updates are
        float64, where `p' - p` is exact.

    Raises:
        ValueError: `strength` is below 0, or (on use) as `group_norms`.

    Example:
        >>> from shardfn.optim import chain, sgd
        >>> from shardfn.sparse import GroupFamily, LeafIndices
        >>> groups = WeightGroups({"units": GroupFamily(2, (LeafIndices("w", 1),))}, {"w": (2, 2)})
        >>> tx, w = chain(sgd(1.0), group_shrink(groups, 2.5)), {"w": torch.tensor([[3.0, 1.0], [4.0, 1.0]])}
        >>> tx.update({"w": torch.zeros(2, 2)}, tx.init(w), w)[0]["w"] + w["w"]
        tensor([[1.5000, 0.0000],
                [2.0000, 0.0000]], dtype=torch.float64)
    """
    if callable(strength):
        return _shrink_by_schedule(groups, strength)
    if not strength >= 0:
        raise ValueError(f"group_shrink: strength must be at least 0, got {strength}.")

    def update_fn(updates: PyTree, params: PyTree, specs: PyTree) -> PyTree:
        return _shrink_groups(groups, strength, updates, params, specs)

    return stateless(update_fn)._replace(needs=Needs("tree", ascends=True))


def _shrink_by_schedule(groups: WeightGroups, schedule: Schedule) -> GradientTransformation:
    def update_fn(
        updates: PyTree, state: PyTree, params: PyTree = None, *, specs: PyTree = None
    ) -> tuple[PyTree, PyTree]:
        strength = torch.as_tensor(schedule(state.count), dtype=torch.float64, device=state.count.device).clamp(min=0)
        new = _shrink_groups(groups, strength, updates, params, specs)
        return new, ScaleByScheduleState(state.count + 1)

    return GradientTransformation(scale_by_schedule(schedule).init, update_fn, needs=Needs("tree", ascends=True))


def _shrink_groups(
    groups: WeightGroups, strength: float | Tensor, updates: PyTree, params: PyTree, specs: PyTree
) -> PyTree:
    """Returns the updates by which the groups are shrunk after them."""
    (us, treedef), ps = core.tree_flatten(updates), core.tree_flatten(params)[0]
    moved = [p.double() + u.double() for p, u in zip(ps, us, strict=True)]
    tree = core.tree_unflatten(treedef, moved)
    norms = group_norms(groups, tree, specs)
    factors = {name: torch.where(n > strength, 1 - strength / n.clamp(min=1e-300), 0.0) for name, n in norms.items()}
    new = _scale_groups(groups, tree, factors, specs)
    rows = zip(core.tree_flatten(new)[0], ps, strict=True)
    return core.tree_unflatten(treedef, [x.to(p.dtype).double() - p.double() for x, p in rows])


def group_squares(groups: WeightGroups, params: PyTree, specs: PyTree = None) -> dict[str, Float[Tensor, " k"]]:
    """Returns the sums of squares of all groups by family. See `group_norms`."""
    by_axes: dict[tuple[str, ...], dict[str, list[Tensor]]] = {}
    for path, x, spec, bounds in _own_leaves(groups, params, specs):
        wide = torch.promote_types(x.dtype, torch.float32)
        square, axes = x.to(wide).square(), collectives.current_mesh().axes(spec.axes)
        for name, size, places in _by_family(groups, path):
            own = [_sum_at(square, at, size, bounds) for at in places]
            shared = [_sum_both(square, a, b, size, bounds) for a, b in itertools.combinations(places, 2)]
            by_axes.setdefault(axes, {}).setdefault(name, []).extend([*own, *(-y for y in shared if y is not None)])
    found: dict[str, list[Tensor]] = {name: [] for name in groups.families}
    for axes, parts in by_axes.items():
        sums = torch.cat([torch.stack(rows).sum(0) for rows in parts.values()])
        sums = collectives.psum(sums, axes) if axes else sums
        sizes = [groups.families[name].size for name in parts]
        for name, part in zip(parts, sums.split(sizes), strict=True):
            found[name].append(part)
    return {name: torch.stack(rows).sum(0).clamp(min=0) for name, rows in found.items()}


def _own_leaves(groups: WeightGroups, params: PyTree, specs: PyTree) -> list[tuple[str, Tensor, core.P, Bounds]]:
    """Returns path, block, spec and bounds of the block, for each leaf of the groups.

    Raises:
        ValueError: lists leaves that are absent, or of other shapes.
    """
    mesh, leaves = collectives.current_mesh(), core.tree_flatten(params)[0]
    cuts = (
        [core.P()] * len(leaves)
        if specs is None
        else core.broadcast_prefix(specs, params, lambda x: isinstance(x, core.P), names=("specs", "params"))
    )
    have: dict[str, tuple[Any, core.P]] = dict(zip(leaf_names(params), zip(leaves, cuts, strict=True), strict=True))
    wanted = dict.fromkeys(at.path for family in groups.families.values() for at in family.places)
    rows, problems = [], []
    for path in wanted:
        if path not in have:
            problems.append(f"{path} is not in the tree, which has {', '.join(have)}")
            continue
        (x, spec), shape = have[path], groups.shapes[path]
        bounds = tuple((s.start, s.stop) for s in core.block_slices(shape, spec, mesh.shape, mesh.coords))
        if tuple(x.shape) != tuple(stop - start for start, stop in bounds):
            problems.append(
                f"{path} is {tuple(x.shape)}, a block {spec} of {shape} is expected; pass the block's specs="
            )
        rows.append((path, x, spec, bounds))
    core.raise_all(ValueError, "the groups are of other leaves:", problems)
    return rows


def _by_family(groups: WeightGroups, path: str) -> list[tuple[str, int, list[LeafIndices]]]:
    """Returns the places of each family in a leaf."""
    found: dict[str, tuple[str, int, list[LeafIndices]]] = {}
    for name, size, at in groups.list_places(path):
        found.setdefault(name, (name, size, []))[2].append(at)
    return list(found.values())


def _clip(at: LeafIndices, size: int, bounds: Bounds) -> tuple[int, int, int]:
    """Returns the part of a place in a block: first index in the block, first group, and number of groups."""
    low, high = bounds[at.dim]
    first, last = max(at.start, low), min(at.start + size, high)
    return first - low, first - at.start, max(last - first, 0)


def _sum_at(square: Tensor, at: LeafIndices, size: int, bounds: Bounds) -> Tensor:
    """Returns the sums of the K groups over a place, of the block's part."""
    index, group, num = _clip(at, size, bounds)
    if num == 0:
        return square.sum() * square.new_zeros(size)
    others = [d for d in range(square.ndim) if d != at.dim]
    part = square.narrow(at.dim, index, num)
    return F.pad(part.sum(others) if others else part, (group, size - group - num))


def _sum_both(square: Tensor, a: LeafIndices, b: LeafIndices, size: int, bounds: Bounds) -> Tensor | None:
    """Returns the sums over elements in two places of the same group, or None for places without a common element."""
    if a.dim == b.dim:
        return None
    (i, k, num), (j, m, num_b) = _clip(a, size, bounds), _clip(b, size, bounds)
    first, last = max(k, m), min(k + num, m + num_b)
    if first >= last:
        return None
    part = square.narrow(a.dim, i + first - k, last - first).narrow(b.dim, j + first - m, last - first)
    diagonal = part.diagonal(dim1=a.dim, dim2=b.dim)
    return F.pad(diagonal.sum(list(range(diagonal.ndim - 1))) if diagonal.ndim > 1 else diagonal, (first, size - last))


def _scale_groups(groups: WeightGroups, params: PyTree, factors: Mapping[str, Tensor], specs: PyTree) -> PyTree:
    """Returns leaves multiplied by the factor of each group, once for each place."""
    new: dict[str, Any] = {}
    for path, x, _, bounds in _own_leaves(groups, params, specs):
        for name, size, at in groups.list_places(path):
            index, group, num = _clip(at, size, bounds)
            ends = index, x.shape[at.dim] - index - num
            own = F.pad(factors[name][group : group + num], ends, value=1.0)
            x = x * own.view([-1 if d == at.dim else 1 for d in range(x.ndim)])
        new[path] = x
    leaves, treedef = core.tree_flatten(params)
    return core.tree_unflatten(treedef, [new.get(name, x) for name, x in zip(leaf_names(params), leaves, strict=True)])
