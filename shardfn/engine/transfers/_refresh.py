"""After the update: gathers resident parameters again from the rows that each rank has updated."""

from collections.abc import Sequence

import torch
from torch import Tensor

from shardfn.collectives import AnyChannels, GatherWire, gather_wires
from shardfn.core import Pending, StoredValue
from shardfn.engine.agreement import named_range
from shardfn.engine.plan import Plan
from shardfn.leaves import Unit
from shardfn.memory import AnyPool
from shardfn.state import Successor, fetch


def refresh(
    plan: Plan,
    channels: AnyChannels,
    blocks: Sequence[StoredValue],
    rows: Sequence[StoredValue | None],
    pool: AnyPool | None = None,
) -> list[StoredValue]:
    """Returns the parameters to keep, given the rows that each rank updated.

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
    if not plan.refresh_units:
        return out
    layered, fresh = plan.by_layer(out), plan.by_layer(rows)
    resident = [unit for unit in plan.refresh_units if plan.layers[unit.leaves[0]].ways.kept.is_plain]
    here = [x if isinstance(x, Tensor) else None for x in layered]
    # From here on parameters are overwritten, some by the transfers themselves: an error leaves some new and some old.
    # All are started before the first is waited for. Every rank has the same units in the same order.
    started = list[tuple[Pending[Tensor], GatherWire | None]]()
    for unit in resident:
        with named_range("refresh", plan.layers, unit.leaves):
            started.append(_start_refresh(plan, channels, unit, here, fresh))
    for unit, sent in zip(resident, started, strict=True):
        with named_range("refresh", plan.layers, unit.leaves):
            _spread_unit(unit, *sent, here)
    away = [unit for unit in plan.refresh_units if not plan.layers[unit.leaves[0]].ways.kept.is_plain]
    if away:
        _store_leaves(plan, channels, away, fresh, blocks, out, pool)
    channels.flush()
    return out


def _spread_unit(unit: Unit, pending: Pending[Tensor], wire: GatherWire | None, into: Sequence[Tensor | None]) -> None:
    """Waits for a unit, and writes the leaves, if the message has not come to their memory."""
    arrived = pending.result()
    if wire is not None:
        wire.put(arrived, [block for i in unit.leaves if (block := into[i]) is not None])


def _store_leaves(
    plan: Plan,
    channels: AnyChannels,
    units: Sequence[Unit],
    rows: Sequence[StoredValue | None],
    blocks: Sequence[StoredValue],
    out: list[StoredValue],
    pool: AnyPool | None,
) -> None:
    """Makes leaves whole on the device that are kept elsewhere, and stores them, unit by unit.

    Args:
        plan: the layout.
        channels: the step's communicators.
        units: units of these leaves.
        rows: this rank's updated rows, by layer.
        blocks: parameters before the update.
        out: parameters after the update; is changed.
        pool: the disk.
    """
    # Values on disk are replaced: the old ones belong to a commit.
    where = [(i, k) for i, leaf in enumerate(plan.leaves) for k in range(len(leaf.layers) or 1)]
    writers: dict[int, Successor] = {}
    for unit in units:
        with named_range("refresh", plan.layers, unit.leaves):
            whole = _gather_unit(plan, channels, unit, rows)
        for i, x in whole.items():
            leaf, layer = where[i]
            if leaf not in writers:
                writers[leaf] = Successor(blocks[leaf], plan.leaves[leaf].home, pool)
            # Unit by unit: the device has room for one whole unit, and not for all.
            going = writers[leaf].write(layer, x[None] if plan.leaves[leaf].layers else x, "device")
            if going is not None:
                going.result()
    for leaf, writer in writers.items():
        out[leaf] = writer.finish()


def _gather_unit(
    plan: Plan, channels: AnyChannels, unit: Unit, rows: Sequence[StoredValue | None]
) -> dict[int, Tensor]:
    """Returns the leaves of a unit on the device, from each rank's rows."""
    device = plan.mesh.device
    whole: list[Tensor | None] = [None] * len(rows)
    up: list[Tensor | None] = [None] * len(rows)
    for i in unit.leaves:
        row = rows[i]
        assert isinstance(row, Tensor)
        up[i] = fetch(row, plan.layers[i].home, device)
        whole[i] = torch.empty(plan.layers[i].block, dtype=row.dtype, device=device)
    _spread_unit(unit, *_start_refresh(plan, channels, unit, whole, up), whole)
    made = {i: whole[i] for i in unit.leaves}
    return {i: x for i, x in made.items() if x is not None}


def _start_refresh(
    plan: Plan,
    channels: AnyChannels,
    unit: Unit,
    blocks: Sequence[Tensor | None],
    rows: Sequence[StoredValue | None],
) -> tuple[Pending[Tensor], GatherWire | None]:
    """Starts one unit's transfer; also the wire that unpacks it, None for a message in the parameter's memory."""
    first, block = plan.layers[unit.leaves[0]], blocks[unit.leaves[0]]
    (wire,) = gather_wires(channels, [(first.ways.refresh, unit.packing)])
    pieces = [row for i in unit.leaves if isinstance(row := rows[i], Tensor)]
    assert block is not None and len(pieces) == len(unit.leaves)
    # The rows of all ranks, in sequence, are the leaf as it lies in memory.
    lands = len(unit.leaves) == 1 and first.dim == 0 and block.is_contiguous()
    return wire.start_into(pieces, block.view(-1) if lands else None), None if lands else wire
