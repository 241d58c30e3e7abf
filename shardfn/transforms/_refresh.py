"""After the update: resident parameters are made whole again from the rows that each rank updated."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shardfn.collectives import AnyChannels, Pending
from shardfn.core import Stored
from shardfn.memory import AnyPool, to_device, to_host

from ._gather import packed
from ._layout import Unit, unit_parts, unit_sizes
from ._plan import Plan


def refresh(
    plan: Plan,
    channels: AnyChannels,
    blocks: Sequence[Tensor | Stored],
    rows: Sequence[Tensor | Stored | None],
    pool: AnyPool | None = None,
) -> list[Tensor | Stored]:
    """The parameters to keep, given what each rank updated.

    Args:
        plan: the layout.
        channels: the step's communicators.
        blocks: the parameters before the update; resident ones are overwritten.
        rows: this rank's updated part of each trainable leaf (the block itself where it is not cut).
        pool: the disk, for leaves that are kept there.

    Returns:
        The new blocks, in the order of `blocks`.
    """
    out = [b if r is None or leaf.refreshed else r for leaf, b, r in zip(plan.leaves, blocks, rows, strict=True)]
    layered, fresh = plan.by_layer(out), plan.by_layer(rows)
    resident = [unit for unit in plan.refresh_units if plan.layers[unit.leaves[0]].home == "device"]
    here = [x if isinstance(x, Tensor) else None for x in layered]
    started = [_start(plan, channels, unit.leaves, here, fresh) for unit in resident]
    for unit, (pending, landed) in zip(resident, started, strict=True):
        arrived = pending.result()
        if not landed:
            _spread(plan, unit, arrived, here)
    away = [unit for unit in plan.refresh_units if plan.layers[unit.leaves[0]].home != "device"]
    if away:
        _send_home(plan, channels, away, fresh, layered, out, pool)
    channels.flush()
    return out


def _spread(plan: Plan, unit: Unit, arrived: Tensor, into: Sequence[Tensor | None]) -> None:
    leaves = [plan.layers[i] for i in unit.leaves]
    for run, parts in unit_parts(leaves, arrived):
        for i, part in zip(unit.leaves, parts, strict=True):
            block = into[i]
            assert block is not None
            plan.layers[i].by_rank(block, run).copy_(part)


def _send_home(
    plan: Plan,
    channels: AnyChannels,
    units: Sequence[Unit],
    rows: Sequence[Tensor | Stored | None],
    layered: Sequence[Tensor | Stored],
    out: list[Tensor | Stored],
    pool: AnyPool | None,
) -> None:
    """Makes leaves whole on the device that are kept elsewhere and sends them there, unit by unit."""
    where = [(i, k) for i, leaf in enumerate(plan.leaves) for k in range(len(leaf.layers) or 1)]
    writers: dict[int, Any] = {}
    for unit in units:
        for i, x in _made_whole(plan, channels, unit, rows).items():
            block, (leaf, layer) = layered[i], where[i]
            if isinstance(block, Tensor):
                to_host(x, block).result()
                continue
            assert pool is not None
            if leaf not in writers:
                writers[leaf] = pool.writer(plan.leaves[leaf].block, x.dtype)
            below = to_host(x).result()
            writers[leaf].write(layer, below[None] if plan.leaves[leaf].layers else below).result()
    for leaf, writer in writers.items():
        out[leaf] = writer.finish()


def _made_whole(
    plan: Plan, channels: AnyChannels, unit: Unit, rows: Sequence[Tensor | Stored | None]
) -> dict[int, Tensor]:
    """The leaves of a unit on the device, from each rank's rows."""
    device = plan.mesh.device
    whole: list[Tensor | None] = [None] * len(rows)
    up: list[Tensor | None] = [None] * len(rows)
    for i in unit.leaves:
        row = rows[i]
        assert isinstance(row, Tensor)
        up[i] = to_device(row, device).result()
        whole[i] = torch.empty(plan.layers[i].block, dtype=row.dtype, device=device)
    pending, landed = _start(plan, channels, unit.leaves, whole, up)
    arrived = pending.result()
    if not landed:
        _spread(plan, unit, arrived, whole)
    made = {i: whole[i] for i in unit.leaves}
    return {i: x for i, x in made.items() if x is not None}


def _start(
    plan: Plan,
    channels: AnyChannels,
    members: Sequence[int],
    blocks: Sequence[Tensor | None],
    rows: Sequence[Tensor | Stored | None],
) -> tuple[Pending, bool]:
    """The transfer of one unit, and whether it lands in the parameter itself."""
    leaves = [plan.layers[i] for i in members]
    channel = channels.gather(leaves[0].zero_axes)
    block, row = blocks[members[0]], rows[members[0]]
    assert isinstance(row, Tensor) and block is not None
    if len(members) == 1 and leaves[0].dim == 0 and block.is_contiguous():
        return channel.all_gather(row, unit_sizes(leaves, channel.size), block.view(-1), idle=True), True
    pieces: list[Tensor] = []
    for i in members:
        piece = rows[i]
        assert isinstance(piece, Tensor)
        pieces.append(piece)
    return channel.all_gather(packed(pieces), unit_sizes(leaves, channel.size), idle=True), False
