"""`one_tracing`: torch traces and compiles functions for one thread at a time."""

import threading
from contextlib import AbstractContextManager

_LOCK = threading.RLock()


def one_tracing() -> AbstractContextManager[object]:
    """Other threads that trace or compile wait while the context is open: torch replaces its own functions meanwhile.

    Nothing inside may wait for other ranks, whose threads may trace in another order.

    Example:
        >>> with one_tracing(), one_tracing():
        ...     pass
    """
    return _LOCK
