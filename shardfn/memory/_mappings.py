"""Page-aligned memory that is used again: the kernel zeroes fresh pages, and that costs more than most uses of them.

A mapping is lent as a ctypes array. Tensors and numpy arrays over its buffer hold that array, and views of them do too,
so when it is garbage no reference to the memory is left. (A numpy array or a memoryview in its place would not do:
views of those hold the object behind them.)
"""

import collections
import ctypes
import functools
import mmap
import threading
import weakref
from typing import Any

_HUGE = 4 << 20
_STEPS = 8  # sizes between a power of two and the next: no more than an eighth of a mapping is of no use


class Mappings:
    """Mappings that are lent, and those that wait to be lent again: together no more than were once lent at a time.

    Args:
        keep: the most bytes that wait. The oldest go first.

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
        self._sizes: dict[int, list[int]] = {}  # by size, the numbers of those that are free
        # Given back and not yet taken note of: the one field that is written without the lock.
        self._returned: collections.deque[mmap.mmap] = collections.deque()
        # A mapping that is on its way to be made counts as lent.
        self._next = self._waiting = self._lent = self._most = 0
        self._lock = threading.Lock()

    @property
    def waiting(self) -> int:
        """Bytes of the mappings that wait."""
        self._collect_returned()
        return self._waiting

    def lend(self, nbytes: int) -> Any:
        """At least `nbytes` bytes, or one, of any content: a writable ctypes array, until all its views are garbage.

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
        """Makes a child usable whose parent was forked while one of its threads was in here."""
        self._lock = threading.Lock()

    def _give_back(self, area: mmap.mmap) -> None:
        """Called wherever a reference ends: in any thread, and by the garbage collector while the lock is held too."""
        self._returned.append(area)
        self._collect_returned()

    def _collect_returned(self) -> None:
        """Takes back returned mappings. If another thread holds the lock, that thread does so after releasing it."""
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
        return self._free.pop(numbers.pop())  # the last one, whose bytes may still be in a cache

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
        area.madvise(mmap.MADV_HUGEPAGE)  # a large page is faulted in at a tenth of the cost of its small ones
    return area
