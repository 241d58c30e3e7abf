"""The gradients of a step as a tree, between `gradients` and `update`.

A leaf is placed as the optimizer takes it: the rows that this rank updates, in the memory and the dtype in which summed
gradients wait (`ways.summed`). A leaf that the step does not train is None, as in the tree that the optimizer gets.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardfn.collectives import GlobalTensor
from shardfn.core import (
    DonatedError,
    PyTree,
    StoredValue,
    is_in_memory,
    kind_when_loaded,
    load,
    raise_all,
    tree_leaves,
    tree_paths,
    tree_structure,
    tree_unflatten,
)
from shardfn.engine.plan import Plan
from shardfn.leaves import LeafLayout
from shardfn.optim import leaf_squares
from shardfn.state import change

from ._pools import pool_of
from ._step import Metrics

Blocks = dict[int, StoredValue]


class FoundGradients(NamedTuple):
    """The result of `gradients`.

    Attributes:
        grads: a tree like params, of `GlobalTensor`s, or None for a leaf that is not trained.
        model_state: model state that the loss has returned, a tree of `GlobalTensor`s.
        metrics: metrics of the loss and of the gradients.
    """

    grads: PyTree
    model_state: PyTree
    metrics: Metrics


def as_tree(plan: Plan, grads: Blocks) -> PyTree:
    """Returns this rank's gradients by leaf as a tree of global tensors."""
    away = not plan.at_home

    def whole(i: int, leaf: LeafLayout) -> GlobalTensor | None:
        if not leaf.trainable:
            return None
        x, kind = grads[i], leaf.ways.summed.memory_kind
        if away and isinstance(x, Tensor):  # a pure step stores nothing on disk
            kind = kind_when_loaded(kind)
        return GlobalTensor(x, leaf.shape, leaf.shard, plan.mesh, kind)

    return tree_unflatten(plan.treedef, [whole(i, leaf) for i, leaf in enumerate(plan.leaves)])


def by_leaf(plan: Plan, tree: PyTree) -> Blocks:
    """Returns the leaves of a tree of gradients, by number of the parameter."""
    return dict(zip([i for i, leaf in enumerate(plan.leaves) if leaf.trainable], tree_leaves(tree), strict=True))


def scaled(plan: Plan, grads: Blocks, scale: Tensor | None) -> Blocks:
    """Multiplies gradients by the factor that they still lack, with the operations and bits of an update."""
    if scale is None:
        return grads
    if plan.at_home:
        torch._foreach_mul_([x for x in grads.values() if isinstance(x, Tensor)], scale)
        return grads
    pool, by = pool_of(plan), lambda x: x.mul_(scale.to(x.device))
    return {i: change(x, plan.leaves[i].ways.summed, pool, by) for i, x in grads.items()}


def added(plan: Plan, a: Blocks, b: Blocks) -> Blocks:
    """Returns the sums of two sets of gradients, leaf by leaf, in the memory of the first. Both are consumed."""
    pool, out = pool_of(plan), dict(a)
    for i, y in b.items():
        x, at = out.get(i), plan.leaves[i].ways.summed
        out[i] = y if x is None else change(x, at, pool, lambda x, y=y: x.add_(load(y)))
    return out


def measured(plan: Plan, grads: Blocks, finite: Tensor | bool, loss_scale: Tensor | None) -> Metrics:
    """Returns the metrics of an update, of the gradients that it was given. The mesh must be bound.

    The norm is summed in float64, where the squares of finite gradients do not overflow: so gradients that a step has
    found finite are finite here.
    """
    return of_update(torch.sqrt(_sum_squares(plan, grads).sum()).to(plan.mesh.device), finite, loss_scale)


def of_update(norm: Tensor, finite: Tensor | bool, loss_scale: Tensor | None) -> Metrics:
    """Returns the metrics of an update, as if it is not skipped.

    Args:
        norm: norm of the gradients.
        finite: whether loss and gradients were finite where they were computed.
        loss_scale: the one that was used.
    """
    metrics = {"grad_norm": norm.to(torch.float32), "finite": torch.isfinite(norm) & finite}
    metrics["skipped"] = torch.zeros_like(metrics["finite"])
    if loss_scale is not None:
        metrics["loss_scale"] = loss_scale.clone()
    return metrics


def _sum_squares(plan: Plan, grads: Blocks) -> Tensor:
    specs = [plan.leaves[i].shard for i in grads]
    if plan.at_home:
        return leaf_squares([load(x) for x in grads.values()], specs, torch.float64)
    # One leaf at a time on the device, which need not have room for all.
    found = [
        leaf_squares([load(x).to(plan.mesh.device)], [spec], torch.float64)
        for x, spec in zip(grads.values(), specs, strict=True)
    ]
    return torch.cat(found) if found else torch.zeros(0, dtype=torch.float64)


def check_gradients(plan: Plan, grads: PyTree) -> None:
    """Refuses a tree that is not the gradients of a step of this plan.

    Raises:
        TypeError: a leaf is not a `GlobalTensor`. All are listed.
        DonatedError: an update has consumed a leaf.
        ValueError: leaves are missing or additional, or are of another mesh, layout, memory, dtype or shape. All are
            listed by path.
    """
    _check_structure(plan, grads)
    named = list(zip(_list_paths(plan), [x for x in plan.leaves if x.trainable], tree_leaves(grads), strict=True))
    raise_all(
        TypeError,
        "gradients are GlobalTensors; of a changed block make one, g.with_block(block):",
        [f"{path} is a {type(x).__name__}" for path, _, x in named if not isinstance(x, GlobalTensor)],
    )
    gone = [path for path, _, x in named if x.donated]
    if gone:
        shown = ", ".join(gone[:8]) + (f" and {len(gone) - 8} more" if len(gone) > 8 else "")
        raise DonatedError(
            f"these gradients were already consumed by an update ({shown}), which takes its gradients as a step takes"
            " its state. Call step.gradients again, or build the step with donate=False."
        )
    raise_all(
        ValueError,
        "gradients are where step.gradients(state, batch) of this step leaves them; these are of another step:",
        [problem for path, leaf, x in named for problem in _find_problems(plan, path, leaf, x)],
    )


def _check_structure(plan: Plan, grads: PyTree) -> None:
    wanted = tree_unflatten(plan.treedef, [0 if leaf.trainable else None for leaf in plan.leaves])
    if tree_structure(grads) == tree_structure(wanted):
        return
    if isinstance(grads, tuple) and len(grads) == 2 and isinstance(grads[1], dict) and "grad_norm" in grads[1]:
        raise TypeError(
            "update got the pair that gradients returns. Unpack it: grads, metrics = step.gradients(state, batch)."
        )
    there, needed = tree_paths(grads, "grads"), _list_paths(plan)
    frozen = {leaf.path.replace("params", "grads", 1) for leaf in plan.leaves if not leaf.trainable}
    problems = [f"{path} is missing; pass zeros where a leaf has no gradient" for path in needed if path not in there]
    problems += [
        f"{path} is of a leaf that the step does not train; leave None there"
        if path in frozen
        else f"{path} is no leaf of the parameters"
        for path in there
        if path not in needed
    ]
    problems = problems or [f"it is {tree_structure(grads)}, and here it is {tree_structure(wanted)}"]
    raise_all(ValueError, "the tree of gradients has other leaves than the step trains:", problems)


def _list_paths(plan: Plan) -> list[str]:
    return [leaf.path.replace("params", "grads", 1) for leaf in plan.leaves if leaf.trainable]


def _find_problems(plan: Plan, path: str, leaf: LeafLayout, x: GlobalTensor) -> Iterable[str]:
    """Yields the differences between a gradient and its layout in the plan, empty if they agree."""
    if not x.mesh.is_like(plan.mesh):
        yield f"{path} is on {x.mesh!r}; here the mesh is {plan.mesh!r}"
        return
    if x.shape != leaf.shape:
        yield f"{path} has shape {tuple(x.shape)}; here it is {tuple(leaf.shape)}"
        return
    if _axes_of_dims(plan, x) != _axes_of_dims(plan, leaf):
        yield f"{path} is cut as {x.spec!r}; here it is {leaf.shard!r}: sf.reshard(grads, to) moves it"
        return
    # A block that was read from disk, and changed, lies on the host.
    kind = leaf.ways.summed.memory_kind
    if not is_in_memory(x.memory_kind, kind, kind_when_loaded(kind)):
        yield f"{path} is at {x.memory_kind!r}; here it is at {kind!r}"
    if x.dtype != leaf.dtypes.accum:
        yield f"{path} is {x.dtype}; here it is {leaf.dtypes.accum}, in which gradients are added up"
    block = leaf.pieces.shapes[plan.zero_rank(leaf)]
    if torch.Size(x.held.shape) != block:
        yield f"{path} has a block of shape {tuple(x.held.shape)} on rank {plan.mesh.rank}; here it is {tuple(block)}"


def _axes_of_dims(plan: Plan, x: Any) -> list[tuple[str, ...]]:
    """Returns the axes that cut each dim."""
    spec = x.spec if isinstance(x, GlobalTensor) else x.shard
    return [plan.mesh.axes(spec.dim_axes(d)) for d in range(len(x.shape))]
