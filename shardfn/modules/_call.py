"""Call of a module with other tensors and other code: one loop over a list of replacements.

A replacement gives submodules other forwards, opens a context such as a mode of torch functions, or checks a call. A
call enters the replacements by their numbers, smallest first, and leaves them in reverse. The numbers are:

     0  checks             refuse a call before anything is replaced
    10  compiled parts     first, as later forwards are made from the forwards of the uncompiled parts
    20  eval mode          before any forward reads `training`
    30  recomputation      before all code of the forward, which then runs again with everything below
    40  dtypes             around the draws of the same submodule, since masks have the dtype of the computation
    50  draws              inside of the casts, around everything that draws
    60  attention          functions in tables of transformers, independent of the other numbers
    70  experts            as attention
    80  replay             inside of the draws of a layer: the router chooses in the layer's own forward
    90  function watch     inside of all replaced forwards, so that a function of these is seen, too
   100  batch-invariance   innermost: replaces a function before the watch sees the function, and the watch then sees
                           the functions of the replacement

A new replacement is a file with a class, and a row in `from_module`.
"""

import contextlib
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from shardfn.core import Again, P, is_compiled, is_evaluating, named_buffers, named_parameters, uncompiled
from shardfn.leaves import LazyLeaf

from ._draws import Draws
from ._given_tensors import GivenTensors, ModuleParts, Overrides, Placed, TensorSlot, refuse_two_threads

# Submodules, each with the forward to run.
Forwards = Sequence[tuple[nn.Module, Callable[..., Any]]]


class Replacement:
    """Replacement of a part of a module's code. This class is the identity: every method may be left out.

    Attributes:
        order: place in a call, smaller numbers outside, for example 50 for draws. The reason is in the table of this
            file.
        specs: compute specs of parameters that are not whole on each rank, by name.
    """

    order: ClassVar[int] = 0
    specs: Mapping[str, P] = {}

    def check(self, call: "ModuleCall") -> None:
        """Refuses a call, or warns, before anything is replaced."""

    def of_call(self, call: "ModuleCall") -> "Replacement":
        """Returns the replacement for a single call and the parts of the call that run again in the backward."""
        del call
        return self

    def forwards(self, run: "ModuleRun") -> Forwards:
        """Returns submodules and the forwards to run in their place.

        Replacements with smaller numbers are in place already.
        """
        del run
        return ()

    def running(self, run: "ModuleRun") -> AbstractContextManager[Any]:
        """Returns a context that is open while the module runs. The context may raise on exit."""
        del run
        return contextlib.nullcontext()


class ModuleCall:
    """Call of a module, with the parts that run again in the backward.

    Invariant: every part, the first time and again, runs inside `_run_replaced`: with the given tensors in place, all
    replacements entered, and the draws numbered from the part's first start. Only the given tensors are kept. Given
    tensors are leaves, so no gathered parameter outlives a use. Writes to buffers of the state go to copies, made for
    each run: a part that runs again begins with the values of the first run, and does not change returned values.

    Args:
        parts: parts of the module.
        given: tensors in place of the module's. A replacement may add buffers.
        draws: random numbers of the call.
        state: buffers that the forward may change, by name, or None for a module without a state.
        kwargs: arguments of the forward by name.
        replacements: replacements in any order.

    Attributes:
        module: the module.
        evaluates: whether the call is inside of `step.evaluate`, also for parts that run again later.
    """

    def __init__(
        self,
        parts: ModuleParts,
        given: GivenTensors,
        draws: Draws,
        state: Mapping[str, Tensor] | None,
        kwargs: Mapping[str, Any],
        replacements: Sequence[Replacement],
    ) -> None:
        self.parts, self.given, self.draws, self.state, self.kwargs = parts, given, draws, state, kwargs
        self.module = parts.unique[0][1]
        self.evaluates = is_evaluating()
        for one in replacements:
            one.check(self)
        self._replacements = [one.of_call(self) for one in sorted(replacements, key=lambda one: one.order)]
        self._placed: Placed | None = None  # while it runs
        # Parts may run again on autograd's thread, on behalf of this thread: `refuse_two_threads` needs the id.
        self._caller = threading.get_ident()

    def run(self, forward: Callable[..., Any], args: tuple[Any, ...]) -> tuple[Any, dict[str, Tensor]]:
        """Returns the result of the forward, and the new values of the buffers in the state."""
        with self._run_replaced(self.state or {}):
            return forward(*args, **self.kwargs), self._current_buffers()

    def again(self) -> Again:
        """Returns a context to rerun the code that follows, with the same random numbers and the current buffers."""
        assert self._placed is not None
        mark, overrides = self.draws.mark, self._placed.overrides()
        # Copies, as the forward may still write to the buffers.
        state = {name: x.clone() for name, x in self._current_buffers().items()}

        @contextlib.contextmanager
        def entered() -> Iterator[None]:
            before, self.draws.mark = self.draws.mark, mark
            try:
                with self._run_replaced(state, overrides, again=True):
                    yield
            finally:
                self.draws.mark = before

        return entered

    def path_of(self, sub: nn.Module) -> str | None:
        """Returns the path of `sub` in the module, or None if `sub` is not a part of the module."""
        return next((path for path, m in self.parts.modules.items() if m is sub), None)

    def converted(self, sub: nn.Module, convert: Callable[[Any], Any]) -> bool:
        """Returns whether `sub` is a part of the module; refuses a conversion that changes something."""
        path = self.path_of(sub)
        if path is None:
            return False
        dot = f"{path}." if path else ""
        for name, x in (*named_parameters(sub), *named_buffers(sub)):
            # A lazy leaf need not be gathered for the check.
            old = torch.empty((), dtype=x.dtype, device=x.device).expand(x.shape) if type(x) is LazyLeaf else x
            with torch.no_grad():
                new = convert(old)
            if new is not old:
                raise ValueError(
                    f"the forward of the module must not convert its parameters, got {dot}{name} converted from"
                    f" {x.dtype} on {x.device} to {new.dtype} on {new.device}. Convert the module before from_module,"
                    " or name that parameter in the policy: exceptions={...}."
                )
        return True

    def _current_buffers(self) -> dict[str, Tensor]:
        """Returns the current buffers of the state."""
        slots = {name: self.parts.buffers[name] for name in self.state or {}}
        return {name: slot.owner._buffers[slot.name] for name, slot in slots.items()}  # pyright: ignore[reportReturnType]

    @contextlib.contextmanager
    def _run_replaced(
        self, state: Mapping[str, Tensor], overrides: Sequence[Overrides] = (), *, again: bool = False
    ) -> Iterator[None]:
        own = {name: x.clone() for name, x in state.items()}
        given = GivenTensors(self.given.params, self.given.buffers | own)
        with (
            refuse_two_threads(self.module, self._caller),
            Placed(self.parts, given) as placed,
            self._use_placed(placed),
        ):
            placed.override(overrides)
            # After `override`, which restores the forward's assignments: each run has separate buffers of the state.
            for name, x in own.items():
                self.parts.buffers[name].owner._buffers[self.parts.buffers[name].name] = x
            slots = None if self.state is None else frozenset(self.parts.buffers[name] for name in own)
            run = ModuleRun(self, placed, slots, again)
            with contextlib.ExitStack() as stack:
                for one in self._replacements:
                    stack.enter_context(replace_forwards(one.forwards(run)))
                    stack.enter_context(one.running(run))
                yield

    @contextlib.contextmanager
    def _use_placed(self, placed: Placed) -> Iterator[None]:
        before, self._placed = self._placed, placed
        try:
            yield
        finally:
            self._placed = before


class ModuleRun(NamedTuple):
    """Run of a call: the first run, or a part that runs again in the backward.

    Attributes:
        call: the call.
        placed: the module with the given tensors in place.
        state: buffers that the forward may change, or None for a module without a state.
        again: whether a part of the call runs again.
    """

    call: ModuleCall
    placed: Placed
    state: frozenset[TensorSlot] | None
    again: bool


@contextlib.contextmanager
def replace_forwards(forwards: Forwards) -> Iterator[None]:
    """Lets submodules run other forwards for a while."""
    before = [(sub, sub.__dict__.get("forward")) for sub, _ in forwards]
    try:
        for sub, forward in forwards:
            sub.__dict__["forward"] = forward
        yield
    finally:
        for sub, forward in before:
            if forward is None:
                sub.__dict__.pop("forward", None)
            else:
                sub.__dict__["forward"] = forward


# Replacements of every call.


class EvalMode(Replacement):
    """Sets all submodules to eval mode inside of `step.evaluate`.

    The method `train` is not called, since a module may override `train`, for example to merge weights.
    """

    order = 20

    @contextlib.contextmanager
    def running(self, run: ModuleRun) -> Iterator[None]:
        """Sets the mode while open."""
        before = [sub for _, sub in run.call.parts.unique if sub.training] if run.call.evaluates else []
        for sub in before:
            sub.training = False
        try:
            yield
        finally:
            for sub in before:
                sub.training = True


class NumberedDraws(Replacement):
    """Gives the draws in each element of a list of submodules separate numbers."""

    order = 50

    def forwards(self, run: ModuleRun) -> Forwards:
        """Returns the forwards of the elements."""
        return run.call.draws.forwards()


class UncompiledParts(Replacement):
    """Runs parts compiled by `torch.compile` uncompiled: compiled code is bound to the module's tensors."""

    order = 10

    @contextlib.contextmanager
    def running(self, run: ModuleRun) -> Iterator[None]:
        """Runs the parts uncompiled while open."""
        shadows = []
        for _, sub in _find_compiled(run.call.module):
            inner = uncompiled(sub)
            shadows.append((sub, "forward", inner.__call__) if inner is not sub else (sub, _COMPILED, None))
        before = [(sub, name, sub.__dict__[name]) for sub, name, _ in shadows]
        try:
            _set_attributes(shadows)
            yield
        finally:
            _set_attributes(before)


_COMPILED = "_compiled_call_impl"  # the attribute that `module.compile()` sets, called in place of the module


def uncompiled_module(module: nn.Module) -> nn.Module:
    """Returns the module before `torch.compile`, and warns where a part is compiled."""
    paths = [path for path, _ in _find_compiled(module)]
    if paths:
        shown = ", ".join(path or "the module" for path in paths[:3]) + (" and others" if len(paths) > 3 else "")
        warnings.warn(
            f"from_module runs {shown} without torch.compile, as a step gives the module other tensors. Compile the"
            ' whole step instead: sf.jit(loss, backend="inductor").',
            UserWarning,
            stacklevel=3,
        )
    return uncompiled(module)


def _find_compiled(module: nn.Module) -> list[tuple[str, nn.Module]]:
    return [
        (path, sub)
        for path, sub in module.named_modules()
        if is_compiled(sub) or sub.__dict__.get(_COMPILED) is not None
    ]


def _set_attributes(values: list[tuple[nn.Module, str, Any]]) -> None:
    for sub, name, value in values:
        sub.__dict__[name] = value
