"""Converts blocks between their stored form (device, host, disk) and tensors. All placement-specific code is here.

kept       held                       opened                                   closed
device     a tensor                   the tensor itself                        the tensor itself
host       a tensor of the host       a copy to the device                     a copy to the host
disk       `Stored`, in a pool        a read, and a copy to the device         rows written to a new value
codes      `Coded`, there or on host  decoded on the device, when it is used   not: such a leaf is frozen

A tensor may be written over where it lies. A `Stored` value never is: its successor is a new value, so that the old one
exists until the new one is whole. In a graph a block is one tensor, and the last four functions are the way in and out.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardfn.capture import fakes
from shardfn.collectives import GlobalTensor
from shardfn.core import MemoryKind, Pending, Placement, Stored
from shardfn.memory import AnyPool, Coded, Fetch, TracedStored, on_host, stored_of, to_host, token_of

from ._columns import Held
from ._stored import loaded


def closed(x: Tensor, at: Placement, pool: AnyPool | None) -> Held:
    """A block of the device in the form of a placement; `x` itself where that is the device."""
    if isinstance(at.code, str):
        coded = Coded.of(x, at.code)
        return coded if at.memory_kind == "device" else coded.with_blocks(to_host(coded.blocks).result(), "host")
    if at.memory_kind == "device":
        return x
    if at.memory_kind == "host":
        return to_host(x).result()
    assert pool is not None
    return pool.write(x).result()


def opened(held: Held, at: Placement) -> Tensor:
    """The elements of a block, in the memory in which an update finds them: for a block on disk, the host."""
    if at.memory_kind == "device":
        return loaded(held)
    with on_host():
        return loaded(held)


def fetched(held: Held, at: Placement, device: torch.device) -> Tensor | Fetch:
    """The elements of a block on the device, or on their way there; a plain block of the device, itself.

    Of a block in codes, these.
    """
    if isinstance(held, Coded):
        return held.blocks if at.memory_kind == "device" else Fetch(held.blocks, device)
    if isinstance(held, Tensor):
        return held if at.is_plain else Fetch(held, device)
    return Fetch(held.read(), device)


class Successor:
    """The writer of the new value of a stored one, row by row: of the same shape, dtype and place.

    All rows are written once, and those of one `write` must not change until it is done; then comes `finish`.

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
    """A block as a graph knows it: its shape and its placement. It holds no memory."""

    shape: torch.Size
    at: Placement

    @staticmethod
    def of(x: GlobalTensor) -> "Likeness":
        """That of a leaf's block."""
        return Likeness(torch.Size(x.held.shape), x.placement)


def graph_inputs(leaves: Sequence[GlobalTensor], device: torch.device) -> list[Tensor]:
    """The inputs of a graph for these blocks, without data: a token for a block on disk."""
    out: list[Tensor] = []
    for x in leaves:
        if x.memory_kind == "disk":
            out.append(torch.empty(1, dtype=torch.int64))
        else:
            held = x.held
            out += fakes(
                [held.blocks if isinstance(held, Coded) else held], "cpu" if x.memory_kind == "host" else device
            )
    return out


def entered(x: Tensor, like: Likeness) -> Held:
    """An input of a graph that is being captured, as a block."""
    return TracedStored(x, like.shape, like.at.dtype) if like.at.memory_kind == "disk" else _in_codes(x, like)


def as_graph_value(held: Held) -> Tensor:
    """The tensor of a block in a graph: at its entrance when it runs, at its exit when it is captured."""
    if isinstance(held, Tensor | Coded):
        return held if isinstance(held, Tensor) else held.blocks
    return held.token if isinstance(held, TracedStored) else token_of(held)


def returned(x: Tensor, like: Likeness) -> Held:
    """A result of a graph as a block with the shape and placement of the one before."""
    return stored_of(x) if like.at.memory_kind == "disk" else _in_codes(x, like)


def _in_codes(x: Tensor, like: Likeness) -> Held:
    """The block of a tensor: itself, or the one whose codes it has."""
    code, kind = like.at.code, like.at.memory_kind
    return Coded(x, like.shape, like.at.dtype, code, kind) if isinstance(code, str) else x
