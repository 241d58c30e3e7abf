"""Modes of a thread: evaluation, ops that run one by one, and traces that run for a single thread at a time."""

import threading
from contextlib import AbstractContextManager

from ._ambient import Ambient

_LOCK = threading.RLock()


def serialize_tracing() -> AbstractContextManager[object]:
    """Makes other threads wait with traces and compiles while the context is open: torch replaces functions then.

    Nothing inside may wait for other ranks: their threads may trace in another order, which would deadlock.

    Example:
        >>> with serialize_tracing(), serialize_tracing():
        ...     pass
    """
    return _LOCK


_EVALUATION = Ambient[None]("evaluation", by_thread=True)


def evaluating() -> AbstractContextManager[None]:
    """Runs functions of modules in eval mode, and dropout as the identity, while the context is open.

    Example:
        >>> with evaluating():
        ...     is_evaluating()
        True
        >>> is_evaluating()
        False
    """
    return _EVALUATION.bound(None)


def is_evaluating() -> bool:
    """Returns whether this thread is inside of `evaluating`."""
    return bool(_EVALUATION)


_OP_BY_OP = Ambient[None]("ops that run one by one", by_thread=True)


def op_by_op() -> AbstractContextManager[None]:
    """Makes ops of a capture run one by one in the graph, with the bits of the eager call.

    A compiler's functions round in another way, for example the cosine differs from torch's in the last bit. Only
    regions of many elements are compiled, so a row would depend on the number of other rows, and would not be
    batch-invariant.

    Example:
        >>> with op_by_op():
        ...     runs_op_by_op()
        True
    """
    return _OP_BY_OP.bound(None)


def runs_op_by_op() -> bool:
    """Returns whether `op_by_op()` is open on this thread.

    Example:
        >>> runs_op_by_op()
        False
    """
    return bool(_OP_BY_OP)
