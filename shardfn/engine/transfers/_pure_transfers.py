"""The transfers of the functional step, as pure functions of tensors: storage -> compute, and back.

    wholes = enter_purely(plan, blocks)           storage -> the loss's leaves, one a rank (V over the batch's axes)
    rows   = reduce_purely(plan, cotangents)      its transpose, summed: each rank's rows of the gradient
    blocks = refresh_purely(plan, blocks, rows)   updated rows -> storage

Each is made of the differentiable collectives, so that it has a transpose and a vmap rule of its own. Leaves of one
unit travel in a single message, padded to the rows of the first rank. A vmapped step has the same number of messages,
each K times as large.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from shardfn.collectives import (
    AxisTypeMode,
    EvenPacking,
    all_gather,
    all_gather_invariant,
    psum,
    psum_scatter,
    pvary,
    take_own_block,
)
from shardfn.core import raise_all
from shardfn.engine.plan import Plan
from shardfn.leaves import LeafLayout, Unit
from shardfn.memory import put


def enter_purely(plan: Plan, blocks: Sequence[Tensor], mode: AxisTypeMode | None = None) -> list[Tensor]:
    """Returns the leaves as the loss sees them; differentiating them gives summed gradients in the storage layout.

    Args:
        plan: the layout.
        blocks: this rank's piece of each parameter, in the memory in which it is kept. Blocks on disk have been read.
        mode: the types of a function, in which a leaf is the same on all ranks along the batch's axes and its uses are
            cast, or None in a loss, where each rank has its own.

    Raises:
        ValueError: leaves or gradients are quantised on their way, which has no derivative.
    """
    coded = [
        x.path for x in plan.leaves if x.ways.use.quantization or x.ways.reduce.quantization or x.places.quantization
    ]
    raise_all(
        ValueError,
        "step.loss, and steps under torch.func, are exact; leave out Travel(gather=, reduce=), which rounds:",
        coded,
    )
    device = plan.mesh.device
    here = [b if b.device.type == device.type else put(b, "device", device) for b in blocks]
    blocks = [b.to(leaf.dtypes.compute) for leaf, b in zip(plan.leaves, here, strict=True)]
    wholes = list(blocks)
    unsummed = [leaf.reduce_axes + leaf.extra_axes for leaf in plan.leaves]
    for unit in plan.gather_units:
        first = plan.leaves[unit.leaves[0]]
        if first.used.dim is None:  # brought from another memory, and here by now
            continue
        invariant = mode is not None or not first.ways.reduce.scatters
        for i, whole in _gather_leaves(plan, unit, blocks, invariant=invariant):
            wholes[i] = whole
            if not invariant:  # the gather's transpose sums over its own axes
                unsummed[i] = plan.leaves[i].extra_axes
    if mode is not None:
        return [mode.declare(x.view_as(x), leaf.distinct_axes) for leaf, x in zip(plan.leaves, wholes, strict=True)]
    wholes = [pvary(x, axes) if x.is_floating_point() else x for x, axes in zip(wholes, unsummed, strict=True)]
    for leaf, x in zip(plan.leaves, wholes, strict=True):
        if leaf.distinct_axes:
            plan.following.declare(x, (*plan.batch_axes, *leaf.distinct_axes))
    return wholes


def reduce_purely(plan: Plan, grads: dict[int, Tensor]) -> dict[int, Tensor]:
    """Returns the gradients summed over the ranks that share the batch: of each leaf the rows that this rank updates.

    Args:
        plan: the layout.
        grads: trainable leaf -> this rank's gradient of the whole leaf.
    """
    out: dict[int, Tensor] = {}
    for unit in plan.reduce_units:
        first = plan.leaves[unit.leaves[0]]
        leaves = [plan.leaves[i] for i in unit.leaves]
        given = [grads[i].to(first.dtypes.reduce) for i in unit.leaves]
        pieces = (
            _reduce_scatter(plan, leaves, given)
            if first.ways.reduce.scatters
            else _all_reduce_rows(plan, leaves, given)
        )
        out.update({i: piece.to(first.dtypes.accum) for i, piece in zip(unit.leaves, pieces, strict=True)})
    return out


def shard_rows(plan: Plan, leaf: LeafLayout, block: Tensor) -> Tensor:
    """Returns the part of a parameter that this rank updates."""
    cut = plan.rank_cuts.get(leaf.path)
    return block if cut is None else take_own_block(block, leaf.zero_axes, dim=cut[0])


def refresh_purely(plan: Plan, blocks: Sequence[Tensor], rows: Sequence[Tensor | None]) -> list[Tensor]:
    """Returns the parameters to keep, given this rank's updated rows (None: a leaf that is not trained)."""
    out = [b if r is None else r for b, r in zip(blocks, rows, strict=True)]
    for unit in plan.refresh_units:
        for i, whole in _gather_leaves(plan, unit, out, invariant=True):
            out[i] = whole
    return out


def _gather_leaves(
    plan: Plan, unit: Unit, pieces: Sequence[Tensor], *, invariant: bool
) -> Iterator[tuple[int, Tensor]]:
    """Yields the whole leaves of a single unit, from every rank's rows."""
    packing = EvenPacking([plan.leaves[i].pieces for i in unit.leaves])
    gather = all_gather_invariant if invariant else all_gather
    arrived = gather(packing.pack([pieces[i] for i in unit.leaves]), plan.leaves[unit.leaves[0]].zero_axes)
    yield from zip(unit.leaves, packing.unpack(arrived), strict=True)


def _reduce_scatter(plan: Plan, leaves: list[LeafLayout], grads: list[Tensor]) -> list[Tensor]:
    """This rank's rows of the sum over all axes of the batch, in a single message."""
    packing = EvenPacking([leaf.pieces for leaf in leaves])
    own = psum(psum_scatter(packing.lay(grads), leaves[0].reduce_axes), leaves[0].extra_axes)
    return packing.split(own, plan.zero_rank(leaves[0]))


def _all_reduce_rows(plan: Plan, leaves: list[LeafLayout], grads: list[Tensor]) -> list[Tensor]:
    """This rank's rows of the sum over all axes of the batch, cut after the sum."""
    flat = psum(torch.cat([g.reshape(-1) for g in grads]), leaves[0].reduce_axes + leaves[0].extra_axes)
    parts = flat.split([leaf.block.numel() for leaf in leaves])
    wholes = [part.reshape(leaf.block) for leaf, part in zip(leaves, parts, strict=True)]
    return [
        x if leaf.dim is None else take_own_block(x, leaf.zero_axes, dim=leaf.dim)
        for leaf, x in zip(leaves, wholes, strict=True)
    ]
