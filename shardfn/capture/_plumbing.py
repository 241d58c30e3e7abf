"""Operations that are the engine's own, and no part of the function that is transformed."""

from contextlib import AbstractContextManager

from shardfn.core import Ambient

# By thread: what another one runs meanwhile may be the function's own.
_PLUMBING = Ambient[None]("the engine is at work", by_thread=True)
_AT_WORK = _PLUMBING.bound(None)


def plumbing() -> AbstractContextManager[None]:
    """Says that the operations inside are the engine's: transfers of a leaf, which come and go as they must.

    Example:
        >>> with plumbing():
        ...     in_plumbing()
        True
        >>> in_plumbing()
        False
    """
    return _AT_WORK


def in_plumbing() -> bool:
    """Whether the engine is at work."""
    return bool(_PLUMBING)
