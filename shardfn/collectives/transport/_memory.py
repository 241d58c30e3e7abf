"""Transfers through memory between ranks of a host: rings that each rank writes in a segment and other ranks read.

A transfer is blocks in lanes (`_lanes.h`): each rank writes blocks into lanes of a segment and counts the bytes. Other
ranks copy or sum from there, and count the bytes read. A thread that starts or awaits a transfer moves as many bytes as
possible. So does a single thread of each process, which sleeps until a peer rings a pipe. The proof that there is no
deadlock is in docs/design/0020-shared-memory.md.
"""

import collections
import contextlib
import ctypes
import functools
import os
import subprocess
import time
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from shardfn.kernels import NoCompilerError, load_library

from ._failure import TransportError
from ._segment import NotSharedError, Offer, Reader, Segment

_ADDRESSES = ("engine_new", "channel_new", "start", "message")
_NUMBERS = ("segment_bytes", "op_state", "op_wait", "why")


class TransportEngine:
    """Functions of `_memory.cpp`, and the thread that drives all connections of this process. The thread never ends.

    Attributes:
        bell: file descriptor of the pipe that wakes the thread when another process writes.

    Raises:
        NotSharedError: the library cannot be built, no more files may be open, or no thread can be started.
    """

    def __init__(self) -> None:
        built = _load_library()
        if isinstance(built, str):
            raise NotSharedError(f"its C++ part cannot be built: {built}")
        self._library = built
        try:
            # The thread sleeps until another rank, or this program, writes a byte.
            reading, self.bell = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise NotSharedError(f"this process cannot make the pipe that wakes it: {error.strerror}") from error
        made: int | None = built.engine_new(ctypes.c_int64(reading), ctypes.c_int64(self.bell))
        if made is None:
            for end in (reading, self.bell):
                os.close(end)
            raise NotSharedError("this process cannot start a thread: its limit on processes or memory is reached")
        self._address = made

    def call(self, name: str, *args: Any) -> Any:
        """Calls a function on the engine."""
        return getattr(self._library, name)(ctypes.c_void_p(self._address), *map(_pass_argument, args))

    def plain(self, name: str, *args: Any) -> Any:
        """Calls a function that takes no engine."""
        return getattr(self._library, name)(*map(_pass_argument, args))


class Address(int):
    """Memory address, passed to the engine as a pointer."""


def addresses(of: "list[int]") -> Any:
    """Returns an array of addresses."""
    return (ctypes.c_void_p * len(of))(*of)


def numbers(of: "list[int]") -> Any:
    """Returns an array of numbers."""
    return (ctypes.c_int64 * len(of))(*of)


def engine() -> TransportEngine:
    """Returns the engine of this process. A fork makes another engine, as threads do not survive a fork.

    Raises:
        NotSharedError: as `TransportEngine`.
    """
    return _engine_of(os.getpid())


@functools.cache
def _engine_of(process: int) -> TransportEngine:
    del process
    return TransportEngine()


@functools.cache
def _load_library() -> ctypes.CDLL | str:
    """Returns the compiled functions, or the reason for their absence.

    Cached, so that a compiler that fails runs once.
    """
    try:
        built = load_library("collectives/transport/_memory.cpp")
    except (NoCompilerError, OSError, subprocess.SubprocessError) as error:
        return (getattr(error, "stderr", None) or str(error)).strip()
    for name in _ADDRESSES:
        getattr(built, name).restype = ctypes.c_void_p
    for name in _NUMBERS:
        getattr(built, name).restype = ctypes.c_int64
    return built


def _pass_argument(arg: Any) -> Any:
    if isinstance(arg, Address):
        return ctypes.c_void_p(arg)
    return ctypes.c_int64(arg) if isinstance(arg, int) else arg


# Bytes of a channel's rings on each rank, together. Each rank's bytes are cut into a ring per rank.
RINGS = 8 << 20
_LEAST_RING = 1 << 19
MOST_RANKS = 256
# Milliseconds after which a wait checks whether the program was interrupted.
_SLICE = 200
# The events that a work waits for: all blocks have arrived, all have left.
IN, OUT = 1, 2
_KINDS = {
    torch.float32: 0,
    torch.float64: 1,
    torch.bfloat16: 2,
    torch.float16: 3,
    torch.uint8: 4,
    torch.int8: 4,
    torch.int16: 5,
    torch.int32: 6,
    torch.int64: 7,
    torch.bool: 8,
    torch.complex64: 0,
    torch.complex128: 1,
}
# The dtypes that lanes can sum.
SUMMED = frozenset(_KINDS)
Blocks = Sequence[Tensor]


class LanesOffer(NamedTuple):
    """Data by which other ranks read a rank's lanes, and ring.

    Attributes:
        segment: segment of the lanes.
        bell: the number, among the rank's open files, of the pipe that wakes the rank.
    """

    segment: Offer
    bell: int


class Lanes:
    """A rank's end of a channel through memory, made in two steps. Between these, ranks exchange offers.

    All ranks start the same transfers in the same order, but for messages with tags. Tensors are contiguous, and on the
    CPU.

    Args:
        size: the number of ranks.
        index: index of this rank.
        timeout: seconds that a wait may take. None means no limit.
        ring: bytes of a ring, a multiple of 4096. The default is for a step's transfers.

    Attributes:
        offer: the data for other ranks.
        nbytes: bytes of the segment.

    Raises:
        NotSharedError: this process cannot offer memory.
    """

    def __init__(self, size: int, index: int, timeout: float | None, ring: int | None = None) -> None:
        if not hasattr(os, "pidfd_open"):
            raise NotSharedError("this system cannot watch processes (pidfd_open)")
        if size > MOST_RANKS:
            raise NotSharedError(f"there are {size} ranks, and memory serves {MOST_RANKS}")
        self._engine = engine()
        self.size, self.index, self._timeout = size, index, timeout
        self._ring = ring or max(_LEAST_RING, RINGS // size // 4096 * 4096)
        self.nbytes: int = self._engine.plain("segment_bytes", size, self._ring)
        self._ends = _Holdings(self._engine, self.nbytes)
        self.offer = LanesOffer(self._ends.segment.offer, self._engine.bell)
        # Not at exit: blocks that are not read yet can be read as long as the segment exists.
        self._closing = weakref.finalize(self, self._ends.close)
        self._closing.atexit = False

    def open(self, offers: Sequence[LanesOffer]) -> None:
        """Opens the lanes of the other ranks.

        Raises:
            NotSharedError: the lanes of a rank cannot be read, or rung.
        """
        bases, bells, pidfds = ([0] * self.size for _ in range(3))
        for rank, offer in enumerate(offers):
            if rank == self.index:
                bases[rank] = self._ends.own
            elif offer.segment.size != self.nbytes:
                raise NotSharedError(f"rank {rank} of the channel has lanes of another size")
            else:
                bases[rank], bells[rank], pidfds[rank] = self._ends.peer(offer)
        shape = (self.size, self.index, self._ring)
        made = self._engine.call("channel_new", *shape, addresses(bases), numbers(bells), numbers(pidfds))
        self._ends.channel = Address(made)

    def close(self) -> None:
        """Ends the channel. Transfers in flight fail, here and on the other ranks."""
        self._closing()

    def all_gather(self, own: Tensor, blocks: Blocks) -> "LaneOp":
        """Sends a block to all ranks, and receives a block from each rank."""
        return self._start((own, *blocks), to_all=own, alls=blocks)

    def all_to_all(self, parts: Blocks, into: Blocks) -> "LaneOp":
        """Sends each rank a part, and receives a part from each rank. This rank's part is copied."""
        into[self.index].copy_(parts[self.index])
        return self._start((*parts, *into), out=parts, come=into)

    def reduce_scatter(self, parts: Blocks, out: Tensor) -> "LaneOp":
        """Sends each rank a part, and sums the parts for this rank, in the order of ranks. Dtypes: `SUMMED`."""
        return self._start((*parts, out), out=parts, sums=out)

    def all_reduce(self, parts: Blocks) -> "LaneOp":
        """Sums parts, of a dtype in `SUMMED`, in place: each rank sums a part and sends the sum to all ranks."""
        mine = parts[self.index]
        return self._start(parts, out=parts, sums=mine, to_all=mine, alls=parts)

    def message(self, x: Tensor, peer: int, tag: int, *, sends: bool) -> "LaneOp":
        """Returns a message to or from a rank, with the same tag at the other end."""
        self._check_open()
        return self._entry((x,), "message", int(sends), peer, tag, Address(x.data_ptr()), x.numel() * x.element_size())

    def wait(self, entry: "LaneOp", asked: int, timeout: float | None = None) -> None:
        """Waits until a transfer has come (IN), left (OUT), or both, for `timeout` seconds (None: the channel's).

        Raises:
            TransportError: the transfer failed, or took too long.
        """
        start, limit = time.monotonic(), self._timeout if timeout is None else timeout
        while (state := entry.wait(self._engine, asked)) == 0:
            if limit is not None and time.monotonic() - start > limit:
                raise TransportError(
                    f"waited {limit:g} s through memory for ranks {self.why()} of the channel, in vain"
                )
        if state < 0:
            raise TransportError(self.why())

    def state(self, entry: "LaneOp", asked: int) -> int:
        """Returns 1 if the events asked for have happened, 0 if not yet, -1 if the transfer failed."""
        return entry.state(self._engine, asked)

    def why(self) -> str:
        """Returns the cause of a failure, or, while waiting, the ranks that have not come."""
        if self._ends.channel is None:
            return "this communicator has ended"
        text = ctypes.create_string_buffer(4096)
        n: int = self._engine.call("why", self._ends.channel, text, len(text))
        return text.raw[:n].decode(errors="replace")

    def _start(
        self,
        kept: Blocks,
        *,
        out: Blocks | None = None,
        come: Blocks | None = None,
        alls: Blocks | None = None,
        to_all: Tensor | None = None,
        sums: Tensor | None = None,
    ) -> "LaneOp":
        self._check_open()
        kind = -1 if sums is None else _KINDS[sums.dtype]
        one, total = _address_of(to_all), _address_of(sums)
        outs, comes, all_blocks = (_address_arrays(blocks) for blocks in (out, come, alls))
        at = [[0 if x is None else ctypes.addressof(x) for x in pair] for pair in (outs, comes, all_blocks)]
        # The fields of `Transfer` in `_memory.cpp`.
        return self._entry(kept, "start", numbers([kind, *at[0], *one, *at[1], *at[2], *total]))

    def _entry(self, kept: Blocks, name: str, *args: Any) -> "LaneOp":
        entries = self._ends.entries
        while entries and entries[0].ended(self._engine):
            entries.popleft()
        # Before the start: an interrupt from the keyboard must not free memory that is being written.
        entry = LaneOp(kept)
        entries.append(entry)
        op: int | None = self._engine.call(name, self._ends.channel, *args)
        if op is None:
            with contextlib.suppress(ValueError):  # the channel has been closed since
                entries.remove(entry)
            raise TransportError(self.why())
        entry.op = Address(op)
        return entry

    def _check_open(self) -> None:
        if self._ends.channel is None:
            raise TransportError("this communicator has ended. A transfer was asked of it.")


class LaneOp:
    """Transfer in flight. Tensors are kept alive until the engine no longer touches their memory.

    Attributes:
        op: number in the engine, or None before the start, and once the memory is no longer touched.
    """

    def __init__(self, kept: Blocks) -> None:
        self.op: Address | None = None
        self._kept: Blocks = kept
        self._state, self._waiting = 0, 0

    def state(self, made: TransportEngine, asked: int) -> int:
        """Returns 1 if the events asked for have happened, 0 if not yet, -1 if the transfer failed."""
        return self._state if self.op is None else made.plain("op_state", self.op, asked)

    def wait(self, made: TransportEngine, asked: int) -> int:
        """Returns the state, after a short wait at most."""
        if self.op is None:
            return self._state
        self._waiting += 1
        try:
            return made.call("op_wait", self.op, asked, _SLICE)
        finally:
            self._waiting -= 1
            self.ended(made)

    def ended(self, made: TransportEngine) -> bool:
        """Returns whether nothing touches the memory any more. Then lets go of the memory."""
        state = self.state(made, IN | OUT)
        if state and self.op is not None and not self._waiting:
            self._state, op, self.op, self._kept = state, self.op, None, ()
            made.plain("op_free", op)
        return state != 0


class _Holdings:
    """System resources of a channel, in a separate object, so that these can be freed when the channel is gone."""

    def __init__(self, made: TransportEngine, nbytes: int) -> None:
        try:
            self.segment = Segment(nbytes)
        except (OSError, OverflowError, ValueError) as error:
            raise NotSharedError(f"this process cannot make {nbytes} bytes to share: {error}") from error
        self._engine, self._process = made, os.getpid()
        # The thread reads mapped memory until `close`, not only until the interpreter ends: until `close` the object
        # must not be collected.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self))
        self._views = [np.frombuffer(self.segment.view, np.uint8)]
        self._readers: list[Reader] = []
        self._fds: list[int] = []
        self.own: int = self._views[0].ctypes.data
        self.channel: Address | None = None
        self.entries: collections.deque[LaneOp] = collections.deque()

    def peer(self, offer: LanesOffer) -> tuple[int, int, int]:
        """Returns the address of another rank's segment, the pipe that wakes the rank, and the rank's descriptor."""
        pid = offer.segment.pid
        path = f"/proc/{pid}/fd/{offer.bell}"
        try:
            # First the process: files that are then opened under the number belong to this process.
            self._fds.append(os.pidfd_open(pid))
            reader = Reader(offer.segment)
            self._readers.append(reader)
            # For both ends, so that writing is no signal when the other end has gone.
            self._fds.append(os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK))
        except OSError as error:
            raise NotSharedError(f"process {pid} cannot be watched or rung ({path}): {error.strerror}") from error
        self._views.append(np.frombuffer(reader.view, np.uint8))
        return self._views[-1].ctypes.data, self._fds[-1], self._fds[-2]

    def close(self) -> None:
        # A fork holds copies, and must not act for the rank.
        if self._process != os.getpid():
            return
        channel, self.channel = self.channel, None
        if channel is not None:
            self._engine.call("channel_close", channel)
        for entry in self.entries:
            entry.ended(self._engine)
        self.entries.clear()
        self._views.clear()
        for ended in (*self._readers, self.segment):
            ended.close()
        for fd in self._fds:
            with contextlib.suppress(OSError):
                os.close(fd)
        self._fds.clear()
        ctypes.pythonapi.Py_DecRef(ctypes.py_object(self))


def _address_arrays(blocks: Blocks | None) -> tuple[Any, Any]:
    """Returns the bytes and addresses of each block."""
    if blocks is None:
        return None, None
    return numbers([x.numel() * x.element_size() for x in blocks]), addresses([x.data_ptr() for x in blocks])


def _address_of(x: Tensor | None) -> tuple[int, int]:
    return (0, 0) if x is None else (x.data_ptr(), x.numel() * x.element_size())
