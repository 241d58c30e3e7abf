"""Chooses the leaves that are updated while the backward goes on.

These are leaves whose state is on disk, where the update takes long; whose rule needs only their own gradient; and
whose new values can be kept beside the old ones at little cost in memory: on disk, or in the gradient's memory.
"""

import collections
import contextlib
from collections.abc import Iterator

import torch

from shardfn.core import is_device, is_disk, is_host, tree_leaves
from shardfn.engine.plan import Plan
from shardfn.engine.transfers import WEIGHTED
from shardfn.leaves import LeafLayout, Unit
from shardfn.optim import GradientTransformation
from shardfn.state import Ahead, Column, LeafRows, Promised, TrainState, looked_at

from ._update import whole_update


@contextlib.contextmanager
def early(plan: Plan, optimizer: GradientTransformation, state: TrainState, *, decided: bool) -> Iterator[Ahead | None]:
    """An update of the leaves that can be updated beside the backward; None if no leaf can be.

    Args:
        plan: the layout. The order in which gradients come is known after the first step.
        optimizer: the rule.
        state: the current state; looked at only.
        decided: whether it is known beforehand that the step is not skipped, and that gradients are not rescaled.
    """
    ahead = None
    # A rule of a coarser grain may sum over ranks, and wants the whole tree, or leaves in one piece. Not in the first
    # step, and not where gradients are divided by a weight that the last microbatch makes known.
    decided = decided and plan.learnt.outcome is not None and not plan.learnt.outcome.startswith(WEIGHTED)
    if (
        decided
        and plan.learnt.reduce_order
        and not plan.at_home
        and optimizer.needs.granularity == "element"
        and _knows_its_measures(optimizer, state)
    ):
        units = _units(plan, measures=optimizer.needs.measure is not None)
        ahead = _ahead(plan, optimizer, state, units) if units else None
    try:
        yield ahead
    finally:
        # However the step ended: the thread must not read a state that its caller may write again.
        if ahead is not None:
            ahead.stop()


def _ahead(plan: Plan, optimizer: GradientTransformation, state: TrainState, units: list[int]) -> Ahead:
    params, opt_state = looked_at((state.params, state.opt_state))
    where = _where(plan)
    layers = {
        u: [
            (where[i], plan.layers[i].pieces.shapes[plan.zero_rank(plan.layers[i])])
            for i in plan.reduce_units[u].leaves
        ]
        for u in units
    }
    going = {rows.leaf for own in layers.values() for rows, _ in own}
    columns: list[Column | None] = []
    grads: list[Column | None] = []
    for i, (leaf, block) in enumerate(zip(plan.leaves, tree_leaves(params), strict=True)):
        shape, dtypes = leaf.pieces.shapes[plan.zero_rank(leaf)], leaf.dtypes
        held = torch.empty(shape, dtype=dtypes.param, device="meta")
        if i in going:
            cut = plan.own_cuts.get(leaf.path)
            held = block if cut is None else block.narrow(*cut)
        # Blocks in memory stay unchanged until the step is sure to end: their new rows are kept beside them.
        kept = not leaf.ways.kept.is_stored
        columns.append(Column(held, leaf.home, dtypes.param == dtypes.master, kept) if leaf.trainable else None)
        promised = Promised(i, shape, dtypes.accum, bool(leaf.layers)) if i in going else None
        grads.append(None if promised is None else Column(promised, "host"))
    update = whole_update(plan, optimizer, columns, grads, opt_state, None)
    return Ahead(update, [rows for own in layers.values() for rows, _ in own], layers)


def _knows_its_measures(optimizer: GradientTransformation, state: TrainState) -> bool:
    """Whether the next step needs no measure of its own gradients."""
    measure = optimizer.needs.measure
    if measure is None:
        return True
    return measure.ahead is not None and measure.ahead(looked_at(state.opt_state))  # looked at, not loaded


def _units(plan: Plan, *, measures: bool) -> list[int]:
    """The units whose leaves can be updated early, in the order in which their gradients are complete.

    Args:
        plan: the layout.
        measures: whether whole leaves are measured, so that a stacked one must not come layer by layer.
    """
    where = [rows.leaf for rows in _where(plan)]
    able = [_is_able(leaf, plan.zero.persist_elements) and not (measures and leaf.layers) for leaf in plan.leaves]
    # A unit goes early only with all of its leaves, and a leaf only with all of its units: until both hold.
    while True:
        units = [u for u in plan.learnt.reduce_order if _arrives(plan, plan.reduce_units[u], able, where)]
        reached = collections.Counter(where[x] for u in units for x in plan.reduce_units[u].leaves)
        whole = [
            ok and reached[i] == len(leaf.layers or (i,))
            for i, (ok, leaf) in enumerate(zip(able, plan.leaves, strict=True))
        ]
        if whole == able:
            return units
        able = whole


def _is_able(leaf: LeafLayout, small: int) -> bool:
    """Whether the new values of a leaf can be kept beside the old ones."""
    if not leaf.trainable or not is_disk(leaf.ways.state.memory_kind) or is_device(leaf.ways.summed.memory_kind):
        return False
    if leaf.refreshed and not leaf.ways.kept.is_plain:
        return False
    return leaf.ways.kept.is_stored or is_host(leaf.ways.summed.memory_kind) or leaf.shape.numel() <= small


def _arrives(plan: Plan, unit: Unit, able: list[bool], where: list[int]) -> bool:
    """Whether a unit arrives as the rows that this rank steps, with nothing left to be summed."""
    first = plan.layers[unit.leaves[0]]
    size = plan.mesh.axis_size
    whole = size(first.reduce_axes) == 1 and all(plan.layers[x].dim is None for x in unit.leaves)
    return (
        size(first.extra_axes) == 1
        and (first.ways.reduce.scatters or whole)
        and all(able[where[x]] for x in unit.leaves)
    )


def _where(plan: Plan) -> list[LeafRows]:
    """For each layer of a plan, its index in its leaf."""
    return [
        rows
        for i, leaf in enumerate(plan.leaves)
        for rows in ([LeafRows(i, k, k + 1) for k in range(len(leaf.layers))] if leaf.layers else [LeafRows(i)])
    ]
