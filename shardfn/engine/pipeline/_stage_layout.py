"""Checks that a layout, and a first model state, fit the stages of a pipeline along an axis."""

from shardfn.collectives import bind_mesh
from shardfn.core import PyTree, raise_all, tree_leaves, tree_unflatten
from shardfn.engine.loss import LeafUses, Loss, check_kept, first_model_state
from shardfn.engine.plan import LeafView, Plan
from shardfn.engine.transfers import StepParts

from ._pipelined import (
    NO_LAYERS,
    UNLIKE,
    Pipelined,
    lengths_text,
    pipelined_in,
    rows_of_ranks,
)
from ._stacks import check_rows
from ._stage_state import check_stage_state


def first_kept(plan: Plan, parts: StepParts, tree: PyTree, specs: PyTree) -> PyTree:
    """Returns a first model state as a step keeps the state: this rank's blocks.

    Args:
        plan: layout.
        parts: parts of the step.
        tree: tree of whole tensors, the same on all ranks.
        specs: specs, a prefix tree.

    Raises:
        TypeError: a leaf is not a tensor, or the loss is pipelined and the tree not a `PipelineState`.
        ValueError: the state does not fit the specs, the stages, or a step without a model state.
    """
    if parts.has_state:
        _check_state_of_stages(plan, parts.loss, tree, specs)
    kept = first_model_state(tree, specs, plan.mesh)
    check_kept(kept, specs, has_state=parts.has_state)
    return kept


def check_layout(plan: Plan, f: Loss) -> None:
    """Refuses a layout in which the stages of a pipelined function do not lie along the function's axis.

    Raises:
        ValueError: see `check_stages`.
    """
    of = pipelined_in(f)
    if of is not None and plan.mesh.axis_size(of.axis) > 1:
        check_stages(plan, of)


def leaf_uses(plan: Plan, f: Loss) -> dict[int, LeafUses]:
    """Returns the functions that may use a layer, for layers that several functions of a pipeline may use."""
    of = pipelined_in(f)
    if of is None:
        return {}
    with bind_mesh(plan.mesh):
        found = of.leaf_uses(tree_unflatten(plan.treedef, list(range(len(plan.leaves)))))
    bounds = [*plan.first_layers, len(plan.layers)]
    return {k: uses for i, uses in found.items() for k in range(bounds[i], bounds[i + 1])}


def check_stages(plan: Plan, of: Pipelined) -> list[list[int]]:
    """Refuses a layout in which stages do not lie along the axis.

    Returns:
        By chunk, the number of layers of each rank in the chunk's stack.

    Raises:
        ValueError: leaves of the stacks are not cut along the axis, or other leaves are. A stack has fewer layers than
            there are stages, or leaves with different numbers of layers, or ZeRO cuts leaves along the axis. Every leaf
            is listed.
    """
    num = plan.mesh.axis_size(of.axis)
    stacks = of.stacks(tree_unflatten(plan.treedef, list(range(len(plan.leaves)))))
    kinds = [[tree_leaves(kind) for kind in of.kinds(stack)] for stack in stacks]
    if not all(kind for of_stack in kinds for kind in of_stack):
        raise ValueError(NO_LAYERS)
    # Where there are several kinds, some may be uncut. Uncut kinds are treated as leaves outside of layers.
    inside = dict.fromkeys(i for of_stack in kinds for i in _cut_ones(plan, of_stack, of.axis))
    problems = []
    for i, leaf in enumerate(plan.leaves):
        if i in inside and leaf.compute.dim_axes(0) != (of.axis,):
            problems.append(f"{leaf.path} has spec {leaf.compute!r}; cut dim 0, its layers: P({of.axis!r})")
        elif i not in inside and of.axis in leaf.compute.axes:
            problems.append(f"{leaf.path} has spec {leaf.compute!r}, but is not a layer; leave {of.axis!r} out")
    raise_all(ValueError, f"a pipeline along {of.axis!r} cuts its stacked layers along it, and no others:", problems)
    if num > 1 and of.axis in plan.batch_axes:
        raise ValueError(
            f"a pipeline along {of.axis!r} gives every stage the same rows, but the batch is cut along"
            f" {plan.batch_axes}. Leave {of.axis!r} out of batch=, and pass the same rows to its ranks."
        )
    # A kind of layers may have fewer layers than there are stages, such as a dense layer before many layers with
    # experts.
    longest = {
        i: max(plan.leaves[j].shape[0] for k in ks for j in k if j in inside) for ks in kinds for k in ks for i in k
    }
    raise_all(
        ValueError,
        f"a pipeline of {num} stages along {of.axis!r} needs a layer for each; stack more layers, or give the mesh"
        f" fewer ranks along {of.axis!r}:",
        [f"{plan.leaves[i].path} has {plan.leaves[i].shape[0]}" for i in inside if longest[i] < num],
    )
    raise_all(
        ValueError,
        f"ZeRO cannot keep leaves in pieces along {of.axis!r}, whose ranks do other things at the same time; pass"
        " Zero(axis=) an axis of data:",
        [leaf.path for leaf in plan.leaves if of.axis in leaf.zero_axes],
    )
    lengths = [{plan.leaves[i].path: plan.leaves[i].shape[0] for i in kind} for of_stack in kinds for kind in of_stack]
    raise_all(ValueError, UNLIKE, [lengths_text(found) for found in lengths if len(set(found.values())) > 1])
    if of.per_stage is not None:
        _check_padded(plan, list(inside), of.per_stage, num)
        return [list(of.per_stage)]
    with bind_mesh(plan.mesh):
        rows = [[rows_of_ranks([LeafView.of(plan.leaves[i]) for i in k], of.axis) for k in ks] for ks in kinds]
    return [of.shares(of_stack) for of_stack in rows]


def _cut_ones(plan: Plan, kinds: list[list[int]], axis: str) -> list[int]:
    """Returns the leaves of the kinds of layers of a stack that must be cut.

    Leaves of any kind that a spec cuts, or of all kinds if no spec cuts a kind.
    """
    cut = [kind for kind in kinds if any(axis in plan.leaves[i].compute.axes for i in kind)]
    return [i for kind in cut or kinds for i in kind]


def _check_padded(plan: Plan, inside: list[int], per_stage: tuple[int, ...], num: int) -> None:
    """Refuses stacks that do not have these numbers of layers per stage, for example (3, 2, 2).

    Raises:
        ValueError: a stack has other numbers. The message lists every such leaf.
    """
    if num not in (1, len(per_stage)):
        raise ValueError(
            f"layers_per_stage={per_stage} is for {len(per_stage)} stages, but must be for as many as the axis"
            f" has ranks, got {num} ranks."
        )
    check_rows({plan.leaves[i].path: plan.leaves[i].shape[0] for i in inside}, per_stage)


def _check_state_of_stages(plan: Plan, f: Loss, state: PyTree, specs: PyTree) -> None:
    of = pipelined_in(f)
    if of is None:
        return
    stacks = of.stacks(tree_unflatten(plan.treedef, [leaf.shape[0] if leaf.shape else 0 for leaf in plan.leaves]))
    rows = [tree_leaves(stack)[0] for stack in stacks]
    axis = of.axis if plan.mesh.axis_size(of.axis) > 1 else None
    check_stage_state(state, specs, axis, rows or None)
