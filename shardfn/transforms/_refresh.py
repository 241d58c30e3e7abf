"""After the update: resident parameters are made whole again from the rows that each rank updated."""

from collections.abc import Sequence

from torch import Tensor

from shardfn.collectives import AnyChannels, Pending

from ._gather import start_gather
from ._layout import unit_parts, unit_sizes
from ._plan import Plan


def refresh(plan: Plan, channels: AnyChannels, blocks: Sequence[Tensor], rows: Sequence[Tensor | None]) -> list[Tensor]:
    """The parameters to keep, given what each rank updated.

    Args:
        plan: the layout.
        channels: the step's communicators.
        blocks: the parameters before the update; resident ones are overwritten.
        rows: this rank's updated part of each trainable leaf (the block itself where it is not cut).

    Returns:
        The new blocks, in the order of `blocks`.
    """
    out = [b if r is None or leaf.refreshed else r for leaf, b, r in zip(plan.leaves, blocks, rows, strict=True)]
    blocks, rows = plan.by_layer(blocks), plan.by_layer(rows)
    started = [_start(plan, channels, unit.leaves, blocks, rows) for unit in plan.refresh_units]
    for unit, (pending, landed) in zip(plan.refresh_units, started, strict=True):
        arrived = pending.result()
        if landed:
            continue
        leaves = [plan.layers[i] for i in unit.leaves]
        for run, parts in unit_parts(leaves, arrived):
            for i, part in zip(unit.leaves, parts, strict=True):
                plan.layers[i].by_rank(blocks[i], run).copy_(part)
    channels.flush()
    return out


def _start(
    plan: Plan, channels: AnyChannels, members: Sequence[int], blocks: Sequence[Tensor], rows: Sequence[Tensor | None]
) -> tuple[Pending, bool]:
    """The transfer of one unit, and whether it lands in the parameter itself."""
    leaves = [plan.layers[i] for i in members]
    channel = channels.gather(leaves[0].zero_axes)
    block, row = blocks[members[0]], rows[members[0]]
    assert row is not None
    if len(members) == 1 and leaves[0].dim == 0 and block.is_contiguous():
        return channel.all_gather(row, unit_sizes(leaves, channel.size), block.view(-1), idle=True), True
    pieces: list[Tensor] = []
    for i in members:
        piece = rows[i]
        assert piece is not None
        pieces.append(piece)
    return start_gather(list(zip(leaves, pieces, strict=True)), channel, refresh=True), False
