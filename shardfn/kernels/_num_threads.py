"""Number of threads that share a kernel's work: torch's number, also where torch's operations take a single thread."""

import contextlib
import threading
from collections.abc import Iterator

import torch


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
