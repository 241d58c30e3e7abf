"""Moves leaves along their routes on one mesh: `moved`, and `reshard_purely`, which autograd can differentiate."""

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from shardfn.collectives import GlobalTensor, Route, bind_mesh, carry, carry_all
from shardfn.core import MemoryKind, Mesh, Pending, StoredValue
from shardfn.memory import put
from shardfn.state import copy_value, start_move

from ._into import overwrite
from ._reshard_request import Transit


def moved(transits: Sequence[Transit]) -> list[GlobalTensor]:
    """Returns the leaves in their new placements, mesh by mesh, several at a time. Collective over each mesh."""
    out: dict[int, GlobalTensor] = {}
    # In the order of the leaves, so on all ranks in one order.
    for mesh in {id(t.mesh): t.mesh for t in transits}.values():
        mine = [i for i, t in enumerate(transits) if t.mesh is mesh]
        out |= zip(mine, _move_blocks(mesh, [transits[i] for i in mine]), strict=True)
    return [out[i] for i in range(len(transits))]


def reshard_purely(transits: Sequence[Transit]) -> list[GlobalTensor]:
    """Returns the leaves in their new placements, by functions that torch can differentiate and capture."""

    def one(t: Transit) -> GlobalTensor:
        if t.stays or not t.mesh.is_member:
            return t.x if t.stays else t.elsewhere()
        with bind_mesh(t.mesh):
            return t.made(carry(t.x.local, t.route(), move=functools.partial(_put_block, device=t.mesh.device)))

    return [one(t) for t in transits]


def _move_blocks(mesh: Mesh, transits: Sequence[Transit]) -> list[GlobalTensor]:
    if not mesh.is_member:
        return [t.x if t.stays else t.elsewhere() for t in transits]

    def send(block: StoredValue, src: MemoryKind, dst: MemoryKind) -> Pending[StoredValue]:
        return start_move(block, src, dst, mesh.device, transits[0].pool)

    # Leaves of the same shape and layout share theirs: finding one takes as long as a small leaf's share of a message.
    known: dict[object, Route] = {}
    for t in transits:
        if (t.x.shape, t.src, t.dst) not in known:
            known[t.x.shape, t.src, t.dst] = t.route()
    routes = [known[t.x.shape, t.src, t.dst] for t in transits]

    def keep(i: int, end: StoredValue) -> StoredValue:
        t = transits[i]
        if t.into is not None:
            return overwrite(t.into, end)
        return end if t.stays or routes[i].hops else copy_value(end, t.dst.memory_kind)

    with bind_mesh(mesh):
        ends = carry_all([t.x.held for t in transits], routes, send, keep)
    return [t.x if t.stays else t.made(end) for t, end in zip(transits, ends, strict=True)]


def _put_block(block: Tensor, kind: MemoryKind, *, device: torch.device) -> Tensor:
    return put(block, kind, device)
