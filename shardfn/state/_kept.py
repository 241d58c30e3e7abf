"""How what is kept of a leaf is opened and closed: the one place that knows what a placement comes to.

kept       held                       opened                                   closed
device     a tensor                   it is as it is used                      it is as it is updated
host       a tensor of the host       a copy to the device                     a copy to the host
disk       `Stored`, in a pool        a read, and a copy to the device         rows written to a new value

A tensor may be written over where it lies. What is `Stored` never is: its successor is a value of its own, so that the
one before is there until the new one is whole. In a graph a block is one tensor, and the last four functions are the
way in and out.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardfn.capture import fakes
from shardfn.collectives import GlobalTensor
from shardfn.core import MemoryKind, Pending, Placement, Stored
from shardfn.memory import AnyPool, Fetch, TracedStored, on_host, stored_of, to_host, token_of

from ._columns import Held
from ._stored import loaded


def closed(x: Tensor, at: Placement, pool: AnyPool | None) -> Held:
    """A block of the device as it is kept at a placement; `x` itself where that is the device."""
    if at.memory_kind == "device":
        return x
    if at.memory_kind == "host":
        return to_host(x).result()
    assert pool is not None
    return pool.write(x).result()


def opened(held: Held, at: Placement) -> Tensor:
    """The elements of a block, in the memory in which an update finds them: of what is on disk, the host."""
    if at.memory_kind == "device":
        return loaded(held)
    with on_host():
        return loaded(held)


def fetched(held: Held, at: Placement, device: torch.device) -> Tensor | Fetch:
    """The elements of a block on the device, or on their way there; a block that lies there as it is, itself."""
    if isinstance(held, Tensor):
        return held if at.is_plain else Fetch(held, device)
    return Fetch(held.read(), device)


class Successor:
    """What writes the new value of one that is stored, row by row: of its shape and dtype, and kept as it is.

    All rows are written once, and those of one `write` stay as they are until it is done; then comes `finish`.

    Args:
        held: the value before, which is not touched.
        pool: the disk.
    """

    def __init__(self, held: Stored, pool: AnyPool | None) -> None:
        assert pool is not None
        self._writer = pool.writer(held.shape, held.dtype)

    def write(self, lo: int, rows: Tensor, place: MemoryKind) -> Pending[Any]:
        """Begins to write rows from `lo` on, which lie in the memory `place`."""
        return self._writer.write(lo, rows if place == "host" else to_host(rows).result())

    def finish(self) -> Stored:
        """The new value, when all rows are there."""
        return self._writer.finish()


class Likeness(NamedTuple):
    """What a graph is to know of a block: its shape, and where and how it is kept. It holds no memory."""

    shape: torch.Size
    at: Placement

    @staticmethod
    def of(x: GlobalTensor) -> "Likeness":
        """That of a leaf's block."""
        return Likeness(torch.Size(x.held.shape), x.placement)


def graph_inputs(leaves: Sequence[GlobalTensor], device: torch.device) -> list[Tensor]:
    """What a graph takes for these blocks, without data: a token for what is on disk."""
    out: list[Tensor] = []
    for x in leaves:
        if x.memory_kind == "disk":
            out.append(torch.empty(1, dtype=torch.int64))
        else:
            out += fakes([x.held], "cpu" if x.memory_kind == "host" else device)
    return out


def entered(x: Tensor, like: Likeness) -> Held:
    """An input of a graph that is being captured, as the block that it stands for."""
    return TracedStored(x, like.shape, like.at.dtype) if like.at.memory_kind == "disk" else x


def as_graph_value(held: Held) -> Tensor:
    """The tensor that stands for a block in a graph: at its entrance when it runs, at its exit when it is captured."""
    if isinstance(held, Tensor):
        return held
    return held.token if isinstance(held, TracedStored) else token_of(held)


def returned(x: Tensor, like: Likeness) -> Held:
    """What a graph has returned, as the block that it stands for, which is like the one before."""
    return stored_of(x) if like.at.memory_kind == "disk" else x
