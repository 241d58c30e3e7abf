"""Bytes to and from files: pieces, spread over a few threads, past the page cache where the file system can.

`os.preadv` and `os.pwritev` release the interpreter's lock, so a handful of threads keeps a disk busy. Direct I/O needs
file offsets, lengths and memory in multiples of a page. Aligned memory is moved without a copy. Other memory is copied
through a buffer. Each thread has at most one buffer, used for a single piece at a time. So the number of buffers is
bounded, and threads that wait for a buffer cannot deadlock.

A file is opened for each piece. Opening takes 5 microseconds and a piece takes milliseconds, and the limit on open
files is never reached.
"""

import concurrent.futures
import contextlib
import errno
import mmap
import os
import pathlib
import queue
import threading
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from shardfn.core import raise_all

from ._host import PAGE, Bytes, aligned_window, as_bytes
from ._lock import DamagedError, Threads, in_background
from ._slots import FULL, Slot, no_room

_DIRECT = getattr(os, "O_DIRECT", 0)
_REMEDY = "its contents are lost: start from a checkpoint in an empty directory, and have the disk checked"


class Checksums:
    """The crc32 of every grain of a file. Each piece sets or compares only the piece's grains."""

    def __init__(self, crcs: np.ndarray) -> None:
        self.crcs = crcs

    @classmethod
    def blank(cls, grains: int) -> "Checksums":
        """Returns the unknown checksums of a new file with that many grains."""
        return cls(np.zeros(grains, np.uint32))


class Io:
    """Threads and staging buffers.

    Attributes:
        direct: whether files are opened with O_DIRECT.
        piece: bytes of a request.
        grain: bytes of the unit of reads, writes and checksums, such as 65536.
    """

    def __init__(self, threads: int, piece: int, buffers: int, grain: int, direct: bool) -> None:
        self.direct, self.piece, self.grain = direct, piece, grain
        self._threads = Threads(threads, "shardfn-disk")
        self._staging = _Staging(piece, min(threads, buffers))

    def write(
        self, slot: Slot, offset: int, source: Bytes, sums: Checksums | None
    ) -> list[concurrent.futures.Future[None]]:
        """Starts to write `source` at `offset`, both in whole grains."""
        spans = _split_span(offset, offset + len(source), self.piece)
        return [
            self._submit_work(self._write_piece, slot, lo, source[lo - offset : hi - offset], sums) for lo, hi in spans
        ]

    def read(
        self, slot: Slot, start: int, into: Bytes, grain: int, sums: Checksums | None
    ) -> list[concurrent.futures.Future[None]]:
        """Starts to fill `into` from byte `start` on. Whole grains are read and checked."""
        stop = start + len(into)
        if not self.direct and sums is None:
            grain = 1  # the page cache reads any bytes
        first, last = start // grain * grain, -(-stop // grain) * grain
        futures = []
        for lo, hi in _split_span(first, last, max(self.piece // grain, 1) * grain):
            own = into[max(lo, start) - start : min(hi, stop) - start]
            futures.append(self._submit_work(self._read_piece, slot, lo, hi, own, max(start - lo, 0), grain, sums))
        return futures

    def close(self) -> None:
        """Waits for pending requests and ends the threads."""
        self._threads.close(wait=True)

    def _submit_work(self, work: Callable[..., None], *args: Any) -> concurrent.futures.Future[None]:
        return self._threads.submit(work, *args, later=in_background())

    def _write_piece(self, slot: Slot, offset: int, source: Bytes, sums: Checksums | None) -> None:
        if sums is not None:
            # Pieces are whole grains and do not overlap, so the threads write disjoint parts, without a lock.
            sums.crcs[offset // self.grain :][: len(source) // self.grain] = _grain_crcs(source, self.grain)
        with self._open_file(slot, os.O_WRONLY) as fd:
            if self._is_aligned(source):
                return _write_all(fd, slot, source, offset)
            with self._staging.buffer(len(source)) as buffer:
                np.copyto(buffer, source)
                _write_all(fd, slot, buffer, offset)

    def _read_piece(
        self, slot: Slot, lo: int, hi: int, into: Bytes, skip: int, grain: int, sums: Checksums | None
    ) -> None:
        with self._open_file(slot, os.O_RDONLY) as fd:
            if len(into) == hi - lo and self._is_aligned(into):
                _read_all(fd, slot, into, lo)
                return _check_sums(slot, into, lo, grain, sums)
            with self._staging.buffer(hi - lo) as buffer:
                _read_all(fd, slot, buffer, lo)
                _check_sums(slot, buffer, lo, grain, sums)
                np.copyto(into, buffer[skip : skip + len(into)])

    def _is_aligned(self, data: Bytes) -> bool:
        return not self.direct or data.ctypes.data % PAGE == 0

    @contextlib.contextmanager
    def _open_file(self, slot: Slot, flags: int) -> Iterator[int]:
        try:
            fd = os.open(slot.path, flags | (_DIRECT if self.direct else 0))
        except FileNotFoundError:
            raise _damaged_error(slot, "is gone") from None
        try:
            yield fd
        finally:
            os.close(fd)


def why_not_direct(directory: pathlib.Path) -> str:
    """Returns why the file system of `directory` lacks direct I/O in pages, or "" if supported."""
    if not _DIRECT:
        return "this system has no O_DIRECT"
    path, page = directory / "direct.probe", mmap.mmap(-1, PAGE)
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | _DIRECT, 0o600)
        try:
            os.ftruncate(fd, PAGE)  # a hole: a full disk can be probed too
            os.preadv(fd, [page], 0)
        finally:
            os.close(fd)
    except OSError as problem:
        if problem.errno != errno.EINVAL:
            raise
        return f"the file system refuses O_DIRECT ({os.strerror(errno.EINVAL)})"
    finally:
        path.unlink(missing_ok=True)
    return ""


class _Staging:
    """Aligned buffers, allocated at first use and kept."""

    def __init__(self, size: int, limit: int) -> None:
        self._size, self._to_make = size, limit
        # Guards the number of buffers still to be made. The queue needs no lock.
        self._lock = threading.Lock()
        self._idle: queue.SimpleQueue[torch.Tensor] = queue.SimpleQueue()

    @contextlib.contextmanager
    def buffer(self, nbytes: int) -> Iterator[Bytes]:
        whole = self._take_buffer()
        try:
            yield as_bytes(whole)[:nbytes]
        finally:
            self._idle.put(whole)

    def _take_buffer(self) -> torch.Tensor:
        with contextlib.suppress(queue.Empty):
            return self._idle.get_nowait()
        with self._lock:
            make = self._to_make > 0
            self._to_make -= make
        return aligned_window((self._size,), torch.uint8)[0] if make else self._idle.get()


def _split_span(lo: int, hi: int, piece: int) -> list[tuple[int, int]]:
    return [(at, min(at + piece, hi)) for at in range(lo, hi, piece)]


def _write_all(fd: int, slot: Slot, data: Bytes, offset: int) -> None:
    done = 0
    try:
        while done < len(data):
            done += os.pwritev(fd, [data[done:].data], offset + done)
    except OSError as problem:
        if problem.errno in FULL:
            raise no_room(slot.path.parent, slot.capacity, problem) from problem
        raise


def _read_all(fd: int, slot: Slot, into: Bytes, offset: int) -> None:
    done = 0
    while done < len(into):
        got = os.preadv(fd, [into[done:].data], offset + done)
        if not got:
            raise _truncated_error(slot)
        done += got


def _check_sums(slot: Slot, data: Bytes, offset: int, grain: int, sums: Checksums | None) -> None:
    if sums is None:
        return
    found = _grain_crcs(data, grain)
    expected = sums.crcs[offset // grain :][: len(found)]
    for i in np.flatnonzero(found != expected):
        at = offset + int(i) * grain
        values = f"crc32 {found[i]:08x}, but {expected[i]:08x} was written"
        raise _damaged_error(slot, f"has changed since it was written: bytes {at} to {at + grain} have {values}")


def _grain_crcs(data: Bytes, grain: int) -> np.ndarray:
    return np.array([zlib.crc32(data[at : at + grain].data) for at in range(0, len(data), grain)], np.uint32)


def check_sizes(slots: list[Slot]) -> None:
    """Checks that every file exists with the expected size.

    Raises:
        DamagedError: some files do not. The message lists all such files.
    """
    found = [(slot, slot.path.stat().st_size if slot.path.exists() else -1) for slot in slots]
    problems = [_error_text(slot, _too_short(slot, size)) for slot, size in found if size < slot.capacity]
    raise_all(DamagedError, f"files differ from the commit; {_REMEDY}:", problems)


def _truncated_error(slot: Slot) -> DamagedError:
    return _damaged_error(slot, _too_short(slot, slot.path.stat().st_size))


def _too_short(slot: Slot, size: int) -> str:
    return "is gone" if size < 0 else f"is truncated: expected {slot.capacity} bytes, found {size}"


def _damaged_error(slot: Slot, what: str) -> DamagedError:
    return DamagedError(f"{_error_text(slot, what)}; {_REMEDY}.")


def _error_text(slot: Slot, what: str) -> str:
    holds = f", which holds {slot.name!r}," if slot.name else ""
    return f"{slot.path}{holds} {what}"
