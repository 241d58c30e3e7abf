"""Keeps Python's garbage collector out of steps, where a collection could run at any time, even over the whole heap.

While a step runs the collector is off, but allocations are counted. So the collector runs once at the first allocation
after the step, with the generation that is due, and garbage does not grow from step to step. Within a step garbage is
bounded: between two actions of the schedule `catch_up` collects young objects if there are many.
"""

import contextlib
import gc
import threading
from collections.abc import Iterator

from shardfn.core import Ambient

# Objects that may wait for a collection within a step.
MOST = 50_000


_PAUSED = Ambient[None]("the garbage collector is paused", by_thread=True)


class _Steps:
    """Number of threads with steps that have paused the collector. The user may have stopped the collector before."""

    lock = threading.Lock()
    count = 0


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Pauses the collector while the context is open. If the program has stopped the collector, nothing changes.

    The collector belongs to the process: other threads' garbage waits, too, until the last thread's step is over.

    Example:
        >>> with uncollected():
        ...     gc.isenabled()
        False
        >>> gc.isenabled()
        True
    """
    if not _pause_collector():
        yield
        return
    try:
        with _PAUSED.bound(None):
            yield
    finally:
        _resume_collector()


def _pause_collector() -> bool:
    """Pauses the collector for this thread, if it runs, and returns whether the call has paused it."""
    if _PAUSED:
        return False
    with _Steps.lock:
        if not gc.isenabled() and not _Steps.count:
            return False
        _Steps.count += 1
        gc.disable()
        return True


def _resume_collector() -> None:
    with _Steps.lock:
        _Steps.count -= 1
        if not _Steps.count:
            gc.enable()


@contextlib.contextmanager
def collected() -> Iterator[None]:
    """Lets the collector run inside a step: for long work that makes many objects, such as a capture.

    The collector stays paused while a step of another thread runs.
    """
    if not _PAUSED:
        yield
        return
    _resume_collector()
    try:
        with _PAUSED.hidden():
            yield
    finally:
        with _Steps.lock:
            _Steps.count += 1
            gc.disable()


def catch_up() -> None:
    """Collects young objects if a step has kept more than `MOST` of them from the collector."""
    if _PAUSED and gc.get_count()[0] > MOST:
        gc.collect(1)
