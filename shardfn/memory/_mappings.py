"""Page-aligned memory that is used again, because zeroing new pages costs more than most uses.

A mapping is lent as a ctypes array. Tensors and numpy arrays over the buffer hold the ctypes array, and so do their
views. So no reference to the memory is left when the ctypes array is garbage. (Views of a numpy array or a memoryview
would hold only the object behind the array.)
"""

import collections
import ctypes
import functools
import mmap
import threading
import weakref
from typing import Any

_HUGE = 4 << 20
_STEPS = 8  # sizes between a power of two and the next: at most an eighth of a mapping is unused


class Mappings:
    """Mappings that are lent, and mappings that wait for reuse: together at most the peak of lent bytes.

    Args:
        keep: limit on the bytes that wait. The oldest mappings are dropped first.

    Example:
        >>> mappings = Mappings(keep=1 << 20)
        >>> area = mappings.lend(100_000)
        >>> len(area), mappings.waiting
        (106496, 0)
        >>> del area
        >>> mappings.waiting
        106496
    """

    def __init__(self, keep: int) -> None:
        self._keep = keep
        self._free: collections.OrderedDict[int, mmap.mmap] = collections.OrderedDict()  # by number, the oldest first
        self._sizes: dict[int, list[int]] = {}  # by size, the numbers of free mappings
        # Returned but not yet collected mappings: the only field that is written without the lock.
        self._returned: collections.deque[mmap.mmap] = collections.deque()
        # A mapping that is being made counts as lent.
        self._next = self._waiting = self._lent = self._most = 0
        self._lock = threading.Lock()

    @property
    def waiting(self) -> int:
        """Returns the bytes of the mappings that wait for reuse."""
        self._collect_returned()
        return self._waiting

    def lend(self, nbytes: int) -> Any:
        """Lends at least `nbytes` bytes, with any content, as a ctypes array, until all views are garbage.

        Raises:
            OSError: there is no room, even after all waiting mappings have been given up.
        """
        size = _round_up(nbytes)
        with self._lock:
            self._take_back()
            area = self._reuse_mapping(size)
            self._lent += size
            self._most = max(self._most, self._lent)
            self._drop_mappings()
        self._collect_returned()
        if area is None:
            area = self._map(size)
        lent = _new_bytes(size).from_buffer(area)
        weakref.finalize(lent, self._give_back, area).atexit = False
        return lent

    def trim(self) -> None:
        """Gives all mappings that wait back to the system."""
        with self._lock:
            self._take_back()
            self._drop_mappings(0)
        self._collect_returned()

    def _map(self, size: int) -> mmap.mmap:
        try:
            return _map_memory(size)
        except OSError:
            self.trim()
        try:
            return _map_memory(size)
        except OSError:
            with self._lock:
                self._lent -= size
            raise

    def forked(self) -> None:
        """Replaces the lock in a forked child, because a thread of the parent may have held the lock."""
        self._lock = threading.Lock()

    def _give_back(self, area: mmap.mmap) -> None:
        """Takes a mapping back. Called in any thread, also by the garbage collector while the lock is held."""
        self._returned.append(area)
        self._collect_returned()

    def _collect_returned(self) -> None:
        """Collects returned mappings. If another thread holds the lock, the other thread collects after releasing."""
        while self._returned and self._lock.acquire(blocking=False):
            try:
                self._take_back()
                self._drop_mappings()
            finally:
                self._lock.release()

    def _take_back(self) -> None:
        while self._returned:
            area = self._returned.popleft()
            self._lent -= len(area)
            if len(area) <= self._keep:
                self._free[self._next] = area
                self._sizes.setdefault(len(area), []).append(self._next)
                self._next += 1
                self._waiting += len(area)

    def _reuse_mapping(self, size: int) -> mmap.mmap | None:
        numbers = self._sizes.get(size)
        if not numbers:
            return None
        self._waiting -= size
        return self._free.pop(numbers.pop())  # the last mapping, because the bytes may still be in a cache

    def _drop_mappings(self, keep: int | None = None) -> None:
        keep = min(self._keep, self._most - self._lent) if keep is None else keep
        while self._waiting > keep:
            number, area = self._free.popitem(last=False)
            self._sizes[len(area)].remove(number)
            self._waiting -= len(area)


@functools.cache
def _new_bytes(nbytes: int) -> Any:
    return ctypes.c_char * nbytes


def _round_up(nbytes: int) -> int:
    step = max(mmap.PAGESIZE, (1 << (nbytes - 1).bit_length()) // (2 * _STEPS))
    return -(-nbytes // step) * step


def _map_memory(nbytes: int) -> mmap.mmap:
    area = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if nbytes >= _HUGE and hasattr(mmap, "MADV_HUGEPAGE"):
        area.madvise(mmap.MADV_HUGEPAGE)  # a large page is faulted in at a tenth of the cost of its small pages
    return area
