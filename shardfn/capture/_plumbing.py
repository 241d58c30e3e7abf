"""Operations that are the engine's own, and no part of the function that is transformed."""

import contextlib
import threading
from collections.abc import Iterator

_HERE = threading.local()


@contextlib.contextmanager
def plumbing() -> Iterator[None]:
    """Says that the operations inside are the engine's: transfers of a leaf, which come and go as they must.

    Example:
        >>> with plumbing():
        ...     in_plumbing()
        True
        >>> in_plumbing()
        False
    """
    before = in_plumbing()
    _HERE.on = True
    try:
        yield
    finally:
        _HERE.on = before


def in_plumbing() -> bool:
    """Whether the engine is at work."""
    return getattr(_HERE, "on", False)
