"""Parts of a module's forward that run again in the backward, with the parameters and the draws of the forward.

`torch.utils.checkpoint` calls its function a second time when the call of the module is over and its own weights are
back. Whoever calls `checkpoint`, and however they have bound it, it looks up two names of its file when it runs: these
are what is replaced while a module runs, for the thread that runs it.
"""

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Protocol, runtime_checkable

import torch
import torch.utils.checkpoint as torch_checkpoint
from torch import nn

from shardfn.core import Ambient
from shardfn.nn import as_now

_GENERATOR = "_checkpoint_without_reentrant_generator"
_CALLS = Ambient["Running"]("calls of modules", by_thread=True)
_LOCK = threading.Lock()
_PATCHED: list[Callable[[], None]] = []
# Names of torch are replaced while this is above 0, for all threads; each looks for calls of its own, `_CALLS`.
_num_running = 0


@runtime_checkable
class Running(Protocol):
    """A call of a module that is under way."""

    def again(self, f: Callable[..., Any]) -> Callable[..., Any]:
        """`f` as it is to be run again: as from here."""
        ...

    def converted(self, sub: nn.Module, convert: Callable[[Any], Any]) -> bool:
        """Whether `sub` is a part of the module, which `convert` leaves as it is."""
        ...

    def path_of(self, sub: nn.Module) -> str | None:
        """Where in the module `sub` is; None if it is no part of it."""
        ...


@contextlib.contextmanager
def running_module(run: Running) -> Iterator[None]:
    """Lets what is recomputed later run as a part of `run`. Calls nest: the innermost is entered last."""
    with _CALLS.bound(run):
        try:
            _patch()
            yield
        finally:
            _unpatch()


def _patch() -> None:
    global _num_running
    with _LOCK:
        _num_running += 1
        if _num_running > 1:
            return
        # Another file of torch has a name of its own for the generator.
        other = sys.modules.get("torch.distributed._composable.checkpoint_activation")
        for where in (torch_checkpoint, other) if other else (torch_checkpoint,):
            _replace(where, _GENERATOR, _generator(getattr(where, _GENERATOR)))
        _replace(torch_checkpoint, "CheckpointFunction", _reentrant(torch_checkpoint.CheckpointFunction))
        _replace(nn.Module, "_apply", _conversion(nn.Module._apply))
        _replace(torch.autograd.Function, "apply", _application(vars(torch.autograd.Function)["apply"]))


def _unpatch() -> None:
    global _num_running
    with _LOCK:
        _num_running -= 1
        while not _num_running and _PATCHED:
            # The last first, so that each finds what it has replaced.
            _PATCHED.pop()()


def _replace(where: Any, name: str, new: Any) -> None:
    old = vars(where)[name]  # a class method itself, not bound to the class
    _PATCHED.append(functools.partial(setattr, where, name, old))
    setattr(where, name, new)


@functools.cache
def _generator(original: Callable[..., Any]) -> Callable[..., Any]:
    """What drives a checkpoint that is not reentrant: it is given the function to run again."""

    @functools.wraps(original)
    def generator(f: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        # The innermost first: it wraps `f`, and those around wrap that, as in the forward.
        for run in reversed(_CALLS.all):
            f = run.again(f)
        return original(_within(as_now(), f), *args, **kwargs)

    return generator


def _within(context: Callable[[], AbstractContextManager[Any]], f: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        with context():
            return f(*args, **kwargs)

    return run


@functools.cache
def _reentrant(original: Any) -> Any:
    """Runs what asks for the reentrant kind by the other, which means the same.

    The reentrant kind adds gradients to the `.grad` of leaves, past the step, and drops those of the function's
    parameters where none of its arguments needs a gradient.
    """

    class CheckpointFunction(original):
        @classmethod
        def apply(cls, f: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
            # Another thread, with no module of ours.
            if not _CALLS:
                return original.apply(f, preserve_rng_state, *args)
            options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": preserve_rng_state}
            return torch_checkpoint.checkpoint(f, *args, **options)

    return CheckpointFunction


@functools.cache
def _conversion(original: Callable[..., Any]) -> Callable[..., Any]:
    """`nn.Module.to` and its kin: inside a forward they may ask for what there is, and change nothing."""

    @functools.wraps(original)
    def _apply(self: nn.Module, fn: Callable[[Any], Any], recurse: bool = True) -> Any:
        if any(run.converted(self, fn) for run in reversed(_CALLS.all)):
            return self
        return original(self, fn, recurse)

    return _apply


@functools.cache
def _application(original: Any) -> Any:
    """`autograd.Function.apply` that refuses parts of the module: its backward would run them with their own weights.

    Nothing tells it from here which call of the module it belongs to, so that they could not be put in their place.
    """

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        for sub in _modules_in((args, kwargs)):
            path = next((path for run in reversed(_CALLS.all) if (path := run.path_of(sub)) is not None), None)
            if path is not None and any(True for _ in sub.parameters()):
                raise ValueError(
                    f"the forward of the module gives its part {path or 'itself'!r} to an autograd.Function"
                    f" ({cls.__name__}), whose backward would run it with the weights that the module was made with."
                    " Pass the Function tensors only; or call that part as it is, under torch.utils.checkpoint if what"
                    " it keeps takes too much memory."
                )
        return original.__func__(cls, *args, **kwargs)

    return classmethod(apply)


def _modules_in(value: Any) -> Iterator[nn.Module]:
    """The modules in arguments: themselves, in containers, and behind methods and partial functions."""
    if isinstance(value, nn.Module):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _modules_in(item)
    elif isinstance(value, dict):
        yield from _modules_in(list(value.values()))
    elif isinstance(value, functools.partial):
        yield from _modules_in((value.func, value.args, value.keywords))
    elif isinstance(owner := getattr(value, "__self__", None), nn.Module):
        yield owner
