"""After the update: resident parameters are made whole again from the rows that each rank updated."""

from collections.abc import Sequence

from torch import Tensor

from shardfn.collectives import Channel, Channels, Pending

from ._gather import start_gather
from ._layout import LeafLayout
from ._plan import Plan


def refresh(plan: Plan, channels: Channels, blocks: Sequence[Tensor], rows: Sequence[Tensor | None]) -> list[Tensor]:
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
    started = [_start(plan, channels, unit.leaves, blocks, rows) for unit in plan.refresh_units]
    for unit, (pending, parts) in zip(plan.refresh_units, started, strict=True):
        pending.result()
        for rank, pieces in enumerate(parts):
            for i, piece in zip(unit.leaves, pieces, strict=True):
                plan.leaves[i].rows(blocks[i], rank).copy_(piece)
    channels.flush()
    return out


def _start(
    plan: Plan, channels: Channels, members: Sequence[int], blocks: Sequence[Tensor], rows: Sequence[Tensor | None]
) -> tuple[Pending, list[list[Tensor]]]:
    leaves = [plan.leaves[i] for i in members]
    channel = channels.gather(leaves[0].zero_axes)
    block, row = blocks[members[0]], rows[members[0]]
    assert row is not None
    if len(members) == 1 and leaves[0].dim == 0 and block.is_contiguous():
        return channel.all_gather(_in_place(leaves[0], block, channel), row, idle=True), []
    pieces: list[Tensor] = []
    for i in members:
        piece = rows[i]
        assert piece is not None
        pieces.append(piece)
    pending, _, parts = start_gather(list(zip(leaves, pieces, strict=True)), channel, refresh=True)
    return pending, parts


def _in_place(leaf: LeafLayout, block: Tensor, channel: Channel) -> list[Tensor]:
    return [leaf.rows(block, r).view(-1) for r in range(channel.size)]
