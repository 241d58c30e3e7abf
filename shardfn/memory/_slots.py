"""Slots: the files of a pool, each owned by a single value and used again when that value is garbage.

Only users of the bytes hold a slot: the value, transfers in flight, and the last commit. When Python's reference count
falls to zero, the file is free for the next value of the same size.
"""

import collections
import errno
import gc
import os
import pathlib
import shutil
import threading
import weakref

from ._ledger import record_owner
from ._lock import DiskFullError

# The errors of a write or a reservation without room: on the disk, in the quota, under `ulimit -f`.
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class Slot:
    """A file with room for a single value.

    Attributes:
        path: the file.
        capacity: bytes of the file.
        name: path of the stored leaf, for messages. Empty until a commit names the leaf.
    """

    __slots__ = ("__weakref__", "capacity", "name", "path")

    def __init__(self, path: pathlib.Path, capacity: int, name: str = "") -> None:
        self.path, self.capacity, self.name = path, capacity, name


class Slots:
    """The files of one directory."""

    def __init__(self, directory: pathlib.Path) -> None:
        self._directory = directory
        self._next = 0
        # Under the lock: free files by capacity, and the next number. No number is used twice while the pool is open.
        self._free: dict[int, list[pathlib.Path]] = {}
        # Finalizers run at any point of any thread, so finalizers only leave a note.
        self._dead: collections.deque[tuple[pathlib.Path, int]] = collections.deque()
        self._lock = threading.Lock()

    def take(self, capacity: int, nbytes: int) -> Slot:
        """Returns a slot of that capacity for a value of `nbytes`: a free file, or a new file.

        Raises:
            DiskFullError: there is no room, not even after every free file was removed.
        """
        with self._lock:
            self._collect_free()
            path = self._reuse_file(capacity) or self._create_file(capacity)
        return self._claim_slot(Slot(path, capacity), nbytes)

    def adopt(self, name: str, capacity: int, nbytes: int) -> Slot:
        """Returns the slot of a file that a manifest names."""
        path = self._directory / name
        with self._lock:
            self._next = max(self._next, int(path.stem.removeprefix("slot-")) + 1)
        return self._claim_slot(Slot(path, capacity), nbytes)

    def trim(self) -> int:
        """Removes every free file, and returns the bytes of the removed files."""
        with self._lock:
            self._collect_free()
            return self._remove_free()

    def usage(self) -> tuple[int, int]:
        """Returns the number of files that wait for reuse, and the bytes of these files."""
        with self._lock:
            self._collect_free()
            return sum(map(len, self._free.values())), sum(c * len(paths) for c, paths in self._free.items())

    def _claim_slot(self, slot: Slot, nbytes: int) -> Slot:
        weakref.finalize(slot, self._dead.append, (slot.path, slot.capacity)).atexit = False
        record_owner(slot, "disk", nbytes)
        return slot

    def _collect_free(self) -> None:
        while self._dead:
            path, capacity = self._dead.popleft()
            self._free.setdefault(capacity, []).append(path)

    def _reuse_file(self, capacity: int) -> pathlib.Path | None:
        paths = self._free.get(capacity)
        return paths.pop() if paths else None

    def _create_file(self, capacity: int) -> pathlib.Path:
        path = self._directory / f"slot-{self._next:06d}.bin"
        self._next += 1
        try:
            _reserve_file(path, capacity)
        except OSError as problem:
            if problem.errno not in FULL:
                raise
            # With the lock held: the finalizers of slots take none.
            gc.collect()  # values in reference cycles hold their slots
            self._collect_free()
            if again := self._reuse_file(capacity):
                return again
            self._remove_free()
            try:
                _reserve_file(path, capacity)
            except OSError as still:
                if still.errno not in FULL:
                    raise
                raise no_room(self._directory, capacity, still) from still
        return path

    def _remove_free(self) -> int:
        removed = sum(capacity * len(paths) for capacity, paths in self._free.items())
        for paths in self._free.values():
            for path in paths:
                path.unlink(missing_ok=True)
        self._free.clear()
        return removed


def no_room(directory: pathlib.Path, needed: int, problem: OSError) -> DiskFullError:
    """Returns the error for a value that does not fit."""
    free = shutil.disk_usage(directory).free
    why = "a limit on file sizes (ulimit -f)" if problem.errno == errno.EFBIG else f"{free} bytes are free there"
    return DiskFullError(
        problem.errno,
        f"no room in {directory}: a value needs {needed} bytes more, and {why}. Values written before are untouched,"
        " and the last commit can be opened. Make room there, give the pool a directory on a larger disk, or keep"
        " fewer leaves on disk.",
    )


def _reserve_file(path: pathlib.Path, capacity: int) -> None:
    """Makes a file of that size with allocated blocks, so that a full disk is found before a byte is written."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        _allocate_blocks(fd, capacity)
    except OSError:
        path.unlink()
        raise
    finally:
        os.close(fd)


def _allocate_blocks(fd: int, capacity: int) -> None:
    if not hasattr(os, "posix_fallocate"):
        return os.ftruncate(fd, capacity)
    try:
        os.posix_fallocate(fd, 0, capacity)
    except OSError as problem:
        # The file system cannot. Then a full disk is found by the writes.
        if problem.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
            raise
        os.ftruncate(fd, capacity)
