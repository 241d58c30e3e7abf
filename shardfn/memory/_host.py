"""Host tensors: page-aligned, pinned where there is CUDA, and counted by the ledger.

Page-aligned memory that is used again, because zeroing new pages costs more than most uses.

A mapping is lent as a ctypes array. Tensors and numpy arrays over the buffer hold the ctypes array, and so do their
views. So no reference to the memory is left when the ctypes array is garbage. (Views of a numpy array or a memoryview
would hold only the object behind the array.)
"""

import collections
import ctypes
import functools
import math
import mmap
import os
import threading
import weakref
from typing import Any

import numpy as np
import torch
from jaxtyping import Shaped
from torch import Tensor

from ._ledger import on_host, record_tensor
from ._traced import capturing, traced_host_empty

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


PAGE = 4096
# From this size on, a separate mapping is worth a system call: mappings are page-aligned, as direct I/O needs.
_SMALL = 64 << 10
_M_MMAP_THRESHOLD = -3  # of malloc.h
_MAPPINGS = Mappings(keep=256 << 20)  # about the use of a step with large chunks

if hasattr(os, "register_at_fork"):  # Windows does not fork
    os.register_at_fork(after_in_child=_MAPPINGS.forked)

Bytes = np.ndarray  # one-dimensional, uint8


def host_empty(shape: tuple[int, ...] | torch.Size, dtype: torch.dtype = torch.float32) -> Shaped[Tensor, "..."]:
    """Returns an uninitialised host tensor: pinned where CUDA is, page-aligned when large, counted as host.

    Args:
        shape: shape of the tensor.
        dtype: dtype of the elements.

    Returns:
        The tensor.

    Example:
        >>> host_empty((2, 3), torch.bfloat16).shape
        torch.Size([2, 3])
    """
    if capturing():
        return traced_host_empty(tuple(shape), dtype)
    nbytes = math.prod(shape) * dtype.itemsize
    if nbytes < _SMALL or torch.cuda.is_available():
        return _torch_empty(tuple(shape), dtype)
    return aligned_window(tuple(shape), dtype)[0]


def aligned_window(
    shape: tuple[int, ...], dtype: torch.dtype, before: int = 0, after: int = 0
) -> tuple[Shaped[Tensor, "..."], Bytes]:
    """Returns a host tensor in the middle of page-aligned memory, and the memory as bytes.

    Args:
        shape: the tensor's shape.
        dtype: dtype of the elements.
        before: bytes of the memory in front of the tensor.
        after: bytes of the memory behind the tensor.

    Returns:
        The tensor, and the bytes of the memory; `[before : -after]` are the tensor's.
    """
    numel = math.prod(shape)
    nbytes = before + numel * dtype.itemsize + after
    if not numel:
        return _torch_empty(shape, dtype), np.empty(0, np.uint8)
    if torch.cuda.is_available():
        whole = _torch_empty((nbytes,), torch.uint8)
        return whole[before : nbytes - after].view(dtype).view(shape), whole.numpy()
    area = _MAPPINGS.lend(nbytes)
    # The storage is exactly the tensor's bytes and keeps the mapping alive.
    x = torch.frombuffer(area, dtype=dtype, count=numel, offset=before).view(shape)
    record_tensor(x, "host")
    return x, np.frombuffer(area, np.uint8, nbytes)


def as_bytes(x: Shaped[Tensor, "..."]) -> Bytes:
    """Returns the memory of a contiguous CPU tensor, and keeps it alive."""
    if not x.numel():
        return np.empty(0, np.uint8)
    # A contiguous tensor of a single element may have any strides.
    return x.detach().as_strided((x.numel(),), (1,)).view(torch.uint8).numpy()


def return_freed_pages(threshold: int = 1 << 17) -> None:
    """Makes glibc return freed blocks of `threshold` bytes or more to the system immediately, for this process.

    Otherwise glibc keeps up to 32 MiB of each freed block, in heaps that large tensors of changing sizes fragment: for
    example, a process may use 150 GB for 100 GB of live tensors. With this call, new blocks cost page faults. Without
    glibc the call has no effect.

    Args:
        threshold: smallest block to return, in bytes.

    Example:
        >>> return_freed_pages()
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, threshold)


def trim_heap() -> None:
    """Makes glibc return the pages of freed blocks to the system, once.

    A loop that replaces large blocks by other large blocks (for example in a conversion of weights) leaves holes in the
    heap. A call in each round limits the resident memory to the live blocks. Without glibc the call has no effect.

    Example:
        >>> trim_heap()
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _torch_empty(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    with on_host():
        return torch.empty(shape, dtype=dtype, pin_memory=torch.cuda.is_available())
