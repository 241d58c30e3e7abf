"""Boxes of leaves from a checkpoint's files: each rank reads only the byte ranges of the boxes.

Every opened file is checked against the manifest: a plain file, with the same number of bytes. A chunk that is read as
a whole is checked against its digest.
"""

import hashlib
import threading
from types import TracebackType
from typing import Protocol

import torch
from torch import Tensor

from shardfn.collectives import Box
from shardfn.memory import Bytes, as_bytes

from ._manifest import DTYPES, Manifest, StoredChunk, StoredLeaf
from ._place import Location, OpenedFile, damaged
from ._strided_read import PIECE, read_box, staging

# Files of one checkpoint that are open at a time. Often a process may have a thousand open files.
_MAX_OPEN = 64


class BoxReader(Protocol):
    """Reads boxes of leaves."""

    def box(self, leaf: StoredLeaf, box: Box, out: Tensor, *, check: bool = True) -> None:
        """Fills `out`, a host tensor of the box's shape and the leaf's dtype, with a box of a leaf."""
        ...


class ChunkReader:
    """The files of one checkpoint.

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
