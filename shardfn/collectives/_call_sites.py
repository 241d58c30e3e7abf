"""Notes, in a capture, the line of the user's code that calls a collective, and the collective of an op.

A forward collective runs under the user's frame. The transpose runs in the backward, where the frame is gone. So a
primitive notes the line when applied, and the transpose is recorded under the same line.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

from shardfn.core import Ambient


class Applied(NamedTuple):
    """Application of a primitive. Ops of a graph are part of an application.

    Attributes:
        name: name of the primitive.
        axes: axes of the primitive, in the mesh's order.
        number: number of the application.
        transposes: the number of the transposed application, or 0 for an application of the program itself.
    """

    name: str
    axes: tuple[str, ...]
    number: int
    transposes: int


_FINDER = Ambient[Callable[[], str | None]]("finds the line of the user's code")
_FIXED = Ambient[tuple[str | None]]("the line of the user's code")
_APPLIED = Ambient[Applied]("application of a collective")


def record_call_sites(find: Callable[[], str | None]) -> AbstractContextManager[Any]:
    """Makes `find` the source of `current_call_site`."""
    return _FINDER.bound(find)


def set_call_site(line: str | None) -> AbstractContextManager[Any]:
    """Makes `line` the current line."""
    return _FIXED.bound((line,))


def current_call_site() -> str | None:
    """Returns the current line of the user's code, or None if lines are not recorded."""
    find, fixed = _FINDER.innermost(), _FIXED.innermost()
    return None if find is None else fixed[0] if fixed else find()


def recording() -> bool:
    """Returns whether a program is being captured."""
    return bool(_FINDER)


def applying(applied: Applied) -> AbstractContextManager[Any]:
    """Makes ops that are recorded in the context part of an application."""
    return _APPLIED.bound(applied)


def current_application() -> Applied | None:
    """Returns the application that is being recorded, if any."""
    return _APPLIED.innermost()
