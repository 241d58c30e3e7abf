"""`op_by_op`: ops whose results must have torch's own bits, on every back end."""

from contextlib import AbstractContextManager

from ._ambient import Ambient

_OP_BY_OP = Ambient[None]("ops that run one by one", by_thread=True)


def op_by_op() -> AbstractContextManager[None]:
    """Ops that a capture records while it is open run one by one in its graph, with the bits of the eager call.

    A compiler's functions round in another way: its cosine differs from torch's in the last bit, and only regions of
    many elements are compiled, so that a row would depend on the number of rows beside it.

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
