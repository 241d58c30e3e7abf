"""Errors of torch's transforms in other words."""

import contextlib
from collections.abc import Iterator, Sequence


@contextlib.contextmanager
def in_other_words(parts: Sequence[str], message: str) -> Iterator[None]:
    """Turns a RuntimeError with one of some parts in the text into a ValueError with a message.

    Example:
        >>> with in_other_words(["saved tensor hooks"], "leave out the checkpoint."):
        ...     raise RuntimeError("torch.func does not support saved tensor hooks")
        Traceback (most recent call last):
        ValueError: leave out the checkpoint.
    """
    try:
        yield
    except RuntimeError as error:
        if not any(part in str(error) for part in parts):
            raise
        raise ValueError(message) from error
