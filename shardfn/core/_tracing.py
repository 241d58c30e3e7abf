"""`serialize_tracing`: torch traces and compiles functions for a single thread at a time."""

import threading
from contextlib import AbstractContextManager

_LOCK = threading.RLock()


def serialize_tracing() -> AbstractContextManager[object]:
    """Makes other threads wait with traces and compiles while the context is open: torch replaces functions then.

    Nothing inside may wait for other ranks: their threads may trace in another order, which would deadlock.

    Example:
        >>> with serialize_tracing(), serialize_tracing():
        ...     pass
    """
    return _LOCK
