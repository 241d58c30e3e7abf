"""Parts of a module's forward that run again in the backward, with the parameters and the draws of the forward.

Activation checkpointing by `torch.utils.checkpoint` calls a function a second time after the module's call has ended
and the module's weights are back. The function then runs as a part of the call again. Other code with a use of the
weights after the call is refused.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from shardfn._torch import unbound
from shardfn.core import Again, Ambient, Replaced, rebind_ambient, rebind_in_checkpoints

from ._call import ModuleCall, ModuleRun, Replacement

_CALLS = Ambient[ModuleCall]("calls of modules", by_thread=True)


class Recomputation(Replacement):
    """Lets checkpointed functions run later as parts of the call. Calls nest: the innermost is entered last."""

    order = 30

    @contextlib.contextmanager
    def running(self, run: ModuleRun) -> Iterator[None]:
        """Binds the call while open."""
        # Names of torch are replaced for all threads; each thread looks in `_CALLS` for the thread's calls.
        with _CALLS.bound(run.call), rebind_in_checkpoints(), _REFUSALS:
            yield


@rebind_ambient
def _enter_same_calls() -> list[Again]:
    return [run.again() for run in _CALLS.all]


@functools.cache
def _wrap_conversion(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `nn.Module.to` and similar: a forward may only ask for the present dtype and device."""

    @functools.wraps(original)
    def _apply_conversion(self: nn.Module, fn: Callable[[Any], Any], recurse: bool = True) -> Any:
        if any(run.converted(self, fn) for run in reversed(_CALLS.all)):
            return self
        return original(self, fn, recurse)

    return _apply_conversion


@functools.cache
def _wrap_application(original: Any) -> Any:
    """Wraps `autograd.Function.apply` to refuse parts of the module among the arguments.

    The backward cannot find the call of the module, and would run the parts with the module's weights.
    """

    def apply_function(cls: Any, *args: Any, **kwargs: Any) -> Any:
        for sub in _modules_in((args, kwargs)):
            path = next((path for run in reversed(_CALLS.all) if (path := run.path_of(sub)) is not None), None)
            if path is not None and any(True for _ in sub.parameters()):
                raise ValueError(
                    f"the forward of the module gives its part {path or 'itself'!r} to an autograd.Function"
                    f" ({cls.__name__}). The backward would use the weights that the module was created with."
                    " Pass only tensors to the Function. Or call the part itself, under torch.utils.checkpoint if the"
                    " saved tensors take too much memory."
                )
        return unbound(original)(cls, *args, **kwargs)

    return classmethod(apply_function)


_REFUSALS = Replaced(
    lambda: [(nn.Module, "_apply", _wrap_conversion), (torch.autograd.Function, "apply", _wrap_application)]
)


def _modules_in(value: Any) -> Iterator[nn.Module]:
    """Yields the modules in arguments: directly, in containers, and behind methods and partial functions."""
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
