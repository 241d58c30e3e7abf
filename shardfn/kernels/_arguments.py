"""Arguments of kernels: checks, and the number of threads that share the work."""

import contextlib
import threading
from collections.abc import Iterator

import torch
from torch import Tensor


class _ThreadCount(threading.local):
    given = 0  # 0 outside of `threads_for_kernels`


_THREADS = _ThreadCount()


def num_threads() -> int:
    """Returns the largest number of threads of a kernel."""
    return _THREADS.given or torch.get_num_threads()


def threads_for(work: int, few: int, parts: int | None = None) -> int:
    """Returns the threads that share some work.

    A single thread up to `few`, where a second thread costs more than it saves.

    Args:
        work: operations.
        few: number of units of work up to which a single thread is fastest.
        parts: number of threads that can share the work at most, or None where each operation is a part.
    """
    threads = num_threads() if work > few else 1
    return threads if parts is None else min(threads, max(parts, 1))


@contextlib.contextmanager
def threads_for_kernels() -> Iterator[None]:
    """Returns a context in which torch's operations take a single thread, and kernels torch's number outside.

    For programs with most work in kernels, such as a server. After an operation the threads of torch (OpenMP) watch for
    further work for milliseconds, on the very processors that the threads of kernels need: an addition could make the
    next product slower on two threads than on a single thread.

    Example:
        >>> with threads_for_kernels():
        ...     torch.get_num_threads()
        1
    """
    before, given = torch.get_num_threads(), _THREADS.given
    _THREADS.given = num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
        _THREADS.given = given


def check_floating(name: str, x: Tensor) -> None:
    """Raises TypeError unless the tensor has floating-point numbers."""
    if not x.is_floating_point():
        raise TypeError(f"{name} must be of floating-point numbers, got {x.dtype}. Convert {name}")


def check_dtype(name: str, x: Tensor, dtype: torch.dtype) -> None:
    """Raises TypeError unless the tensor has this dtype."""
    if x.dtype != dtype:
        raise TypeError(f"{name} is {x.dtype}, must be {dtype}")


def check_shape(name: str, x: Tensor, shape: tuple[int, ...], why: str) -> None:
    """Raises ValueError unless the tensor has this shape."""
    if tuple(x.shape) != shape:
        raise ValueError(f"{name} is of shape {tuple(x.shape)}, must be {shape}: {why}")


def check_written(name: str, x: Tensor) -> None:
    """Raises ValueError unless an output tensor is contiguous."""
    if not x.is_contiguous():
        raise ValueError(f"{name} is written in place and must be contiguous, has strides {x.stride()}: copy it first")


def check_bytes(name: str, c: int) -> None:
    """Raises ValueError unless 8 divides the length of a row, so that the row's signs fill whole bytes."""
    if c % 8:
        raise ValueError(f"{name} has rows of {c} elements, no multiple of 8: pad them, 8 signs make a byte")


def check_block(bits: int, block: int) -> None:
    """Raises ValueError if the quantizers do not support the number of bits or the block size."""
    if bits not in (4, 8):
        raise ValueError(f"bits must be 4 or 8, got {bits}")
    if block < 1 or (bits == 4 and block % 2):
        raise ValueError(f"block must be at least 1, with 4 bits an even number, got {block}")
