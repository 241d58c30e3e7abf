"""The captured programs of a single function: one graph per signature, with the same collectives on all ranks."""

import collections
import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.fx import GraphModule

from shardfn.capture import quiet
from shardfn.collectives import Agreed, bind_channels, text_hash
from shardfn.core import PyTree, RankError, tree_flatten
from shardfn.engine.agreement import Comms, collected
from shardfn.engine.loss import (
    CacheInfo,
    GraphCache,
    Jitted,
    ambient,
    argument_shapes,
    plain_arithmetic,
    report,
)
from shardfn.engine.plan import Plan
from shardfn.graph import (
    Choice,
    Compiled,
    Events,
    Schedule,
    channel_axes,
    check_types,
    collective_events,
    compare_events,
    resolve_backend,
)
from shardfn.memory import AnyPool, bind_pool

from ._program import CapturedProgram

_Made = TypeVar("_Made")
_Result = TypeVar("_Result")


class Ready(NamedTuple):
    """A program that is ready to run."""

    program: CapturedProgram
    run: Compiled

    def __call__(self, comms: Comms, pool: AnyPool | None, flat: Sequence[Tensor]) -> tuple[Any, ...]:
        """Runs the graph, and returns its results."""
        with torch.no_grad(), plain_arithmetic(), bind_channels(comms.channels), bind_pool(pool):
            return self.run(*flat)


class ProgramCall(NamedTuple, Generic[_Result]):
    """A call of a program, which ranks agree on and then run.

    Attributes:
        run: runs the call, given the agreement of the ranks, on a state or on the arguments of a function. A loss takes
            a state with the model state that another loss has left.
        known: whether this rank already has the results of a first call. See `Agreed`.
    """

    run: Callable[[Comms, Agreed, Any], _Result]
    known: tuple[bool, bool] = (True, True)


class Graphs:
    """The graphs of a single function, by signature: captured, scheduled, agreed on and compiled once each.

    The least recently used one is evicted if there are more than `max_graphs`. It is captured again if it comes back.

    Args:
        jitted: how to schedule and compile.
    """

    def __init__(self, jitted: Jitted) -> None:
        # A copy, that keeps graphs and counts for itself.
        self._jitted = dataclasses.replace(jitted)
        self._known: GraphCache[Ready] = self._jitted.graphs
        # By the first part of a signature, evicted graphs included.
        self._captures: collections.Counter[Any] = collections.Counter()

    def knows(self, key: Any) -> bool:
        """Returns whether this rank has the graph of a signature. Ranks exchange this before a call."""
        return key in self._known

    def ready(
        self,
        comms: Comms,
        key: Any,
        capture: Callable[[], CapturedProgram],
        name: str,
        batch: PyTree,
        *,
        everywhere: bool,
        expected: bool = False,
    ) -> Ready:
        """Returns the graph of a signature. If some rank does not have it, all ranks capture it, which is collective.

        Args:
            comms: communicators of the mesh.
            key: signature of the call. `signature` makes the first part.
            capture: function that captures the program.
            name: name in the log.
            batch: arguments of the call. The log shows the shapes.
            everywhere: whether all ranks have a graph for the call. Ranks may differ, since shapes and strides of
                batches may differ.
            expected: whether the caller has asked for a graph of this signature, so that no warning is due.
        """
        if everywhere:
            found = self._known.find(key)
            assert found is not None  # no graph is evicted between the ranks' agreement and the call
            return found
        with collected():
            made = self._make_graph(comms, key, capture, name, batch, 0 if expected else self._captures[key[0]])
        self._captures[key[0]] += 1
        self._known.keep(key, made, name, argument_shapes(batch, "batch"))
        return made

    def cache_info(self) -> CacheInfo:
        """Returns the counts of the cache and its size."""
        return self._jitted.cache_info()

    def lower(self, capture: Callable[[], _Made]) -> tuple[_Made, Schedule | Choice]:
        """Captures and schedules a program for its shapes, on this rank alone. Other ranks are assumed to do the same.

        Returns:
            The scheduled program, and its schedule, given or chosen.
        """
        start = time.perf_counter()
        with quiet():
            program: Any = capture()
            # This rank's own number is taken for all ranks'.
            program.check(lambda told: [told])
            self._check_types(program)
            choice = self._jitted.choose(program.gm)
            gm = self._jitted.scheduled(program.gm, choice and choice.schedule)
        self._jitted.count_capture(time.perf_counter() - start)
        return dataclasses.replace(program, gm=gm), choice or self._jitted.schedule

    def resolve(self, backend: str | None) -> str:
        """Returns the back end of a graph that is compiled for this one, None = the one of `jit`."""
        return resolve_backend(backend or self._jitted.backend)

    def compile(self, program: CapturedProgram, backend: str | None, comms: Comms) -> Ready:
        """Returns a lowered program, ready to run. Collective."""
        agreed(comms, lambda: program, lambda made: (made.outcome, collective_events(made.gm)))
        return self._compile_program(program, comms, backend)

    def _make_graph(
        self, comms: Comms, key: Any, capture: Callable[[], CapturedProgram], name: str, batch: PyTree, earlier: int
    ) -> Ready:
        start = time.perf_counter()

        def make() -> tuple[CapturedProgram, GraphModule]:
            choice = None
            try:
                program = capture()
                choice = self._jitted.choose(program.gm) if comms.control.rank == 0 else None
            finally:  # a rank that fails takes part, too: the others wait for it
                schedule = self._agree_on_schedule(comms, choice)
            # Without a schedule, rank 0 has failed, and all are about to raise that.
            return program, program.gm if schedule is None else self._jitted.scheduled(program.gm, schedule)

        program, gm = agreed(comms, make, lambda made: (made[0].outcome, collective_events(made[1])))
        program.check(comms.control.exchange)
        # Only once all are known to run the same collectives: else that is the error.
        agreed(comms, lambda: (self._check_types(program), True), lambda _: ("", Events([], [])))
        report(name, "batch", batch, earlier)
        self._jitted.count_capture(time.perf_counter() - start)
        return self._compile_program(dataclasses.replace(program, gm=gm), comms, None)

    def _check_types(self, program: CapturedProgram) -> None:
        if self._jitted.check_types:
            check_types(program.gm)

    def _agree_on_schedule(self, comms: Comms, choice: Choice | None) -> Schedule | None:
        """Returns the schedule that all ranks run.

        The one given, or rank 0's choice, or None if rank 0 has failed. Collective.
        """
        given = self._jitted.schedule
        if self._jitted.cluster is None:
            return given
        mine = None if choice is None else dataclasses.replace(choice.schedule, passes=())
        told: Any = comms.control.gather(mine)[0]
        return None if told is None else dataclasses.replace(told, passes=given.passes)

    def _compile_program(self, program: CapturedProgram, comms: Comms, backend: str | None) -> Ready:
        # Before anything runs: making a channel is collective, and a graph asks for it in the middle of a step.
        # Made by all ranks, in one order; another stage of a pipeline may use others.
        told: Any = comms.control.gather(channel_axes(program.gm))
        for axes, kind in sorted({channel for own in told for channel in own}):
            # By kind, as one program may gather and reduce along the same axes at once.
            getattr(comms.channels, kind)(axes)
        run = agreed(comms, lambda: self._jitted.compile(program.gm, backend), lambda made: ("", Events([], [])))
        return Ready(program, run)


def signature(plan: Plan, args: PyTree) -> Any:
    """Returns the first part of a signature: the layout, the kind of state, and ambient settings."""
    leaves, treedef = tree_flatten(args)
    # The plan by id: the planner keeps it. Strides too, as they are written into a graph's views.
    return id(plan), ambient(), treedef, *((tuple(x.shape), x.stride(), x.dtype, x.device) for x in leaves)


def agreed(comms: Comms, make: Callable[[], _Made], told: Callable[[_Made], tuple[str, Events]]) -> _Made:
    """Returns the result of `make`, if all ranks succeed and their programs finish, else all ranks raise.

    Raises:
        RankError: another rank failed, or ranks would run different collectives, or wait for one another.
    """
    # An error waits until after the exchange, and every path to it exchanges once: ranks must not be one round apart.
    made = error = None
    mine: tuple[str, Events | None] = "", None
    try:
        made = make()
        mine = told(made)
    except Exception as caught:
        error, mine = caught, (f"{type(caught).__name__}: {caught}", None)
    text = f"{mine[0]}\n{'failed' if mine[1] is None else mine[1].text}"
    same = len(set(comms.control.exchange(text_hash(text)))) == 1
    all_told: Any = [mine] if same else comms.control.gather(mine)
    # After the exchange: a rank that failed has taken part in it, so no other waits for it.
    if error is not None:
        raise error
    failed = [f"  - rank {rank} failed: {what}" for rank, (what, events) in enumerate(all_told) if events is None]
    if failed:
        raise RankError("\n".join(["another rank could not capture or compile the step:", *failed]))
    assert made is not None
    if not same:
        comms.control.agree("the result of the loss", mine[0])
        compare_events([events for _, events in all_told], comms.mesh.shape)
    return made
