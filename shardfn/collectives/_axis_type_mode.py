"""Where values are followed along axes, and where not.

Contexts, functions that count as one operation, rematerialization.

The rules are in `_axis_types.py`.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

from shardfn import core

from ._axis_group import current_mesh
from ._axis_index import AxisNumber
from ._axis_types import NOTED, AxisTypeMode
from ._function_modes import WAITING, LateMode, began, function_modes, function_modes_changed, waiting_to_begin

_NONE = LateMode(TorchFunctionMode(), begun=True)


def current_axis_types(*, begin: bool = True) -> AxisTypeMode | None:
    """Returns the mode that follows values on this thread, if any. With `begin`, a waiting mode begins now."""
    if begin:
        began()
    return next((m for m in reversed(function_modes()) if isinstance(m, AxisTypeMode)), None)


@contextlib.contextmanager
def track_axis_types(mode: AxisTypeMode, *, at_once: bool = True) -> Iterator[AxisTypeMode]:
    """Follows values while the context is open: at once, or from the first collective or `axis_index` on.

    Until then every tensor varies along the default axes.
    """
    if not mode.axes:
        yield mode
        return
    with mode if at_once else waiting_to_begin(mode):
        yield mode


@contextlib.contextmanager
def no_axis_types() -> Iterator[None]:
    """Runs code that already has casts, unfollowed."""
    with WAITING.bound(_NONE):
        mode = next((m for m in function_modes() if isinstance(m, AxisTypeMode)), None)
        if mode is None:
            yield
            return
        with function_modes_changed() as stack:
            at = stack.index(mode)
            del stack[at]
        try:
            yield
        finally:
            with function_modes_changed() as stack:
                stack.insert(at, mode)


def run_one_operation(f: Callable[..., Any], *args: Any, along: core.Axes = None) -> Any:
    """Returns `f(*args)`, followed as one operation with a result that varies along `along`, too.

    For code that does not do the same on all ranks, for example a branch on the rank: followed op by op, the code would
    get casts only on some ranks.
    """
    mode = current_axis_types()
    if mode is None:
        return f(*args)
    named = current_mesh().axes(along)
    mode.crossed.update(named)

    def run_unfollowed(_: object, *args: Any) -> Any:
        with no_axis_types():
            return f(*args)

    # A number along these axes is a further operand.
    return mode.operation(run_unfollowed, (AxisNumber(0, named), *args), {})


def summed_inside(x: Tensor, axis: core.Axes) -> Tensor:
    """Notes that `x`, made by sums along `axis`, is the same on all ranks there, and returns `x`."""
    mode = current_axis_types(begin=False)
    if mode is None:
        return x
    named = current_mesh().axes(axis)
    mode.crossed.update(named)
    return mode.declare(x, [a for a in mode.axes_of(x) if a not in named])


def same_axes(x: Tensor, like: Tensor) -> Tensor:
    """Notes that `x` varies as `like` does, where values are followed, and returns `x`."""
    noted = like.__dict__.get(NOTED)
    if noted is not None:
        setattr(x, NOTED, noted)
    return x


def note_axes(x: Tensor) -> int | None:
    """Returns the note of the axes along which a tensor varies, to be compared, or None without a note."""
    return x.__dict__.get(NOTED)


@core.rebind_ambient
def _restore_following() -> list[core.Again]:
    mode = current_axis_types(begin=False)
    if mode is not None:
        return [functools.partial(track_axis_types, mode)]
    waiting = WAITING.innermost()
    if waiting is None or waiting.begun or not isinstance(waiting.mode, AxisTypeMode):
        return []
    return [functools.partial(track_axis_types, waiting.mode, at_once=False)]


@core.rebind_note
def _make_argument_note(args: Sequence[Any]) -> core.Note | None:
    # Not the tensors, as a checkpoint has to drop tensors. Counted from the end, as other arguments may precede the
    # run's arguments.
    named = enumerate(args, -len(args))
    noted = [(i, x.__dict__[NOTED]) for i, x in named if isinstance(x, Tensor) and NOTED in x.__dict__]
    if not noted:
        return None

    def set_axes(args: Sequence[Any]) -> None:
        for i, axes in noted:
            setattr(args[i], NOTED, axes)

    return set_axes
