"""Host tensors: page-aligned, pinned where there is CUDA, and counted by the ledger."""

import ctypes
import math
import os

import numpy as np
import torch
from jaxtyping import Shaped
from torch import Tensor

from ._ledger import on_host, record_tensor
from ._mappings import Mappings
from ._traced import capturing, traced_host_empty

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
