"""torch's stack of function modes: a mode that begins late, below other modes, and `Function.apply`, past all modes."""

import contextlib
import dataclasses
import functools
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint

from shardfn._torch import DYNAMO, function_modes, num_function_modes, pop_function_mode, push_function_mode, unbound
from shardfn.core import Ambient, Replaced


@dataclasses.dataclass
class LateMode:
    """Mode that begins with the first collective.

    Attributes:
        mode: the mode.
        begun: whether the mode has begun.
        around: context that is closed after the mode.
    """

    mode: TorchFunctionMode
    begun: bool = False
    around: contextlib.ExitStack = dataclasses.field(default_factory=contextlib.ExitStack)


WAITING: Ambient[LateMode] = Ambient("mode that begins with the first collective", by_thread=True)


class NotingMode(TorchFunctionMode):
    """Mode that notes axes.

    Attributes:
        crossed: the axes along which a collective has run, or an index was asked for. A caller clears the set.
    """

    def __init__(self) -> None:
        super().__init__()
        self.crossed: set[str] = set()


def note_crossed(axes: Iterable[str]) -> None:
    """Notes axes in the modes that are open on this thread."""
    for mode in function_modes():
        if isinstance(mode, NotingMode):
            mode.crossed.update(axes)


@contextlib.contextmanager
def function_modes_changed() -> Iterator[list[TorchFunctionMode]]:
    """Yields the stack as a list, and sets the stack to the list at the end."""
    stack = function_modes()
    yield stack
    for _ in range(num_function_modes()):
        pop_function_mode()
    for mode in stack:
        push_function_mode(mode)


def began() -> bool:
    """Begins the waiting mode, if any, and returns whether the mode has begun now."""
    if not WAITING:
        return False
    waiting = WAITING.innermost()
    if waiting is None or waiting.begun:
        return False
    # Below the modes that the function itself has entered. Such modes end earlier.
    try:
        waiting.around.enter_context(interception())
    except RuntimeError as error:  # of `set_stance`
        raise TypeError(
            "torch.compile runs a function of the loss that calls a collective of shardfn, into which no casts can be"
            " inserted. Leave out this torch.compile, and wrap the loss in sf.jit(loss, backend='inductor'), which"
            " compiles the whole step."
        ) from error
    with function_modes_changed() as stack:
        stack.insert(0, waiting.mode)
    waiting.begun = True
    return True


@contextlib.contextmanager
def waiting_to_begin(mode: TorchFunctionMode) -> Iterator[None]:
    """Lets the mode begin with the first collective, and ends the mode."""
    waiting = LateMode(mode)
    with WAITING.bound(waiting):
        try:
            yield
        finally:
            if waiting.begun:
                with function_modes_changed() as stack:
                    stack.remove(mode)
            waiting.around.close()


@functools.cache
def _make_application(original: Any) -> Any:
    """Returns an `autograd.Function.apply` that calls the function mode with an `operation`."""
    function = unbound(original)

    def apply_in_modes(cls: Any, *args: Any, **kwargs: Any) -> Any:
        call = functools.partial(function, cls)
        if cls.__module__ == checkpoint.__name__:  # checkpoints keep operands, and compute nothing
            return call(*args, **kwargs)
        mode: Any = next((m for m in reversed(function_modes()) if hasattr(m, "operation")), None)
        return call(*args, **kwargs) if mode is None else mode.operation(call, args, kwargs)

    return classmethod(apply_in_modes)


@contextlib.contextmanager
def interception() -> Iterator[None]:
    """Lets calls of Functions go through the modes, and compiled functions run operation by operation, as written."""
    with _INTERCEPTED, torch.compiler.set_stance("force_eager") if DYNAMO in sys.modules else _NOTHING:
        yield


_NOTHING = contextlib.nullcontext()
_INTERCEPTED = Replaced(lambda: [(torch.autograd.Function, "apply", _make_application)])
