"""Boxes of leaves from a checkpoint's files: each rank reads the byte ranges that it needs, and no others.

Every file is checked against the manifest when it is opened: a plain file, of that many bytes. A chunk that is read as
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

from ._bands import PIECE, read_box, staging
from ._manifest import DTYPES, Manifest, StoredChunk, StoredLeaf
from ._place import Location, OpenedFile, damaged

# Files of one checkpoint that are open at a time. A process may have some thousand in all, often.
_MAX_OPEN = 64


class BoxReader(Protocol):
    """Reads boxes of leaves."""

    def box(self, leaf: StoredLeaf, box: Box, out: Tensor, *, check: bool = True) -> None:
        """Fills `out`, a host tensor of the box's shape and the leaf's dtype, with a box of a leaf."""
        ...


class ChunkReader:
    """The files of one checkpoint.

    Args:
        place: location.
        manifest: manifest.

    Attributes:
        read_bytes: the number of bytes read so far.
    """

    def __init__(self, place: Location, manifest: Manifest) -> None:
        self.place, self.manifest, self.read_bytes = place, manifest, 0
        # Open files by name, the last used at the end. A thread that reads from one holds the lock meanwhile.
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
            box: where in it.
            out: host tensor of the box's shape and the leaf's dtype, of any strides.
            check: whether chunks that are read whole are compared with their digests.

        Raises:
            DamagedError: a file has changed since it was written.
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
        """Returns an open file. It is closed once too many others have been used since."""
        file = self._open.pop(name, None)
        if file is None:
            while len(self._open) >= _MAX_OPEN:
                self._open.pop(next(iter(self._open))).close()
            file = self.place.opened(name, self.manifest.files[name].bytes)
        self._open[name] = file
        return file

    def _whole(self, chunk: StoredChunk, target: Tensor, check: bool) -> None:
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

    def _part(self, chunk: StoredChunk, inner: Box, target: Tensor) -> None:
        read_box(chunk.shape, inner, target, lambda start, data: self.into(chunk.file, chunk.start + start, data))


def _overlap(box: Box, chunk: StoredChunk) -> Box | None:
    both = tuple((max(lo, o), min(hi, o + n)) for (lo, hi), o, n in zip(box, chunk.offset, chunk.shape, strict=True))
    return both if all(lo < hi for lo, hi in both) else None


def dtype_of(leaf: StoredLeaf) -> torch.dtype:
    """Returns the dtype of a leaf's elements."""
    return DTYPES[leaf.dtype]
