"""What lies in lanes, and who wants it, in Python: what `_blocks.h` has, over the same memory.

What one rank writes another sees in that order: each counter is 8 aligned bytes, which one instruction reads or writes,
x86 keeps the order of stores and that of loads, and the interpreter does one call after the other. Only a load that
follows a store may be early; where that matters there is `fence`.
"""

import collections
import ctypes
import dataclasses
import threading
from typing import Any

import numpy as np
import torch
from torch import Tensor

LINE, PIECE = 64, 1 << 18
BLOCK, TAGGED = 0x626C6F636B, 0x746167676564
# By the numbers of `Kind` in `_sum_rows.h`: what rows are, and what they are summed in.
KINDS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
KINDS += (torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool)
WIDE = {torch.bfloat16: torch.float32, torch.float16: torch.float32}


@dataclasses.dataclass(slots=True, eq=False)
class Moving:
    """One transfer of this rank: how many of its blocks have not come, or left; and who waits for it."""

    in_left: int = 0
    out_left: int = 0
    failed: bool = False
    waiters: list[threading.Lock] = dataclasses.field(default_factory=list)

    def wake(self) -> None:
        """Lets all go on that wait."""
        while self.waiters:
            self.waiters.pop().release()


@dataclasses.dataclass(slots=True, eq=False)
class Sum:
    """The sum of blocks of all ranks: `pos` bytes of it are there."""

    op: Moving
    kind: int
    own: Tensor
    out: Tensor
    pos: int = 0


@dataclasses.dataclass(slots=True, eq=False)
class Out:
    """A block that goes out; one of a sum goes only as far as that is there."""

    op: Moving
    at: int
    length: int
    message: int = BLOCK
    tag: int = 0
    summed: Sum | None = None
    pos: int = 0
    begun: bool = False


@dataclasses.dataclass(slots=True, eq=False)
class In:
    """A block that comes, or one row of a sum."""

    op: Moving | None
    into: int
    length: int
    total: Sum | None = None
    pos: int = 0


@dataclasses.dataclass(slots=True, eq=False)
class Peer:
    """Another rank: its segment, the pipe that wakes it, and what tells that it has ended."""

    base: int
    bell: int
    pidfd: int
    words: memoryview
    bytes: Tensor
    gone: bool = False
    died: bool = False


@dataclasses.dataclass(slots=True, eq=False)
class ReadLane:
    """What this rank reads of one lane."""

    peer: int
    to_all: bool
    read: int = 0
    queue: collections.deque[In] = dataclasses.field(default_factory=collections.deque)
    begun: bool = False
    message: int = 0
    tag: int = 0
    asked: list[tuple[int, In]] = dataclasses.field(default_factory=list)
    early: list[tuple[int, Any]] = dataclasses.field(default_factory=list)
    tagged: In | None = None
    buffer: Any = None

    def waits(self) -> bool:
        """Whether it wants something of its lane."""
        return bool(self.queue or self.asked or self.begun)


def place(address: int, nbytes: int) -> Tensor:
    """The bytes there. Nobody writes to those of another rank."""
    if not nbytes:
        return torch.empty(0, dtype=torch.uint8)
    return torch.from_numpy(np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address)))


def segment_bytes(size: int, ring_bytes: int) -> int:
    """Of a segment: a line for each counter, and the rings."""
    return lines(4 * size + 1) * LINE + size * ring_bytes


def lines(nbytes: int) -> int:
    """Bytes of the whole lines that hold so many."""
    return -(-nbytes // LINE) * LINE


def fence() -> None:
    """What is stored before it is seen before anything is loaded after it: a lock is taken by a locked instruction."""
    with threading.Lock():  # a new one, which no fork can have found taken
        pass


def add_rows(kind: int, rows: list[Tensor], out: Tensor, scratch: Tensor) -> None:
    """The sum of rows in their order; 16-bit floats are summed in 32 bits and rounded once. `out` may be a row.

    `scratch` has room for twice the bytes of a row, and is written.
    """
    dtype = KINDS[kind]
    first, second, *others = (row.view(dtype) for row in rows)
    if not others:
        torch.add(first, second, out=out.view(dtype))
        return
    wide = WIDE.get(dtype, dtype)
    total = scratch[: len(first) * wide.itemsize].view(wide)
    torch.add(first.to(wide), second, out=total)
    for row in others:
        total.add_(row)
    out.view(dtype).copy_(total)
