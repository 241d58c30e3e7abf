"""Keeps Python's garbage collector out of steps, in which it would run at any time, at times over the whole heap.

While a step runs the collector is off, but allocations are counted. So the collector runs once at the first allocation
after the step, with the generation that is due, and garbage does not grow from step to step. Within a step it is
bounded: between two actions of the schedule `catch_up` collects young objects if there are many.
"""

import contextlib
import gc
import threading
from collections.abc import Iterator

# Objects that may wait to be looked at within a step.
MOST = 50_000


class _Paused:
    """The thread whose step has paused the collector; None if no step has. The program may also have stopped it."""

    by: int | None = None


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """The collector does not run while the context is open; if the program has stopped it itself, nothing changes.

    It is the process's: other threads' garbage waits, too.

    Example:
        >>> with uncollected():
        ...     gc.isenabled()
        False
        >>> gc.isenabled()
        True
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    _Paused.by = threading.get_ident()
    try:
        yield
    finally:
        _Paused.by = None
        gc.enable()


@contextlib.contextmanager
def collected() -> Iterator[None]:
    """Lets the collector run inside a step: for long work that makes many objects, such as a capture."""
    if _Paused.by != threading.get_ident():
        yield
        return
    _Paused.by = None
    gc.enable()
    try:
        yield
    finally:
        gc.disable()
        _Paused.by = threading.get_ident()


def catch_up() -> None:
    """Collects young objects if a step has kept more than `MOST` of them from the collector."""
    if _Paused.by == threading.get_ident() and gc.get_count()[0] > MOST:
        gc.collect(1)
