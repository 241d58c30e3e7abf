"""Keeps Python's garbage collector out of steps, in which it would run at any time, at times over the whole heap.

While a step runs the collector is off, but allocations are counted. So the collector runs once at the first allocation
after the step, with the generation that is due, and garbage does not grow from step to step. Within a step it is
bounded: between two actions of the schedule `catch_up` collects young objects if there are many.
"""

import contextlib
import gc
import threading
from collections.abc import Iterator

from shardfn.core import Ambient

# Objects that may wait to be looked at within a step.
MOST = 50_000


_PAUSED = Ambient[None]("the garbage collector is paused", by_thread=True)


class _Steps:
    """The number of threads whose steps have paused the collector. The user may have stopped it before the first."""

    lock = threading.Lock()
    count = 0


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """The collector does not run while the context is open. If the program has stopped it itself, nothing changes.

    It is the process's: other threads' garbage waits, too, and it runs again when the last thread's step is over.

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
    """Pauses it for this thread, unless this thread has or the user has stopped it; whether it did so."""
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

    It stays paused while a step of another thread runs.
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
