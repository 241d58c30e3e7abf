"""Boxes of leaves from a checkpoint's files: each rank reads only the byte ranges of the boxes.

Every opened file is checked against the manifest: a plain file, with the same number of bytes. A chunk that is read as
a whole is checked against its digest.

Reads a box of a row-major tensor in a file, by contiguous runs of bytes or by bands of rows.

Bands are used if the gaps between runs are small, for example 100 columns of a matrix with 128 columns.
"""

import hashlib
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Protocol

import torch
from torch import Tensor

from shardfn.collectives import Box
from shardfn.memory import Bytes, as_bytes, on_host

from ._manifest import DTYPES, Manifest, StoredChunk, StoredLeaf
from ._place import Location, OpenedFile, damaged

# Bytes that are read at a time, where rows are not longer.
PIECE = 8 << 20
# Up to this many bytes between two runs are read and dropped: a file is read in pages anyway.
_PAGE = 4096
# Fills an array with the tensor's bytes, from a given byte on.
ReadBytes = Callable[[int, Bytes], None]


def read_box(shape: Sequence[int], box: Sequence[tuple[int, int]], out: Tensor, read: ReadBytes) -> None:
    """Fills `out` with a box of a tensor whose bytes `read` supplies.

    In addition to `out`, at most a band is in memory: some megabytes, or a row. A contiguous box needs no band.

    Args:
        shape: shape of the whole tensor.
        box: start and stop in each dim.
        out: host tensor of the box's shape and the tensor's dtype, of any strides.
        read: `read(start, data)` fills `data` with the tensor's bytes from `start` on.

    Example:
        >>> file = as_bytes(torch.arange(6.0))
        >>> out = torch.empty(2, 1)
        >>> read_box((2, 3), [(0, 2), (1, 2)], out, lambda start, data: data.put(range(len(data)), file[start:]))
        >>> out.flatten()
        tensor([1., 4.])
    """
    if not out.numel():
        return
    if all(lo == 0 and hi == n for (lo, hi), n in zip(box, shape, strict=True)):
        return _read_together(out, 0, read)
    itemsize = out.dtype.itemsize
    for band in _split_bands(shape, box, itemsize):
        begin = 0
        for (lo, _), size in zip(band, shape, strict=True):
            begin = begin * size + lo
        wanted = [(max(a, lo), min(b, hi)) for (a, b), (lo, hi) in zip(box, band, strict=True)]
        target = out[tuple(slice(lo - a, hi - a) for (lo, hi), (a, _) in zip(wanted, box, strict=True))]
        if all(x == y for x, y in zip(wanted, band, strict=True)):
            _read_together(target, begin * itemsize, read)
            continue
        here = staging([hi - lo for lo, hi in band], out.dtype)
        read(begin * itemsize, as_bytes(here))
        target.copy_(here[tuple(slice(lo - c, hi - c) for (lo, hi), (c, _) in zip(wanted, band, strict=True))])


def _read_together(target: Tensor, start: int, read: ReadBytes) -> None:
    """Reads contiguous bytes into a tensor of any strides."""
    here = target if target.is_contiguous() else staging(target.shape, target.dtype)
    data = as_bytes(here)
    for lo in range(0, len(data), PIECE):
        read(start + lo, data[lo : lo + PIECE])
    if here is not target:
        target.copy_(here)


def staging(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Returns temporary host memory for a read."""
    with on_host():
        return torch.empty(tuple(shape), dtype=dtype, device="cpu")


def _split_bands(shape: Sequence[int], inner: Sequence[tuple[int, int]], itemsize: int) -> Iterator[Box]:
    """Yields boxes that are contiguous in a row-major tensor, and together cover `inner`.

    Every band has all of the last dims that `inner` needs whole, or almost whole.
    """
    dim, row = len(shape), itemsize
    while dim and (shape[dim - 1] - (inner[dim - 1][1] - inner[dim - 1][0])) * row <= _PAGE:
        # Bands have all of this dim, so a row of the dim before it has all of these bytes.
        row *= shape[dim - 1]
        dim -= 1
    tail = tuple((0, n) for n in shape[dim:])
    if dim == 0:
        first, last = inner[0]
        dim, tail, row = 1, tail[1:], row // max(shape[0], 1)
    else:
        first, last = inner[dim - 1]
    step = max(1, PIECE // max(row, 1))
    for at in itertools.product(*(range(lo, hi) for lo, hi in inner[: dim - 1])):
        for lo in range(first, last, step):
            yield (*((i, i + 1) for i in at), (lo, min(lo + step, last)), *tail)


# Files of a single checkpoint that are open at a time. Often a process may have a thousand open files.
_MAX_OPEN = 64


class BoxReader(Protocol):
    """Reads boxes of leaves."""

    def box(self, leaf: StoredLeaf, box: Box, out: Tensor, *, check: bool = True) -> None:
        """Fills `out`, a host tensor of the box's shape and the leaf's dtype, with a box of a leaf."""
        ...


class ChunkReader:
    """The files of a single checkpoint.

    Args:
        place: location of the checkpoint.
        manifest: manifest of the checkpoint.

    Attributes:
        read_bytes: the number of bytes read so far.
    """

    def __init__(self, place: Location, manifest: Manifest) -> None:
        self.place, self.manifest, self.read_bytes = place, manifest, 0
        # Open files by name, the last used at the end. A thread holds the lock while it reads from a file.
        self._open: dict[str, OpenedFile] = {}
        self._lock = threading.Lock()

    def __enter__(self) -> "ChunkReader":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        while self._open:
            self._open.popitem()[1].close()

    def box(self, leaf: StoredLeaf, box: Box, out: Tensor, *, check: bool = True) -> None:
        """Fills `out` with a box of a leaf.

        Args:
            leaf: leaf of the manifest.
            box: start and stop along each dim of the leaf, for example ((0, 4), (8, 16)).
            out: host tensor of the box's shape and the leaf's dtype, of any strides.
            check: whether chunks that are read whole are compared with their digests.

        Raises:
            DamagedError: a file has changed since the save.
        """
        for chunk in leaf.chunks:
            both = _intersect_box(box, chunk)
            if both is None:
                continue
            target = out[tuple(slice(lo - at, hi - at) for (lo, hi), (at, _) in zip(both, box, strict=True))]
            inner = tuple((lo - o, hi - o) for (lo, hi), o in zip(both, chunk.offset, strict=True))
            if all(hi - lo == n for (lo, hi), n in zip(inner, chunk.shape, strict=True)):
                self._read_whole(chunk, target, check)
            else:
                self._read_part(chunk, inner, target)

    def into(self, name: str, start: int, data: Bytes) -> None:
        """Reads bytes of a file from `start` on.

        Raises:
            DamagedError: the file is missing, is not a plain file, or has another size.
            OSError: this process may not open it, or has too many files open.
        """
        with self._lock:
            if self._open_file(name).into(data, start) < len(data):
                raise damaged(f"{self.place}/{name} was cut short while it was read")
            self.read_bytes += len(data)

    def _open_file(self, name: str) -> OpenedFile:
        """Returns an open file. The least recently used files are closed."""
        file = self._open.pop(name, None)
        if file is None:
            while len(self._open) >= _MAX_OPEN:
                self._open.pop(next(iter(self._open))).close()
            file = self.place.opened(name, self.manifest.files[name].bytes)
        self._open[name] = file
        return file

    def _read_whole(self, chunk: StoredChunk, target: Tensor, check: bool) -> None:
        here = target if target.is_contiguous() and target.device.type == "cpu" else staging(chunk.shape, target.dtype)
        data = as_bytes(here)
        digest = hashlib.sha256()
        for lo in range(0, len(data), PIECE):
            self.into(chunk.file, chunk.start + lo, data[lo : lo + PIECE])
            if check:
                digest.update(data[lo : lo + PIECE].data)
        if check and digest.hexdigest() != chunk.sha256:
            end = chunk.start + len(data)
            raise damaged(
                f"{self.place}/{chunk.file}: bytes {chunk.start} to {end} have changed since they were written"
            )
        if here is not target:
            target.copy_(here)

    def _read_part(self, chunk: StoredChunk, inner: Box, target: Tensor) -> None:
        read_box(chunk.shape, inner, target, lambda start, data: self.into(chunk.file, chunk.start + start, data))


def _intersect_box(box: Box, chunk: StoredChunk) -> Box | None:
    both = tuple((max(lo, o), min(hi, o + n)) for (lo, hi), o, n in zip(box, chunk.offset, chunk.shape, strict=True))
    return both if all(lo < hi for lo, hi in both) else None


def dtype_of(leaf: StoredLeaf) -> torch.dtype:
    """Returns the dtype of a leaf's elements."""
    return DTYPES[leaf.dtype]
