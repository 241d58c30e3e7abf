"""Python's collector of cycles, kept out of steps: it would run in the middle of them, at times over the whole heap.

While a step runs nothing is collected; what is allocated is counted on, so the collector comes at the first allocation
after the step, once, and in its own order of generations. So garbage does not grow from step to step. Within a step it
is bounded: where one action of the schedule ends and another begins, `catch_up` collects what is young, if it is much.
"""

import contextlib
import gc
import threading
from collections.abc import Iterator

# Objects that may wait to be looked at within a step.
MOST = 50_000


class _Paused:
    """By which thread's step the collector is paused; None if by none. The program itself may have stopped it, too."""

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
    """Inside a step, the collector runs as it would outside: for what takes long and makes much, such as a capture."""
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
    """Collects what is young, if it is more than `MOST` objects that a step has kept from the collector."""
    if _Paused.by == threading.get_ident() and gc.get_count()[0] > MOST:
        gc.collect(1)
