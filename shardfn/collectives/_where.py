"""Which line of the user's code a collective stands in, and which collective an op is part of, noted in a capture.

A forward collective runs under the user's frame; its transpose runs in the backward, where that frame is gone, so a
primitive notes its line when it is applied and its transpose is recorded under the same one.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import NamedTuple


class Applied(NamedTuple):
    """One application of a primitive, of which the ops of a graph are part.

    Attributes:
        name: of the primitive.
        axes: along which it is applied, in the mesh's order.
        number: tells applications apart.
        transposes: the number of the application of which it is the transpose; 0 for one of the program's own.
    """

    name: str
    axes: tuple[str, ...]
    number: int
    transposes: int


_FINDERS: list[Callable[[], str | None]] = []
_FIXED: list[str | None] = []
_APPLIED: list[Applied] = []


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


def recording() -> bool:
    """Whether a program is being captured."""
    return bool(_FINDERS)


@contextlib.contextmanager
def applying(applied: Applied) -> Iterator[None]:
    """Makes what is recorded meanwhile part of an application."""
    _APPLIED.append(applied)
    try:
        yield
    finally:
        _APPLIED.pop()


def current_application() -> Applied | None:
    """The application that is being recorded, if any."""
    return _APPLIED[-1] if _APPLIED else None
