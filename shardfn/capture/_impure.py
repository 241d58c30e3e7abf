"""Side effects that a capture refuses or undoes: draws of random numbers, and tensors left in caches.

The Python of a function runs at its capture alone. A number that is drawn there, and not by an operation of the graph,
would be the same in every step, and a tensor put into a cache would have no data.
"""

import contextlib
import functools
import gc
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from shardfn._torch import FakeTensor
from shardfn.core import tree_leaves

from ._fakes import Fakes

_CACHE: Any = type(functools.lru_cache(len))


class Drawn(Exception):
    """A function draws numbers; has the generator's name and, where it is known, the line."""


@contextlib.contextmanager
def drawing_nothing(line: Callable[[], str | None]) -> Iterator[None]:
    """Refuses draws from Python's and numpy's generators meanwhile, and restores a generator that has advanced.

    Args:
        line: gives the user's line that is running.

    Raises:
        Drawn: something is drawn.
    """
    before = [(name, get(), put) for name, get, put in _generators()]
    with _refused(random, getattr(random, "_inst"), line), _refused(*_of_numpy(), line):  # noqa: B009  # is private
        yield
    now = [get() for _, get, _ in _generators()]
    # One that was imported meanwhile is not in `before`: there is no state to put back.
    moved = [(name, put, old) for (name, old, put), new in zip(before, now, strict=False) if not _same(old, new)]
    for _, put, old in moved:
        put(old)
    if moved:
        raise Drawn(" and ".join(name for name, _, _ in moved))


@contextlib.contextmanager
def _refused(module: Any, generator: Any, line: Callable[[], str | None]) -> Iterator[None]:
    """Makes a module's functions that draw from its own generator errors."""
    # Methods of the module's one generator. A generator of the user's own is no global state, and passes.
    found = {name: f for name, f in vars(module).items() if getattr(f, "__self__", None) is generator} if module else {}

    def refusing(name: str) -> Any:
        def refuse(*args: Any, **kwargs: Any) -> Any:
            del args, kwargs
            raise Drawn(f"{module.__name__}.{name}", line())

        return refuse

    for name in found:
        # Setting or reading the state draws nothing. The check around does it, too.
        if "state" not in name:
            setattr(module, name, refusing(name))
    try:
        yield
    finally:
        for name, f in found.items():
            setattr(module, name, f)


def _of_numpy() -> tuple[Any, Any]:
    module: Any = sys.modules.get("numpy.random")
    return module, None if module is None else module.mtrand._rand


def forget_cached() -> None:
    """Empties every `functools.lru_cache` that holds a tensor without data, so that later calls make real ones."""
    for x in gc.get_objects():
        if type(x) is _CACHE and any(_is_fake(t) for t in tree_leaves(gc.get_referents(x))):
            x.cache_clear()


def _is_fake(x: Any) -> bool:
    return isinstance(x, FakeTensor) and isinstance(x.fake_mode, Fakes)


def _generators() -> list[tuple[str, Callable[[], Any], Callable[[Any], None]]]:
    out: list[Any] = [("torch's generator", torch.get_rng_state, torch.set_rng_state)]
    if "beartype" not in sys.modules:  # which draws from Python's for itself, at any call
        out.append(("Python's random", random.getstate, random.setstate))
    numpy, _ = _of_numpy()
    if numpy is not None:
        out.append(("numpy.random", lambda: numpy.get_state(legacy=False), numpy.set_state))
    return out


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, tuple):
        return a == b
    # Drawing all numbers of a key returns the position to its old value, but then the key is another.
    return a["state"]["pos"] == b["state"]["pos"] and bool((a["state"]["key"] == b["state"]["key"]).all())
