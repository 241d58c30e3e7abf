"""What is said of a keyword that a function does not have: which one is meant, or where else it is said."""

import functools
import inspect
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from ._errors import did_you_mean

A = ParamSpec("A")
R = TypeVar("R")


def explains_keywords(**meant: str) -> Callable[[Callable[A, R]], Callable[A, R]]:
    """Refuses keywords that a function does not have, by name and with a remedy.

    Args:
        **meant: of keywords that users try: what to write, which `str.format` fills with `name` and `value`. Of a
            keyword that is not among them the nearest of the function's own is named; `otherwise`, where there is none.

    Example:
        >>> @explains_keywords(lr="learning_rate={value!r}")
        ... def rule(learning_rate): ...
        >>> rule(lr=0.1)
        Traceback (most recent call last):
            ...
        TypeError: rule(lr=0.1): there is no argument 'lr'. Write learning_rate=0.1.
    """

    def decorate(f: Callable[A, R]) -> Callable[A, R]:
        known = [
            p.name
            for p in inspect.signature(f).parameters.values()
            if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)
        ]

        @functools.wraps(f)
        def call(*args: A.args, **kwargs: A.kwargs) -> R:
            for name, value in kwargs.items():
                if name not in known:
                    raise TypeError(_unknown(f.__name__, name, value, known, meant))
            return f(*args, **kwargs)

        return call

    return decorate


def _unknown(who: str, name: str, value: object, known: list[str], meant: dict[str, str]) -> str:
    hint = did_you_mean(name, known)
    write = meant.get(name) or ("" if hint else meant.get("otherwise", ""))
    if write:
        hint = f" Write {write.format(name=name, value=value)}."
    return f"{who}({name}={value!r}): there is no argument {name!r}.{hint or ' It takes ' + ', '.join(known) + '.'}"
