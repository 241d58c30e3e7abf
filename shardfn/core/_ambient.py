"""Ambient values: values that a block of code binds for the functions it calls, and modes of a thread.

The arguments of a transformed function belong to the user. So a transform binds information for primitives, layers and
transfers here, for the time of the run.

Ambient values belong to a program. Every thread has a separate program, except threads that work for another thread:
threads that shardfn starts (`adopting`), and autograd's threads, which run a backward for the calling thread. torch
hands autograd's threads the objects that the caller has stashed, such as `_STASH`.
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
    """Owner of ambient values: a thread, and the threads that work for the thread."""

    __slots__ = ("_made",)

    def __init__(self) -> None:
        self._made: dict[str, Any] = {}

    def own(self, name: str, make: Callable[[], T]) -> T:
        """Returns the program-wide value with a name. Calls `make` at the first use."""
        value = self._made.get(name)
        return self._made.setdefault(name, make()) if value is None else value

    def put(self, name: str, value: Any) -> None:
        """Replaces the program's value of a name."""
        self._made[name] = value


class _Here(threading.local):
    """Program of this thread, or None before the first use, and on the threads of autograd."""

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
    # In a backward: the program of the caller. Without a program of the caller, an object stashed here lasts until the
    # backward ends.
    if not is_stashed(_STASH):
        stash(_STASH, Program())
    return stashed(_STASH)


@contextlib.contextmanager
def adopted(program: Program) -> Iterator[None]:
    """Makes this thread work for `program` while the context is open.

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
    """Returns `f` for another thread, which then works for the program of the thread that calls `adopting`.

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
    """Value that every program has separately.

    Args:
        name: name, different from all other names and ambient values.
        make: function that makes the value.

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
    """Cache of the list of this thread's program, since a look at the program takes longer than the rest of a read.

    Threads of autograd work for one program after the other, and cache no list: there `values` is absent, and `find`
    has the list.
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
        """Replaces the list of bound values."""
        this_program().put(self._name, values)
        self.forget()

    def forget(self) -> None:
        """Forgets the list: this thread has another list from now on."""
        self.__dict__.pop("values", None)


class _StackOfThread(threading.local):
    def __init__(self) -> None:
        self.values: list[Any] = []

    def find(self) -> list[Any]:
        """Returns the list of this thread."""
        return self.values

    def put(self, values: list[Any]) -> None:
        """Replaces the list of bound values."""
        self.values = values


_STACKS: list[_StackOfProgram] = []


class _Bound(Generic[T]):
    """Context of a bound value. Not a generator: steps enter several contexts for each leaf."""

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
        # By identity, the last first: values may be equal, and blocks on other threads end at any time.
        at = len(values) - 1
        while values[at] is not value:
            at -= 1
        del values[at]


class Ambient(Generic[T]):
    """Value that may be bound while a block runs. Bindings nest.

    By default only the threads of a program see the value: autograd runs backward functions on separate threads, and
    transfers report from separate threads. A block on one thread may end while a later block on another is open: each
    block takes only its value away.

    Args:
        name: the value's name, different from all other names (`ambient_names`).
        by_thread: whether only the binding thread sees the value, as is right for values of a single call: other
            threads of the program, for example for loading data, make separate calls at the same time.

    Raises:
        ValueError: an ambient value of this name exists.

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
            raise ValueError(f"there is an ambient value {name!r} already. Give this one another name.")
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
        """Returns the value bound last, or None without a value."""
        try:
            values = self._stack.values
        except AttributeError:
            values = self._stack.find()
        return values[-1] if values else None

    def bound(self, value: T) -> AbstractContextManager[T]:
        """Binds `value` while the context is open. A thread may enter the context more than once."""
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


_LOCK = threading.RLock()


def serialize_tracing() -> AbstractContextManager[object]:
    """Excludes traces and compiles in other threads while the context is open, because torch patches functions then.

    Code inside must not wait for other ranks: their threads may trace in another order, which would deadlock.

    Example:
        >>> with serialize_tracing(), serialize_tracing():
        ...     pass
    """
    return _LOCK


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


_OP_BY_OP = Ambient[None]("ops that run one by one", by_thread=True)


def op_by_op() -> AbstractContextManager[None]:
    """Makes ops of a capture run one by one in the graph, with the bits of the eager call.

    A compiler's functions round in another way, for example the cosine differs from torch's in the last bit. Only
    regions of many elements are compiled, so a row would depend on the number of other rows, and would not be
    batch-invariant.

    Example:
        >>> with op_by_op():
        ...     runs_op_by_op()
        True
    """
    return _OP_BY_OP.bound(None)


def runs_op_by_op() -> bool:
    """Returns whether `op_by_op()` is open on this thread.

    Example:
        >>> runs_op_by_op()
        False
    """
    return bool(_OP_BY_OP)
