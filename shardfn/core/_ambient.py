"""`Ambient`: values bound while a block of code runs, which code further down reads. No other ambient state exists.

The arguments of a transformed function belong to its user. So a transform binds its information for primitives, layers
and transfers here, for as long as it runs.
"""

import contextlib
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Generic, TypeVar

T = TypeVar("T")


class _Stack(Generic[T]):
    def __init__(self) -> None:
        self.values: list[T] = []


class _StackByThread(threading.local, _Stack[T]):
    pass


class _Bound(Generic[T]):
    """No generator: steps enter several for each leaf."""

    __slots__ = ("_stack", "_value")

    def __init__(self, stack: _Stack[T], value: T) -> None:
        self._stack, self._value = stack, value

    def __enter__(self) -> T:
        self._stack.values.append(self._value)
        return self._value

    def __exit__(self, *failure: object) -> None:
        # By identity, the last first: values may be equal, and blocks on other threads end when they like.
        values = self._stack.values
        at = len(values) - 1
        while values[at] is not self._value:
            at -= 1
        del values[at]


class Ambient(Generic[T]):
    """A value that may be bound while a block runs. Bindings nest.

    By default all threads see it, since autograd runs backward functions on threads of its own, and transfers report
    from theirs. A block on one thread may end while a later one on another is open: each takes its own value away.

    Args:
        name: the value's name, different from all others (`ambient_names`).
        by_thread: only the thread that binds it sees it.

    Raises:
        ValueError: there is one of that name.

    Example:
        >>> mood = Ambient[str]("mood of an example")
        >>> with mood.bound("calm"), mood.bound("lively"):
        ...     mood.innermost(), mood.all
        ('lively', ('calm', 'lively'))
        >>> mood.innermost() is None
        True
    """

    def __init__(self, name: str, *, by_thread: bool = False) -> None:
        if name in _NAMES:
            raise ValueError(f"there is an ambient value {name!r} already; give this one another name.")
        _NAMES.append(name)
        self.name = name
        self._stack: _Stack[T] = _StackByThread() if by_thread else _Stack()

    def __bool__(self) -> bool:
        return bool(self._stack.values)

    @property
    def all(self) -> tuple[T, ...]:
        """The bound values, the innermost last."""
        return tuple(self._stack.values)

    def innermost(self) -> T | None:
        """The value bound last; None without one."""
        values = self._stack.values
        return values[-1] if values else None

    def bound(self, value: T) -> AbstractContextManager[T]:
        """Binds `value` while the context is open, which may be entered more than once."""
        return _Bound(self._stack, value)

    @contextlib.contextmanager
    def hidden(self) -> Iterator[None]:
        """Hides all bindings while the context is open, except those made inside."""
        stack = self._stack
        before, stack.values = stack.values, []
        try:
            yield
        finally:
            stack.values = before


_NAMES: list[str] = []


def ambient_names() -> tuple[str, ...]:
    """The names of all ambient values, in the order of their definitions.

    Example:
        >>> "mesh" in ambient_names()
        True
    """
    return tuple(_NAMES)
