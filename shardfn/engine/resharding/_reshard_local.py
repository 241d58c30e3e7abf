"""Moves leaves along their routes on one mesh: `moved`, and `moved_purely`, which autograd can differentiate."""

import contextlib
import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from shardfn.collectives import GlobalTensor, Route, bind_mesh, carry, carry_all
from shardfn.core import MemoryKind, Mesh, Pending, Placement, Stored
from shardfn.memory import Pool, on_host, put, to_device, to_host

from ._into import overwrite
from ._reshard_request import Transit


def moved(transits: Sequence[Transit]) -> list[GlobalTensor]:
    """The leaves in their new placements, mesh by mesh, several at a time. Collective over each mesh."""
    out: dict[int, GlobalTensor] = {}
    # In the order of the leaves, so on all ranks in one order.
    for mesh in {id(t.mesh): t.mesh for t in transits}.values():
        mine = [i for i, t in enumerate(transits) if t.mesh is mesh]
        out |= zip(mine, _moved_on(mesh, [transits[i] for i in mine]), strict=True)
    return [out[i] for i in range(len(transits))]


def moved_purely(transits: Sequence[Transit]) -> list[GlobalTensor]:
    """The leaves in their new placements, by functions that torch can differentiate and capture."""

    def one(t: Transit) -> GlobalTensor:
        if t.stays or not t.mesh.is_member:
            return t.x if t.stays else t.elsewhere()
        with bind_mesh(t.mesh):
            return t.made(carry(t.x.local, t.route(), move=functools.partial(_put, device=t.mesh.device)))

    return [one(t) for t in transits]


def _moved_on(mesh: Mesh, transits: Sequence[Transit]) -> list[GlobalTensor]:
    if not mesh.is_member:
        return [t.x if t.stays else t.elsewhere() for t in transits]

    def send(block: Tensor | Stored, src: MemoryKind, dst: MemoryKind) -> Pending[Tensor | Stored]:
        return _sent(block, src, dst, mesh.device, transits[0].pool)

    # Leaves of one shape and layout share theirs: finding one takes as long as a small leaf's share of a message.
    known: dict[object, Route] = {}
    for t in transits:
        if (t.x.shape, t.src, t.dst) not in known:
            known[t.x.shape, t.src, t.dst] = t.route()
    routes = [known[t.x.shape, t.src, t.dst] for t in transits]

    def keep(i: int, end: Tensor | Stored) -> Tensor | Stored:
        t = transits[i]
        if t.into is not None:
            return overwrite(t.into, end)
        return end if t.stays or routes[i].hops else _copy(end, t.dst)

    with bind_mesh(mesh):
        ends = carry_all([t.x.held for t in transits], routes, send, keep)
    return [t.x if t.stays else t.made(end) for t, end in zip(transits, ends, strict=True)]


def _sent(
    block: Tensor | Stored, src: MemoryKind, dst: MemoryKind, device: torch.device, pool: Pool | None
) -> Pending[Tensor | Stored]:
    """A block on its way to another memory."""
    if not isinstance(block, Tensor):
        block = block.load()
    elif src == "device":
        under_way = to_host(block)
        if dst == "host":
            return under_way
        # The disk is written from the host: the copy must be there first.
        block = under_way.result()
    if dst == "disk":
        assert pool is not None
        return pool.write(block)
    return to_device(block, device) if dst == "device" else Pending.of(block)


def _copy(held: Tensor | Stored, at: Placement) -> Tensor | Stored:
    """A copy of the block: if two leaves shared memory, donating one would destroy the other."""
    if not isinstance(held, Tensor):
        return held
    with on_host() if at.memory_kind == "host" else contextlib.nullcontext():
        return held.clone()


def _put(block: Tensor, kind: MemoryKind, *, device: torch.device) -> Tensor:
    return put(block, kind, device if kind == "device" else None)
