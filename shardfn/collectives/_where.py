"""Which line of the user's code a collective stands in, noted while a program is captured.

A forward collective runs under the user's frame; its transpose runs in the backward, where that frame is gone, so a
primitive notes its line when it is applied and its transpose is recorded under the same one.
"""

import contextlib
from collections.abc import Callable, Iterator

_FINDERS: list[Callable[[], str | None]] = []
_FIXED: list[str | None] = []


@contextlib.contextmanager
def recording_lines(find: Callable[[], str | None]) -> Iterator[None]:
    """Lets `find` say the current line of the user's code."""
    _FINDERS.append(find)
    try:
        yield
    finally:
        _FINDERS.pop()


@contextlib.contextmanager
def at_line(line: str | None) -> Iterator[None]:
    """Makes `line` the current line."""
    _FIXED.append(line)
    try:
        yield
    finally:
        _FIXED.pop()


def current_line() -> str | None:
    """The current line of the user's code; None where nobody records."""
    if not _FINDERS:
        return None
    return _FIXED[-1] if _FIXED else _FINDERS[-1]()
