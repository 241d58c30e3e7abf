"""Errors for keywords and attributes that do not exist, with the remedy."""

import functools
import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from ._texts import a_kind, did_you_mean

A = ParamSpec("A")
R = TypeVar("R")
C = TypeVar("C")


def explains_keywords(**meant: str) -> Callable[[Callable[A, R]], Callable[A, R]]:
    """Refuses keywords that a function does not have, by name and with a remedy, and too many positional arguments.

    Args:
        **meant: keyword that users try -> the remedy, with `name` and `value` for `str.format`. For other keywords the
            error names the function's nearest keyword, or gives `otherwise`.

    Example:
        >>> @explains_keywords(lr="learning_rate={value!r}")
        ... def rule(learning_rate): ...
        >>> rule(lr=0.1)
        Traceback (most recent call last):
            ...
        TypeError: rule(lr=0.1): there is no argument 'lr'. Write learning_rate=0.1.
    """

    def wrap_function(f: Callable[A, R]) -> Callable[A, R]:
        who, method = _name_of(f)
        kinds = {p.name: p.kind for p in inspect.signature(f).parameters.values()}
        known = [name for name, kind in kinds.items() if kind in (kind.KEYWORD_ONLY, kind.POSITIONAL_OR_KEYWORD)]
        first = [name for name, kind in kinds.items() if kind is kind.POSITIONAL_OR_KEYWORD]
        most = len(kinds) if any(kind is kind.VAR_POSITIONAL for kind in kinds.values()) else len(first)
        others = any(kind is kind.VAR_KEYWORD for kind in kinds.values())

        @functools.wraps(f)
        def call(*args: A.args, **kwargs: A.kwargs) -> R:
            if len(args) > most and len(known) > most:
                raise TypeError(
                    f"{who} takes {' and '.join(first[method:])} by position and got {len(args) - method} arguments."
                    f" Pass the others by name: {', '.join(f'{name}=' for name in known[most:])}."
                )
            for name, value in kwargs.items():
                if name not in known and (name in meant or not others):
                    raise TypeError(_explain_unknown(who, name, value, known[method:], meant))
            return f(*args, **kwargs)

        return call

    return wrap_function


def explains_fields(**meant: str) -> Callable[[type[C]], type[C]]:
    """Refuses keywords that a class of fields does not have, as `explains_keywords` does for a function.

    Args:
        **meant: keyword that users try -> the remedy.

    Example:
        >>> import dataclasses
        >>> @explains_fields(lr="learning_rate={value!r}")
        ... @dataclasses.dataclass
        ... class Rule:
        ...     learning_rate: float
        >>> Rule(lr=0.1)
        Traceback (most recent call last):
            ...
        TypeError: Rule(lr=0.1): there is no argument 'lr'. Write learning_rate=0.1.
    """

    def wrap_class(cls: type[C]) -> type[C]:
        made = "__new__" if issubclass(cls, tuple) else "__init__"
        setattr(cls, made, explains_keywords(**meant)(getattr(cls, made)))
        return cls

    return wrap_class


def _name_of(f: Callable[..., Any]) -> tuple[str, bool]:
    """Returns the name of a function as a user calls it, and whether its first argument is passed by Python."""
    name = f.__qualname__.rpartition("<locals>.")[2]
    called = name.removesuffix(".__init__").removesuffix(".__new__")
    return called, called != name


def explains_attributes(**meant: str) -> Callable[[type[C]], type[C]]:
    """Names the remedy where a user calls a method that exists in other libraries.

    Args:
        **meant: attribute that users try -> the remedy.

    Example:
        >>> @explains_attributes(zero_grad="Leave it out.")
        ... class Rule: ...
        >>> Rule().zero_grad()
        Traceback (most recent call last):
            ...
        AttributeError: 'Rule' object has no attribute 'zero_grad'. Leave it out.
    """

    def explain_missing(self: Any, name: str) -> Any:
        text = f"{type(self).__name__!r} object has no attribute {name!r}"
        raise AttributeError(f"{text}. {meant[name]}" if name in meant else text, name=name, obj=self)

    def add_getattr(cls: type[C]) -> type[C]:
        # By setattr: in a class with a `__getattr__`, a type checker accepts any attribute.
        setattr(cls, "__getattr__", explain_missing)  # noqa: B010
        return cls

    return add_getattr


def explains_extra(call: str, remedy: str) -> Callable[[Callable[A, R]], Callable[A, R]]:
    """Refuses more arguments than a method takes.

    Args:
        call: how to write the call.
        remedy: the right place for the additional arguments.

    Example:
        >>> class Step:
        ...     @explains_extra("step(state, batch)", "Pass a key to sharded_step.")
        ...     def __call__(self, state, batch): ...
        >>> Step()(1, 2, 3)
        Traceback (most recent call last):
            ...
        TypeError: step(state, batch) got 1 argument more: an int. Pass a key to sharded_step.
    """

    def wrap_function(f: Callable[A, R]) -> Callable[A, R]:
        names = list(inspect.signature(f).parameters)

        @functools.wraps(f)
        def checked(*args: A.args, **kwargs: A.kwargs) -> R:
            if len(args) > len(names) or not kwargs.keys() <= set(names):
                extra = [a_kind(x) for x in args[len(names) :]] + [f"{name}=" for name in kwargs if name not in names]
                more = "1 argument" if len(extra) == 1 else f"{len(extra)} arguments"
                raise TypeError(f"{call} got {more} more: {', '.join(extra)}. {remedy}")
            return f(*args, **kwargs)

        return checked

    return wrap_function


def _explain_unknown(who: str, name: str, value: object, known: list[str], meant: dict[str, str]) -> str:
    hint = did_you_mean(name, known)
    write = meant.get(name) or ("" if hint else meant.get("otherwise", ""))
    if write:
        hint = f" Write {write.format(name=name, value=value)}."
    return f"{who}({name}={value!r}): there is no argument {name!r}.{hint or ' It takes ' + ', '.join(known) + '.'}"
