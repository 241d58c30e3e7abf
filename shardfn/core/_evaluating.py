"""The mode of a forward: `step.evaluate` runs modules in eval mode and leaves dropout out."""

from contextlib import AbstractContextManager

from ._ambient import Ambient

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
