"""`Ambient`: values bound while a block of code runs, which code further down reads. No other ambient state exists.

The arguments of a transformed function belong to its user. So a transform binds its information for primitives, layers
and transfers here, for as long as it runs.

Ambient values belong to a program. Every thread has one of its own, except those that work for another thread: threads
that shardfn starts (`adopting`), and autograd's, which run a backward for the thread that calls it. torch hands them
the objects which that thread has stashed, and `_STASH` is one.
"""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Generic, ParamSpec, TypeVar

from shardfn._torch import current_graph_task, is_stashed, stash, stashed

T = TypeVar("T")
A = ParamSpec("A")
_STASH = "shardfn program"


class Program:
    """The owner of ambient values: a thread, and the threads that work for it."""

    __slots__ = ("_made",)

    def __init__(self) -> None:
        self._made: dict[str, Any] = {}

    def own(self, name: str, make: Callable[[], T]) -> T:
        """Its value of a name, which is made at the first use."""
        value = self._made.get(name)
        return self._made.setdefault(name, make()) if value is None else value

    def put(self, name: str, value: Any) -> None:
        """Replaces its value of a name."""
        self._made[name] = value


class _Here(threading.local):
    """The program of this thread, or None before its first use, and on the threads of autograd."""

    program: Program | None = None


_HERE = _Here()


def this_program() -> Program:
    """Returns the program of this thread.

    Example:
        >>> this_program() is this_program()
        True
    """
    program = _HERE.program
    if program is not None:
        return program
    if current_graph_task() == -1:
        program = _HERE.program = Program()
        stash(_STASH, program)
        return program
    # In a backward: the program of the caller. If it has none, what is stashed here lasts until the backward ends.
    if not is_stashed(_STASH):
        stash(_STASH, Program())
    return stashed(_STASH)


@contextlib.contextmanager
def adopted(program: Program) -> Iterator[None]:
    """This thread works for `program` while the context is open.

    Example:
        >>> program = this_program()
        >>> with adopted(Program()):
        ...     this_program() is program
        False
    """
    before = _HERE.program
    if before is program:
        yield
        return
    own = this_program()
    _move_lists(program, program)
    try:
        yield
    finally:
        _move_lists(before, own)


def _move_lists(program: Program | None, handed_on: Program) -> None:
    _HERE.program = program
    stash(_STASH, handed_on)
    for stack in _STACKS:
        stack.forget()


def adopting(f: Callable[A, T]) -> Callable[A, T]:
    """`f` for another thread to call: there it works for the program of the thread that calls `adopting`.

    Example:
        >>> mood = Ambient[str]("mood of another example")
        >>> with mood.bound("calm"):
        ...     look = threading.Thread(target=adopting(lambda: print(mood.innermost())))
        ...     look.start()
        ...     look.join()
        calm
    """
    program = this_program()

    @functools.wraps(f)
    def run_adopted(*args: A.args, **kwargs: A.kwargs) -> T:
        with adopted(program):
            return f(*args, **kwargs)

    return run_adopted


class OfProgram(Generic[T]):
    """A value that every program has one of.

    Args:
        name: different from those of all others and of all ambient values.
        make: makes it.

    Example:
        >>> numbers = OfProgram("numbers of an example", list)
        >>> numbers.here().append(3)
        >>> numbers.here()
        [3]
    """

    def __init__(self, name: str, make: Callable[[], T]) -> None:
        self._name, self._make = name, make

    def here(self) -> T:
        """Returns the value of this thread's program."""
        return this_program().own(self._name, self._make)


class _StackOfProgram(threading.local):
    """Keeps the list of this thread's program, since a look at the program takes longer than the rest of a read.

    Threads of autograd work for one program after the other, and keep none: there `values` is absent, and `find` has
    the list.
    """

    values: list[Any]

    def __init__(self, name: str) -> None:
        self._name = name
        self.find()

    def find(self) -> list[Any]:
        """Returns the list of this thread's program."""
        values: list[Any] = this_program().own(self._name, list)
        if _HERE.program is not None:
            self.values = values
        return values

    def put(self, values: list[Any]) -> None:
        """Replaces the list."""
        this_program().put(self._name, values)
        self.forget()

    def forget(self) -> None:
        """Another list is this thread's from now on."""
        self.__dict__.pop("values", None)


class _StackOfThread(threading.local):
    def __init__(self) -> None:
        self.values: list[Any] = []

    def find(self) -> list[Any]:
        """Returns the list of this thread."""
        return self.values

    def put(self, values: list[Any]) -> None:
        """Replaces the list."""
        self.values = values


_STACKS: list[_StackOfProgram] = []


class _Bound(Generic[T]):
    """No generator: steps enter several for each leaf."""

    __slots__ = ("_stack", "_value", "_values")

    def __init__(self, stack: _StackOfProgram | _StackOfThread, value: T) -> None:
        self._stack, self._value = stack, value

    def __enter__(self) -> T:
        try:
            values = self._stack.values
        except AttributeError:
            values = self._stack.find()
        self._values, value = values, self._value
        values.append(value)
        return value

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        values, value = self._values, self._value
        if values[-1] is value:
            del values[-1]
            return
        # By identity, the last first: values may be equal, and blocks on other threads end when they like.
        at = len(values) - 1
        while values[at] is not value:
            at -= 1
        del values[at]


class Ambient(Generic[T]):
    """A value that may be bound while a block runs. Bindings nest.

    By default all threads of a program see it, and no others: autograd runs backward functions on threads of its own,
    and transfers report from theirs. A block on one thread may end while a later one on another is open: each takes its
    own value away.

    Args:
        name: the value's name, different from all others (`ambient_names`).
        by_thread: only the thread that binds it sees it, as is right for values that concern one call: other threads of
            the program, which load data or update, make calls of their own meanwhile.

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
        self._stack = _StackOfThread() if by_thread else _StackOfProgram(name)
        if isinstance(self._stack, _StackOfProgram):
            _STACKS.append(self._stack)

    def __bool__(self) -> bool:
        try:
            return bool(self._stack.values)
        except AttributeError:
            return bool(self._stack.find())

    @property
    def all(self) -> tuple[T, ...]:
        """Returns the bound values, the innermost last."""
        return tuple(self._values())

    def innermost(self) -> T | None:
        """Returns the value bound last, or None without one."""
        try:
            values = self._stack.values
        except AttributeError:
            values = self._stack.find()
        return values[-1] if values else None

    def bound(self, value: T) -> AbstractContextManager[T]:
        """Binds `value` while the context is open, which one thread may enter more than once."""
        return _Bound(self._stack, value)

    @contextlib.contextmanager
    def hidden(self) -> Iterator[None]:
        """Hides all bindings while the context is open, except those made inside."""
        before = self._values()
        self._stack.put([])
        try:
            yield
        finally:
            self._stack.put(before)

    def _values(self) -> list[T]:
        try:
            return self._stack.values
        except AttributeError:
            return self._stack.find()


_NAMES: list[str] = []


def ambient_names() -> tuple[str, ...]:
    """Returns the names of all ambient values, in the order of their definitions.

    Example:
        >>> "mesh" in ambient_names()
        True
    """
    return tuple(_NAMES)
