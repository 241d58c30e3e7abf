"""The number of threads that share a kernel's work: torch's, also where torch's own operations take one."""

import contextlib
import threading
from collections.abc import Iterator

import torch


class _Threads(threading.local):
    given = 0  # 0 outside of `threads_for_kernels`


_THREADS = _Threads()


def num_threads() -> int:
    """Returns the most threads that a kernel takes."""
    return _THREADS.given or torch.get_num_threads()


def threads_for(work: int, few: int, parts: int | None = None) -> int:
    """Returns the threads that share some work: one up to `few`, for which a second one costs more than it saves.

    Args:
        work: operations.
        few: of these.
        parts: the most threads that can share it, or None where each operation is a part.
    """
    threads = num_threads() if work > few else 1
    return threads if parts is None else min(threads, max(parts, 1))


@contextlib.contextmanager
def threads_for_kernels() -> Iterator[None]:
    """In it torch's own operations take one thread, and kernels as many as torch has outside.

    For programs whose work is in kernels. After an operation the threads of torch (OpenMP) watch for further work for
    milliseconds, on the very processors that the threads of kernels need: an addition could make the product after it
    slower on two threads than on one.

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
