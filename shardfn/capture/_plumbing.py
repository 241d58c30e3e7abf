"""Operations of the engine that are no part of the transformed function."""

from contextlib import AbstractContextManager

from shardfn.core import Ambient

# By thread: another thread may run the function's operations at the same time.
_PLUMBING = Ambient[None]("the engine is at work", by_thread=True)


def plumbing() -> AbstractContextManager[None]:
    """Marks the operations inside as the engine's, such as transfers of a leaf. Such operations differ from run to run.

    Example:
        >>> with plumbing():
        ...     in_plumbing()
        True
        >>> in_plumbing()
        False
    """
    return _PLUMBING.bound(None)


def in_plumbing() -> bool:
    """Returns whether the engine is at work."""
    return bool(_PLUMBING)
