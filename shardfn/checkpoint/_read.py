"""Boxes of leaves from a checkpoint's files: each rank reads the byte ranges that it needs, and no others.

Every file is checked against the manifest when it is opened: a plain file, of that many bytes. A chunk that is read as
a whole is checked against its digest.
"""

import hashlib
import threading
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Protocol

import torch
from torch import Tensor

from shardfn.collectives import Box
from shardfn.memory import Bytes, as_bytes, on_host

from ._manifest import DTYPES, Manifest, StoredChunk, StoredLeaf
from ._place import Location, OpenedFile, damaged

_PIECE = 8 << 20
# Files of one checkpoint that are open at a time; a process may have some thousand in all, often.
_MAX_OPEN = 64
# Up to this many bytes between two runs are read and dropped: a file is read in pages anyway.
_PAGE = 4096


class BoxReader(Protocol):
    """What boxes of leaves are read by."""

    def box(self, leaf: StoredLeaf, box: Box, out: Tensor, *, check: bool = True) -> None:
        """Fills `out`, a host tensor of the box's shape and the leaf's dtype, with a box of a leaf."""
        ...


class ChunkReader:
    """The files of one checkpoint.

    Args:
        place: where it is.
        manifest: what it has.

    Attributes:
        read_bytes: that were read so far.
    """

    def __init__(self, place: Location, manifest: Manifest) -> None:
        self.place, self.manifest, self.read_bytes = place, manifest, 0
        # Open files by name, the one that was used last at the end. Whoever reads from one holds the lock meanwhile.
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
            leaf: of the manifest.
            box: where in it.
            out: host tensor of the box's shape and the leaf's dtype, of any strides.
            check: whether chunks that are read whole are compared with their digests.

        Raises:
            DamagedError: a file is not what was written.
        """
        for chunk in leaf.chunks:
            both = _overlap(box, chunk)
            if both is None:
                continue
            target = out[tuple(slice(lo - at, hi - at) for (lo, hi), (at, _) in zip(both, box, strict=True))]
            inner = tuple((lo - o, hi - o) for (lo, hi), o in zip(both, chunk.offset, strict=True))
            if all(hi - lo == n for (lo, hi), n in zip(inner, chunk.shape, strict=True)):
                self._whole(chunk, target, check)
            else:
                self._part(chunk, inner, target)

    def into(self, name: str, start: int, data: Bytes) -> None:
        """Reads bytes of a file from `start` on.

        Raises:
            DamagedError: it is gone, no plain file, or of another size.
            OSError: this process may not open it, or has too many files open.
        """
        with self._lock:
            if self._file(name).into(data, start) < len(data):
                raise damaged(f"{self.place}/{name} was cut short while it was read")
            self.read_bytes += len(data)

    def _file(self, name: str) -> OpenedFile:
        """An open file, until others have been asked for."""
        file = self._open.pop(name, None)
        if file is None:
            while len(self._open) >= _MAX_OPEN:
                self._open.pop(next(iter(self._open))).close()
            file = self.place.opened(name, self.manifest.files[name].bytes)
        self._open[name] = file
        return file

    def _whole(self, chunk: StoredChunk, target: Tensor, check: bool) -> None:
        here = target if target.is_contiguous() and target.device.type == "cpu" else _staging(chunk.shape, target.dtype)
        data = as_bytes(here)
        digest = hashlib.sha256()
        for lo in range(0, len(data), _PIECE):
            self.into(chunk.file, chunk.start + lo, data[lo : lo + _PIECE])
            if check:
                digest.update(data[lo : lo + _PIECE].data)
        if check and digest.hexdigest() != chunk.sha256:
            end = chunk.start + len(data)
            raise damaged(
                f"{self.place}/{chunk.file}: bytes {chunk.start} to {end} have changed since they were written"
            )
        if here is not target:
            target.copy_(here)

    def _part(self, chunk: StoredChunk, inner: Box, target: Tensor) -> None:
        """A box of a chunk: runs of bytes that lie together, or, where little is between them, bands of rows."""
        itemsize = target.dtype.itemsize
        for corner, box in _bands(chunk.shape, inner, itemsize):
            # `box` is whole along all dims but one, so that its bytes lie together.
            here = _staging(tuple(hi - lo for lo, hi in box), target.dtype)
            begin = 0
            for (lo, _), size in zip(box, chunk.shape, strict=True):
                begin = begin * size + lo
            self.into(chunk.file, chunk.start + begin * itemsize, as_bytes(here))
            wanted = [(max(a, lo), min(b, hi)) for (a, b), (lo, hi) in zip(inner, box, strict=True)]
            cut = here[tuple(slice(a - lo, b - lo) for (a, b), (lo, _) in zip(wanted, box, strict=True))]
            target[tuple(slice(a - c, b - c) for (a, b), c in zip(wanted, corner, strict=True))].copy_(cut)


def _overlap(box: Box, chunk: StoredChunk) -> Box | None:
    both = tuple((max(lo, o), min(hi, o + n)) for (lo, hi), o, n in zip(box, chunk.offset, chunk.shape, strict=True))
    return both if all(lo < hi for lo, hi in both) else None


def _bands(shape: Sequence[int], inner: Box, itemsize: int) -> Iterator[tuple[tuple[int, ...], Box]]:
    """Boxes whose bytes lie together in a row-major chunk, and which together have `inner`; its corner with each.

    The last dims that are wanted whole, or from whose rows little is left out, belong to every band.
    """
    corner = tuple(lo for lo, _ in inner)
    dim, row = len(shape), itemsize
    while dim and (shape[dim - 1] - (inner[dim - 1][1] - inner[dim - 1][0])) * row <= _PAGE:
        # All of this dim is read, if what lies around it is.
        row *= shape[dim - 1]
        dim -= 1
    tail = tuple((0, n) for n in shape[dim:])
    if dim == 0:
        first, last = inner[0] if inner else (0, 1)
        dim, tail, row = 1, tail[1:], row // max(shape[0], 1)
    else:
        first, last = inner[dim - 1]
    step = max(1, _PIECE // max(row, 1))
    outer = [range(lo, hi) for lo, hi in inner[: dim - 1]]
    for at in _product(outer):
        for lo in range(first, last, step):
            yield corner, (*((i, i + 1) for i in at), (lo, min(lo + step, last)), *tail)


def _product(ranges: Sequence[range]) -> Iterator[tuple[int, ...]]:
    if not ranges:
        yield ()
        return
    for i in ranges[0]:
        for rest in _product(ranges[1:]):
            yield (i, *rest)


def _staging(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    with on_host():
        return torch.empty(tuple(shape), dtype=dtype)


def dtype_of(leaf: StoredLeaf) -> torch.dtype:
    """The dtype of a leaf's elements."""
    return DTYPES[leaf.dtype]
