"""Leaves that go from a mesh to another: `crossed`."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from shardfn.collectives import Box, Channels, GlobalTensor, LeafCrossing, Overlap, cross, overlaps
from shardfn.core import Mesh, P, StoredValue, block_slices, kind_when_loaded, read_rows
from shardfn.engine.agreement import Comms
from shardfn.state import empty_block, start_move

from ._reshard_request import Transit


def crossed(transits: Sequence[Transit], comms: Comms) -> list[GlobalTensor]:
    """Moves leaves to other meshes. Collective over the mesh of `comms`, which has the ranks of all these meshes."""
    if not transits:
        return []
    ranks, channels = comms.mesh.ranks, comms.channels
    assert isinstance(channels, Channels)
    known: dict[object, list[Overlap]] = {}
    arrivals = [_IncomingBlock(t) for t in transits]
    crossings = [
        LeafCrossing(
            _find_overlaps(t, ranks[comms.mesh.rank], known), _choose_narrower_dtype(t), _read_boxes(t), a.put, a.done
        )
        for t, a in zip(transits, arrivals, strict=True)
    ]
    cross(crossings, channels.between(comms.mesh.axis_names), {rank: i for i, rank in enumerate(ranks)})
    return [a.leaf() for a in arrivals]


def _find_overlaps(t: Transit, rank: int, known: dict[object, list[Overlap]]) -> list[Overlap]:
    """Returns the overlaps of blocks of a leaf; cached, as leaves often share them."""
    # A call keeps its leaves, and so their meshes, alive.
    key = t.x.shape, t.x.spec, id(t.x.mesh), t.dst.spec, id(t.mesh)
    if key not in known:
        known[key] = overlaps(t.x.shape, (t.x.spec, t.x.mesh), (t.dst.spec, t.mesh), rank)
    return known[key]


def _choose_narrower_dtype(t: Transit) -> torch.dtype:
    """Returns the dtype in which a leaf is sent: the narrower one, as on a route."""
    return t.dst.dtype if t.dst.dtype.itemsize <= t.src.dtype.itemsize else t.src.dtype


def _read_boxes(t: Transit) -> Callable[[Box], Tensor]:
    """Gives parts of this rank's block of a leaf, box by box; of a block on disk only these rows are read."""
    held = t.x.held

    def take(box: Box) -> Tensor:
        where = _to_local_box(box, t.x.shape, t.x.spec, t.x.mesh)
        rows = read_rows(held, where[0].start, where[0].stop) if where else read_rows(held)
        return rows.result()[(slice(None), *where[1:])] if where else rows.result()

    return take


class _IncomingBlock:
    """This rank's new block of a leaf. It is made when its first part arrives. `done` is called after all parts.

    Where a leaf is overwritten, it is that leaf's block.
    """

    def __init__(self, t: Transit) -> None:
        self._t = t
        held = None if t.into is None else t.into.held
        self._block: Tensor | None = held if isinstance(held, Tensor) else None
        self._held: StoredValue | None = None

    def put(self, box: Box, piece: Tensor) -> None:
        """Puts a part into it."""
        t = self._t
        self._make_block()[_to_local_box(box, t.x.shape, t.dst.spec, t.mesh)].copy_(piece)

    def done(self) -> None:
        """Moves the complete block to its memory kind."""
        # This rank sends only.
        if not self._t.mesh.is_member:
            return
        # Also where no part came: a block may be empty.
        self._held = block = self._make_block()
        kind, pool = self._t.dst.memory_kind, self._t.pool
        self._held = start_move(block, kind_when_loaded(kind), kind, block.device, pool).result()
        self._block = None

    def leaf(self) -> GlobalTensor:
        """Returns the leaf, after `done`."""
        return self._t.elsewhere() if self._held is None else self._t.made(self._held)

    def _make_block(self) -> Tensor:
        if self._block is None:
            t, mesh = self._t, self._t.mesh
            shape = t.dst.block_shape(t.x.shape, mesh.shape, mesh.coords)
            self._block = empty_block(shape, t.dst.dtype, t.dst.memory_kind, mesh.device)
        return self._block


def _to_local_box(box: Box, shape: torch.Size, spec: P, mesh: Mesh) -> tuple[slice, ...]:
    """Returns a box in the coordinates of this rank's block."""
    starts = [s.start for s in block_slices(shape, spec, mesh.shape, mesh.coords)]
    return tuple(slice(lo - start, hi - start) for (lo, hi), start in zip(box, starts, strict=True))
