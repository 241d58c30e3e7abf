"""Values on disk: immutable tensors in files, read by rows, and written once in any chunks.

A file is read and written in grains: a page, or 64 KiB where checksums are kept. Chunks of rows may end inside a grain.
A grain that several chunks share is assembled in memory, and written when the last byte arrives.
"""

import bisect
import concurrent.futures
import math
import threading
from typing import Any

import torch
from jaxtyping import Shaped
from torch import Tensor

from shardfn.core import MemoryKind, Pending

from ._host import Bytes, aligned_window, as_bytes, host_empty
from ._io import Checksums, Io
from ._ledger import record_move
from ._slots import Slot
from ._transfer import of_futures


class DiskTensor:
    """An immutable tensor on disk. The tensor owns a file, which is used again after the tensor's end.

    Attributes:
        shape: shape of the value.
        dtype: dtype of the elements.
        kind: "disk".
        grain: bytes of the unit of reads, such as 4096.
        sums: crc32 of each grain, where checksums are kept.
        slot: the file, or None for a value without elements.

    Example:
        >>> import tempfile
        >>> from shardfn.memory import Pool
        >>> with tempfile.TemporaryDirectory() as directory, Pool(directory) as pool:
        ...     x = pool.write(torch.arange(6.0).view(3, 2)).result()
        ...     x.read(1, 3).result()
        tensor([[2., 3.],
                [4., 5.]])
    """

    quantization: tuple[int, int] | None = None

    def __init__(
        self, shape: torch.Size, dtype: torch.dtype, grain: int, sums: Checksums | None, slot: Slot | None, pool: Any
    ) -> None:
        self.shape, self.dtype, self.grain, self.sums, self.slot = shape, dtype, grain, sums, slot
        self._pool = pool  # kept open as long as there is something to read

    @property
    def kind(self) -> MemoryKind:
        """Returns the memory kind: "disk"."""
        return "disk"

    @property
    def pool(self) -> Any:
        """Returns the pool of the value."""
        return self._pool

    @property
    def nbytes(self) -> int:
        """Returns the bytes of the value. The size of the file is rounded up to grains."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def name(self) -> str:
        """Returns the path of the leaf, or "" before a commit has named the value."""
        return self.slot.name if self.slot else ""

    def flat(self) -> "DiskTensor":
        """Returns the same value, in the same file, with a single dim."""
        return DiskTensor(torch.Size([math.prod(self.shape)]), self.dtype, self.grain, self.sums, self.slot, self._pool)

    def load(self) -> Shaped[Tensor, "..."]:
        """Returns the whole value as a fresh host tensor, and waits for it.

        Raises:
            DamagedError: the file is truncated, gone, or differs from its checksums.
        """
        return self.read().result()

    def read(self, lo: int = 0, hi: int | None = None, out: Shaped[Tensor, "..."] | None = None) -> Pending[Tensor]:
        """Starts to read rows `lo:hi` of dim 0. A value without dims has one row.

        With direct I/O, reading into `out` needs no copy where `out` and the rows in the file both begin on a page.
        Tensors of 64 KiB or more from `host_empty` begin on a page, and so do rows at multiples of `grain` bytes.

        Args:
            lo: first row.
            hi: row after the last, or None for all.
            out: contiguous host tensor to fill. Default: a new tensor.

        Returns:
            The rows, in flight. `result` raises DamagedError as `load` does.

        Raises:
            ValueError: there are no such rows, or `out` has another shape or dtype.
        """
        rows = self.shape[0] if self.shape else 1
        hi = rows if hi is None else hi
        if not 0 <= lo <= hi <= rows:
            raise ValueError(f"rows {lo}:{hi} of a value of shape {tuple(self.shape)}: there are rows 0:{rows}.")
        shape = torch.Size([hi - lo, *self.shape[1:]]) if self.shape else self.shape
        row = self.nbytes // max(rows, 1)
        start, stop = lo * row, hi * row
        if out is not None:
            _check_source(out, shape, self.dtype, "out")
        if start == stop or self.slot is None:
            return Pending.of(host_empty(shape, self.dtype) if out is None else out)
        self._pool.check_open()
        record_move("disk", "host", stop - start)
        if out is None:
            first, last = start // self.grain * self.grain, -(-stop // self.grain) * self.grain
            out, into = aligned_window(tuple(shape), self.dtype, start - first, last - stop)
            start = first
        else:
            into = as_bytes(out)
        return of_futures(out, self._pool.io.read(self.slot, start, into, self.grain, self.sums))

    def __repr__(self) -> str:
        where = self.slot.path if self.slot else "nowhere"
        return f"DiskTensor(shape={tuple(self.shape)}, dtype={self.dtype}, file={where})"


class DiskWriter:
    """Writes one value in chunks of rows, in any order and from any thread.

    An unfinished writer leaves nothing on disk.

    Example:
        >>> import tempfile
        >>> from shardfn.memory import Pool
        >>> with tempfile.TemporaryDirectory() as directory, Pool(directory) as pool:
        ...     writer = pool.writer((3,), torch.float32)
        ...     _ = writer.write(1, torch.ones(2))
        ...     _ = writer.write(0, torch.zeros(1))
        ...     writer.finish().load()
        tensor([0., 1., 1.])
    """

    def __init__(
        self, shape: torch.Size, dtype: torch.dtype, slot: Slot | None, io: Io, sums: Checksums | None, pool: Any
    ) -> None:
        self.shape, self.dtype = shape, dtype
        self._io, self._slot, self._sums, self._pool = io, slot, sums, pool
        self._rows = shape[0] if shape else 1
        self._row = math.prod(shape[1:]) * dtype.itemsize
        # Under the lock: claimed rows (sorted and joined), incomplete grains by first byte, and requests in flight or
        # failed. `finish` raises the errors of failed requests. `finish` must be called after all calls of `write` have
        # returned, because rows are claimed before the requests are made.
        self._written: list[tuple[int, int]] = []
        self._edges: dict[int, _Edge] = {}
        self._futures: list[concurrent.futures.Future[Any]] = []
        self._lock = threading.Lock()

    def write(self, lo: int, rows: Shaped[Tensor, "..."]) -> Pending[None]:
        """Starts to write rows from `lo` on.

        Args:
            lo: index of the first row to write.
            rows: host tensor `[n, *shape[1:]]` of the value's dtype; of shape `[]` for a value without dims.

        Returns:
            A pending write, done when `rows` may be overwritten. `result` raises DiskFullError.

        Raises:
            ValueError: rows that the value does not have, of another shape or dtype, or written before.
        """
        count = rows.shape[0] if self.shape else 1
        _check_source(rows, torch.Size([count, *self.shape[1:]]) if self.shape else self.shape, self.dtype, "rows")
        self._claim_rows(lo, lo + count)
        self._pool.check_open()
        source = as_bytes(rows.detach().resolve_conj().resolve_neg().contiguous())
        if not len(source) or self._slot is None:
            return Pending.of(None)
        record_move("host", "disk", len(source))
        futures = self._submit_grains(self._slot, lo * self._row, source)
        return of_futures(None, futures)

    def finish(self) -> DiskTensor:
        """Waits for the chunks, and returns the value.

        Raises:
            ValueError: rows are missing.
            DiskFullError: there was no room.
        """
        return self.finishing().result()

    def finishing(self) -> Pending[DiskTensor]:
        """Finishes the value as `finish` does, without the wait.

        Raises:
            ValueError: rows are missing.
        """
        with self._lock:
            holes = _find_holes(self._written, self._rows)
            if holes:
                text = ", ".join(f"{lo}:{hi}" for lo, hi in holes)
                raise ValueError(f"rows {text} of a value of shape {tuple(self.shape)} were not written.")
            futures = tuple(self._futures)
        value = DiskTensor(self.shape, self.dtype, self._io.grain, self._sums, self._slot, self._pool)
        return of_futures(value, futures)

    def _claim_rows(self, lo: int, hi: int) -> None:
        """Marks rows `lo:hi` as written. Each row can be written once."""
        if not 0 <= lo <= hi <= self._rows:
            raise ValueError(f"rows {lo}:{hi} of a value of shape {tuple(self.shape)}: there are rows 0:{self._rows}.")
        if lo == hi:
            return
        with self._lock:
            at = bisect.bisect_left(self._written, (lo, hi))
            for a, b in self._written[max(at - 1, 0) : at + 1]:
                if max(a, lo) < min(b, hi):
                    raise ValueError(
                        f"rows {max(a, lo)}:{min(b, hi)} were written before. Values on disk do not change."
                    )
            self._written.insert(at, (lo, hi))
            self._written[max(at - 1, 0) : at + 2] = _join_runs(self._written[max(at - 1, 0) : at + 2])

    def _submit_grains(self, slot: Slot, start: int, source: Bytes) -> list[concurrent.futures.Future[Any]]:
        """Writes whole grains immediately. Partial grains at both ends wait for the missing bytes."""
        grain, stop = self._io.grain, start + len(source)
        first, last = -(-start // grain) * grain, stop // grain * grain
        futures = []
        if first < last:
            futures += self._io.write(slot, first, source[first - start : last - start], self._sums)
        ends = [(start, min(first, stop))] if first <= last else [(start, stop)]
        ends += [(last, stop)] if first <= last else []
        for lo, hi in ends:
            if lo < hi:
                futures += self._fill_edge(slot, lo, source[lo - start : hi - start])
        with self._lock:
            self._futures = [f for f in self._futures if not f.done() or f.exception()] + futures
        return futures

    def _fill_edge(self, slot: Slot, start: int, data: Bytes) -> list[concurrent.futures.Future[Any]]:
        grain = self._io.grain
        at = start // grain * grain
        with self._lock:
            edge = self._edges.get(at) or self._edges.setdefault(at, _Edge(grain, min(grain, self._close_slot - at)))
            edge.data[start - at : start - at + len(data)] = data
            edge.missing -= len(data)
            if edge.missing:
                return []
            # Only the thread that brings the last byte uses the grain from now on, and writes without the lock.
            del self._edges[at]
        return self._io.write(slot, at, edge.data, self._sums)

    @property
    def _close_slot(self) -> int:
        return self._rows * self._row


class _Edge:
    """Grain that several chunks share, with the bytes received so far."""

    def __init__(self, grain: int, missing: int) -> None:
        self.data = aligned_window((grain,), torch.uint8)[1]
        self.missing = missing


def _check_source(x: Tensor, shape: torch.Size, dtype: torch.dtype, what: str) -> None:
    if x.device.type != "cpu":
        raise ValueError(f"{what} must be on the host, got {x.device}. Call `to_host(x).result()` first.")
    if x.shape != shape or x.dtype != dtype:
        raise ValueError(
            f"{what} must have shape {tuple(shape)} and dtype {dtype}, got shape {tuple(x.shape)} and dtype {x.dtype}."
        )
    if what == "out" and not x.is_contiguous():
        raise ValueError(f"out must be contiguous, got strides {x.stride()}. Make out by `host_empty(shape, dtype)`.")


def _join_runs(runs: list[tuple[int, int]]) -> list[tuple[int, int]]:
    out = runs[:1]
    for lo, hi in runs[1:]:
        if lo == out[-1][1]:
            out[-1] = (out[-1][0], hi)
        else:
            out.append((lo, hi))
    return out


def _find_holes(runs: list[tuple[int, int]], rows: int) -> list[tuple[int, int]]:
    """Returns the gaps of sorted `runs` in `0:rows`, for example [(2, 5)] for [(0, 2), (5, 8)] and 8 rows."""
    ends = [0, *(hi for _, hi in runs)]
    starts = [*(lo for lo, _ in runs), rows]
    return [(a, b) for a, b in zip(ends, starts, strict=True) if a < b]
