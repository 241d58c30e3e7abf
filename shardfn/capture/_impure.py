"""Side effects that a capture refuses or undoes: draws of random numbers, and tensors left in caches.

The Python of a function runs only at the capture. A number drawn in Python, and not by an operation of the graph, would
be the same in every step. A tensor put into a cache would have no data.
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
    """Error for a function that draws numbers, with the name of the generator and, if known, the line."""


@contextlib.contextmanager
def drawing_nothing(line: Callable[[], str | None]) -> Iterator[None]:
    """Refuses draws from Python's and numpy's generators in the body, and restores a generator that has advanced.

    Args:
        line: function that returns the user's line that is running.

    Raises:
        Drawn: something is drawn.
    """
    before = [(name, get(), put) for name, get, put in _list_generators()]
    with _refuse_draws(random, getattr(random, "_inst"), line), _refuse_draws(*_numpy_generator(), line):  # noqa: B009  # is private
        yield
    now = [get() for _, get, _ in _list_generators()]
    # A generator imported during the body is not in `before`, so there is no state to put back.
    moved = [(name, put, old) for (name, old, put), new in zip(before, now, strict=False) if not _is_same(old, new)]
    for _, put, old in moved:
        put(old)
    if moved:
        raise Drawn(" and ".join(name for name, _, _ in moved))


@contextlib.contextmanager
def _refuse_draws(module: Any, generator: Any, line: Callable[[], str | None]) -> Iterator[None]:
    """Makes those functions of a module raise that draw from the module's generator."""
    # Methods of the module's global generator. A generator that the user made is no global state, and passes.
    found = {name: f for name, f in vars(module).items() if getattr(f, "__self__", None) is generator} if module else {}

    def make_refusal(name: str) -> Any:
        def raise_refusal(*args: Any, **kwargs: Any) -> Any:
            del args, kwargs
            raise Drawn(f"{module.__name__}.{name}", line())

        return raise_refusal

    for name in found:
        # To set or read the state draws nothing. The check around the body does both, too.
        if "state" not in name:
            setattr(module, name, make_refusal(name))
    try:
        yield
    finally:
        for name, f in found.items():
            setattr(module, name, f)


def _numpy_generator() -> tuple[Any, Any]:
    module: Any = sys.modules.get("numpy.random")
    return module, None if module is None else module.mtrand._rand


def forget_cached() -> None:
    """Empties every `functools.lru_cache` that holds a tensor without data, so that later calls make real tensors."""
    for x in gc.get_objects():
        if type(x) is _CACHE and any(_is_fake(t) for t in tree_leaves(gc.get_referents(x))):
            x.cache_clear()


def _is_fake(x: Any) -> bool:
    return isinstance(x, FakeTensor) and isinstance(x.fake_mode, Fakes)


def _list_generators() -> list[tuple[str, Callable[[], Any], Callable[[Any], None]]]:
    out: list[Any] = [("torch's generator", torch.get_rng_state, torch.set_rng_state)]
    if "beartype" not in sys.modules:  # beartype draws from Python's generator at any call
        out.append(("Python's random", random.getstate, random.setstate))
    numpy, _ = _numpy_generator()
    if numpy is not None:
        out.append(("numpy.random", lambda: numpy.get_state(legacy=False), numpy.set_state))
    return out


def _is_same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, tuple):
        return a == b
    # To draw all numbers of a key returns the position to the old value, but with another key.
    return a["state"]["pos"] == b["state"]["pos"] and bool((a["state"]["key"] == b["state"]["key"]).all())
