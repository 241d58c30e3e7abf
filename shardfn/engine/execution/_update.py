"""The update: runs the optimizer on this rank's rows, and then gathers resident parameters again.

`early` chooses the leaves that are updated while the backward continues: leaves whose state is on disk, where the
update takes long; whose rule needs only their own gradient, and whose new values can be kept next to the old values at
little cost in memory, on disk or in the gradient's memory.
"""

import collections
import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from shardfn.collectives import AnyChannels, GlobalTensor
from shardfn.core import (
    MemoryKind,
    PyTree,
    StoredValue,
    kind_when_loaded,
    tree_flatten,
    tree_leaves,
    tree_unflatten,
)
from shardfn.engine.loss import Finish, finished, plain_arithmetic, put_in, wrapped_like
from shardfn.engine.plan import Plan
from shardfn.engine.transfers import WEIGHTED, StepParts, pool_of, refresh
from shardfn.leaves import LeafLayout, Unit
from shardfn.optim import GradientTransformation, WholeLeaf, bind_stats, inplace, resolve_masks
from shardfn.state import (
    LeafRows,
    OverlappedUpdate,
    Promised,
    TrainState,
    Update,
    UpdatedLeaves,
    UpdateOperand,
    in_memory,
    load_at,
    peek_blocks,
    state_owners,
    stream,
    taken,
)

# Gives the part of a leaf's gradient that the optimizer takes, and lets go of it.
Take = Callable[[int], StoredValue]
# Blocks of params, optimizer state and model state.
StateBlocks = tuple[Sequence[StoredValue], PyTree, PyTree]


def update(
    plan: Plan,
    channels: AnyChannels,
    parts: StepParts,
    state: TrainState,
    take: Take,
    *,
    model_state: PyTree = (),
    finish: Finish | None = None,
    scale: Tensor | None,
) -> TrainState:
    """Returns the next state. Where the step donates, it has the buffers of `state`, otherwise copies of them.

    Args:
        plan: layout.
        channels: communicators of the step.
        parts: the optimizer, and whether `state` is consumed.
        state: current state.
        take: gives the part of a leaf's gradient that the optimizer takes, and lets go of it.
        model_state: model state that the loss has returned.
        finish: end of the step for the model state, or None without one.
        scale: factor of the gradients, which is applied first. None means 1.
    """
    write = taken(blocks_of(state), donate=parts.donate)
    how: dict[str, Any] = {"model_state": model_state, "finish": finish, "scale": scale}
    return next_state(plan, state, update_in(plan, channels, parts.optimizer, write, take, **how))


@plain_arithmetic()
def update_in(
    plan: Plan,
    channels: AnyChannels,
    optimizer: GradientTransformation,
    write: AbstractContextManager[tuple[PyTree, PyTree, PyTree]],
    take: Take,
    *,
    model_state: PyTree,
    finish: Finish | None,
    scale: Tensor | None,
    ahead: OverlappedUpdate | None = None,
) -> StateBlocks:
    """Returns the new blocks of a state, made in the memory of the old blocks; for arguments see `update`.

    Args:
        plan: layout.
        channels: communicators of the step.
        optimizer: optimizer.
        write: context manager with the old blocks, which may be written to in the context.
        take: gives the gradient of a leaf, and lets go of it.
        model_state: model state that the loss has returned.
        finish: end of the step for the model state.
        scale: factor of the gradients.
        ahead: update that has stepped some of the leaves already.
    """
    # Before anything is written, as it may raise.
    model_state = finished(finish, model_state)
    # First: its thread reads the state, which is written to from now on.
    done = UpdatedLeaves() if ahead is None else ahead.finish()
    with write as (params, opt_state, kept), torch.no_grad():
        blocks, opt_state = update_blocks(plan, channels, optimizer, tree_leaves(params), opt_state, take, scale, done)
        return blocks, opt_state, put_in(kept, model_state)


def blocks_of(state: TrainState) -> tuple[PyTree, PyTree, PyTree]:
    """Returns the parts of a state that an update writes to."""
    return state.params, state.opt_state, state.model_state


def next_state(plan: Plan, state: TrainState, new: StateBlocks) -> TrainState:
    """Returns the state after `state`, from this rank's new blocks."""
    blocks, opt_state, kept = new
    return state._replace(
        params=wrap(plan, blocks),
        opt_state=_wrap_blocks(opt_state, state.opt_state),
        step=state.step + 1,
        model_state=wrapped_like(tree_leaves(kept), state.model_state),
    )


@plain_arithmetic()
def update_blocks(
    plan: Plan,
    channels: AnyChannels,
    optimizer: GradientTransformation,
    blocks: Sequence[StoredValue],
    opt_state: PyTree,
    take: Take,
    scale: Tensor | None,
    done: UpdatedLeaves | None = None,
) -> tuple[list[StoredValue], PyTree]:
    """Returns this rank's updated blocks and optimizer state. Consumes all arguments, except blocks on disk."""
    if not plan.at_home:
        done = done or UpdatedLeaves()
        rows, opt_state = stream(_update_as_stream(plan, optimizer, blocks, opt_state, take, scale, done), done)
        return refresh(plan, channels, blocks, rows, pool_of(plan)), opt_state
    train = [leaf.trainable for leaf in plan.leaves]
    own: list[Any] = [take(i) if t else None for i, t in enumerate(train)]
    rows = [shard_rows(plan, leaf, b) if leaf.trainable else None for leaf, b in zip(plan.leaves, blocks, strict=True)]
    if scale is not None:
        # In place: by now no one else holds the gradients.
        torch._foreach_mul_([g for g in own if g is not None], scale)
    for leaf, g in zip(plan.leaves, own, strict=True):
        if leaf.trainable and (num := plan.num_summands(leaf)) > 1:
            g.mul_(num)  # a rank's own gradient, of which the optimizer takes the mean
    new, opt_state = inplace(rule_of(plan, optimizer))(
        tree_unflatten(plan.treedef, own),
        opt_state,
        tree_unflatten(plan.treedef, rows),
        specs=plan.shards,
    )
    fresh = iter(tree_leaves(new))
    return refresh(plan, channels, blocks, [next(fresh) if t else None for t in train]), opt_state


def _update_as_stream(
    plan: Plan,
    optimizer: GradientTransformation,
    blocks: Sequence[StoredValue],
    opt_state: PyTree,
    take: Take,
    scale: Tensor | None,
    done: UpdatedLeaves,
) -> Update:
    train = [leaf if leaf.trainable else None for leaf in plan.leaves]
    params = [None if leaf is None else _make_column(plan, leaf, b) for leaf, b in zip(train, blocks, strict=True)]
    own = [
        None if leaf is None or i in done.params else UpdateOperand(take(i), leaf.ways.summed.memory_kind)
        for i, leaf in enumerate(train)
    ]
    return whole_update(plan, optimizer, params, own, opt_state, scale)


def whole_update(
    plan: Plan,
    optimizer: GradientTransformation,
    params: Sequence[UpdateOperand | None],
    grads: Sequence[UpdateOperand | None],
    opt_state: PyTree,
    scale: Tensor | None,
) -> Update:
    """Returns the update of all leaves, from this rank's rows of params and gradients."""
    leaves, treedef = tree_flatten(opt_state)
    held = tree_unflatten(plan.treedef, [None if c is None else c.held for c in params])
    rule = rule_of(plan, optimizer)
    homes: list[MemoryKind] = [leaf.ways.state.memory_kind for leaf in plan.leaves if leaf.trainable]
    index = [i for i, leaf in enumerate(plan.leaves) if leaf.trainable]
    owners = state_owners(opt_state, held, rule)
    state = [UpdateOperand(x, homes[k] if k is not None else "device") for x, k in zip(leaves, owners, strict=True)]
    return Update(
        optimizer=rule,
        treedef=plan.treedef,
        specs=[leaf.shard for leaf in plan.leaves],
        numels=[-(-leaf.numel // plan.mesh.axis_size(leaf.zero_axes)) for leaf in plan.leaves],
        params=params,
        grads=grads,
        state=state,
        state_treedef=treedef,
        owners=[None if k is None else index[k] for k in owners],
        scale=scale,
        device=plan.mesh.device,
        pool=pool_of(plan),
        chunk=plan.zero.pace.chunk_bytes,
    )


def _make_column(plan: Plan, leaf: LeafLayout, block: StoredValue) -> UpdateOperand:
    """Returns a parameter's rows in the update. Rows that are gathered afterwards are written to memory."""
    # Where there is a master copy the parameter is its cast, and only written.
    read = leaf.dtypes.param == leaf.dtypes.master
    if not leaf.refreshed:
        return UpdateOperand(block, leaf.home, read)
    with in_memory(leaf.home):
        return UpdateOperand(shard_rows(plan, leaf, load_at(block, leaf.home)), kind_when_loaded(leaf.home), read)


def rule_of(plan: Plan, optimizer: GradientTransformation) -> GradientTransformation:
    """Returns the optimizer as it steps under a plan: decided on whole leaves, and with the axes that are left to it.

    All calls of the optimizer's functions go through here, so that a mask or labels are never shown a block.
    """
    rule = decided_on(plan, optimizer)
    return rule if rule.needs.phases is None else bind_stats(rule, whole(plan))


def decided_on(plan: Plan, optimizer: GradientTransformation) -> GradientTransformation:
    """Returns the optimizer, with its functions of the tree evaluated on the plan's whole leaves.

    Cached in the plan.
    """
    return plan.learnt.rule(optimizer, lambda: resolve_masks(optimizer, whole(plan)))


def whole(plan: Plan) -> PyTree:
    """Returns the trainable leaves without data."""

    def like(leaf: LeafLayout) -> WholeLeaf | None:
        if not leaf.trainable:
            return None
        block = torch.empty(leaf.block, dtype=leaf.dtypes.master, device="meta")
        return WholeLeaf(block, leaf.shape, leaf.shard, plan.mesh, leaf.distinct_axes, leaf.ways.summed.unreduced)

    return tree_unflatten(plan.treedef, [like(leaf) for leaf in plan.leaves])


def wrap(plan: Plan, blocks: Sequence[StoredValue]) -> PyTree:
    """This rank's blocks as a tree of global tensors."""
    pairs = zip(blocks, plan.leaves, strict=True)
    whole = [GlobalTensor(x, leaf.shape, leaf.param, plan.mesh, leaf.home, leaf.frozen) for x, leaf in pairs]
    return tree_unflatten(plan.treedef, whole)


def shard_rows(plan: Plan, leaf: LeafLayout, block: StoredValue) -> Tensor:
    """Returns the part of a parameter that this rank updates: a view where it can be."""
    assert isinstance(block, Tensor)
    cut = plan.rank_cuts.get(leaf.path)
    return block if cut is None else block.narrow(*cut).contiguous()


def _wrap_blocks(tree: PyTree, old: PyTree) -> PyTree:
    """Returns the blocks of an updated optimizer state, as global tensors like the leaves of the old state."""
    leaves, treedef = tree_flatten(tree)
    before, structure = tree_flatten(old)
    if treedef != structure:
        raise ValueError(f"the optimizer changed the structure of its state from {structure} to {treedef}.")
    pairs = zip(leaves, before, strict=True)
    return tree_unflatten(treedef, [m.with_block(x) for x, m in pairs])


@contextlib.contextmanager
def early(
    plan: Plan, optimizer: GradientTransformation, state: TrainState, *, decided: bool
) -> Iterator[OverlappedUpdate | None]:
    """Yields an update of the leaves that can be updated beside the backward, or None if no leaf can be.

    Args:
        plan: the layout. The order in which gradients come is known after the first step.
        optimizer: the rule.
        state: the current state; looked at only.
        decided: whether it is known beforehand that the step is not skipped, and that gradients are not rescaled.
    """
    ahead = None
    # Squares of canonical sums are added up by all ranks together, and so not by the thread of such an update.
    decided = decided and plan.chunks is None
    # A rule of a coarser grain may sum over ranks, and wants the whole tree, or leaves in a single piece. Not in the
    # first step, and not where gradients are divided by a weight that the last microbatch makes known.
    decided = decided and plan.learnt.outcome is not None and not plan.learnt.outcome.startswith(WEIGHTED)
    if (
        decided
        and plan.learnt.reduce_order
        and not plan.at_home
        and optimizer.needs.granularity == "element"
        and _knows_its_measures(optimizer, state)
    ):
        units = _find_early_units(plan, measures=optimizer.needs.measure is not None)
        ahead = _start_early_update(plan, optimizer, state, units) if units else None
    try:
        yield ahead
    finally:
        # However the step ended: the thread must not read a state that its caller may write again.
        if ahead is not None:
            ahead.stop()


def _start_early_update(
    plan: Plan, optimizer: GradientTransformation, state: TrainState, units: list[int]
) -> OverlappedUpdate:
    params, opt_state = peek_blocks((state.params, state.opt_state))
    where = _index_layers(plan)
    layers = {
        u: [
            (where[i], plan.layers[i].pieces.shapes[plan.zero_rank(plan.layers[i])])
            for i in plan.reduce_units[u].leaves
        ]
        for u in units
    }
    going = {rows.leaf for own in layers.values() for rows, _ in own}
    columns: list[UpdateOperand | None] = []
    grads: list[UpdateOperand | None] = []
    for i, (leaf, block) in enumerate(zip(plan.leaves, tree_leaves(params), strict=True)):
        shape, dtypes = leaf.pieces.shapes[plan.zero_rank(leaf)], leaf.dtypes
        held = torch.empty(shape, dtype=dtypes.param, device="meta")
        if i in going:
            cut = plan.rank_cuts.get(leaf.path)
            held = block if cut is None else block.narrow(*cut)
        # Blocks in memory stay unchanged until the step is sure to end: their new rows are kept beside them.
        kept = not leaf.ways.kept.is_stored
        columns.append(UpdateOperand(held, leaf.home, dtypes.param == dtypes.master, kept) if leaf.trainable else None)
        promised = Promised(i, shape, dtypes.accum, bool(leaf.layers)) if i in going else None
        grads.append(None if promised is None else UpdateOperand(promised, "host"))
    update = whole_update(plan, optimizer, columns, grads, opt_state, None)
    return OverlappedUpdate(update, [rows for own in layers.values() for rows, _ in own], layers)


def _knows_its_measures(optimizer: GradientTransformation, state: TrainState) -> bool:
    """Returns whether the next step needs no measure of its own gradients."""
    measure = optimizer.needs.measure
    if measure is None:
        return True
    return measure.ahead is not None and measure.ahead(peek_blocks(state.opt_state))  # looked at, not loaded


def _find_early_units(plan: Plan, *, measures: bool) -> list[int]:
    """Returns the units whose leaves can be updated early, in the order in which their gradients are complete.

    Args:
        plan: the layout.
        measures: whether whole leaves are measured, so that a stacked one must not come layer by layer.
    """
    where = [rows.leaf for rows in _index_layers(plan)]
    able = [_is_able(leaf, plan.zero.persist_elements) and not (measures and leaf.layers) for leaf in plan.leaves]
    # A unit goes early only with all of its leaves, and a leaf only with all of its units: until both hold.
    while True:
        units = [u for u in plan.learnt.reduce_order if _arrives_as_rows(plan, plan.reduce_units[u], able, where)]
        reached = collections.Counter(where[x] for u in units for x in plan.reduce_units[u].leaves)
        whole = [
            ok and reached[i] == len(leaf.layers or (i,))
            for i, (ok, leaf) in enumerate(zip(able, plan.leaves, strict=True))
        ]
        if whole == able:
            return units
        able = whole


def _is_able(leaf: LeafLayout, small: int) -> bool:
    """Returns whether the new values of a leaf can be kept beside the old ones."""
    if not leaf.trainable or not leaf.ways.state.is_stored or leaf.ways.summed.is_plain:
        return False
    if leaf.refreshed and not leaf.ways.kept.is_plain:
        return False
    return leaf.ways.kept.is_stored or not leaf.ways.summed.is_stored or leaf.shape.numel() <= small


def _arrives_as_rows(plan: Plan, unit: Unit, able: list[bool], where: list[int]) -> bool:
    """Returns whether a unit arrives as the rows that this rank steps, with nothing left to be summed."""
    first = plan.layers[unit.leaves[0]]
    size = plan.mesh.axis_size
    whole = size(first.reduce_axes) == 1 and all(plan.layers[x].dim is None for x in unit.leaves)
    return (
        size(first.extra_axes) == 1
        and (first.ways.reduce.scatters or whole)
        and all(able[where[x]] for x in unit.leaves)
    )


def _index_layers(plan: Plan) -> list[LeafRows]:
    """For each layer of a plan, its index in its leaf."""
    return [
        rows
        for i, leaf in enumerate(plan.leaves)
        for rows in ([LeafRows(i, k, k + 1) for k in range(len(leaf.layers))] if leaf.layers else [LeafRows(i)])
    ]
