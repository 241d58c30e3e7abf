"""Captured steps at run time: one graph a signature, the same collectives on all ranks, donation as in eager steps."""

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.fx import GraphModule

from shardfn.collectives import StoppedError, bind_channels, record, text_hash
from shardfn.core import PyTree, RankError, Stored, tree_flatten, tree_leaves, tree_unflatten
from shardfn.graph import (
    Choice,
    Compiled,
    Events,
    Schedule,
    Transfer,
    channel_axes,
    check_types,
    collective_events,
    compare_events,
)
from shardfn.memory import bind_pool, stored_of, token_of

from ._comms import Comms
from ._jit import CacheInfo, Jitted, ambient, plain_arithmetic, report, sent_by_the_loss
from ._loss import NoGradientError
from ._plan import Plan
from ._pools import disk_of
from ._state import TrainState, scale_of, taken
from ._step import StepParts
from ._traced_step import StepProgram, capture_step
from ._update import next_state

_Made = TypeVar("_Made")


class CapturedSteps:
    """The graphs of one step, by signature.

    Args:
        jitted: how to schedule and compile.
        parts: what the step is made of.
    """

    def __init__(self, jitted: Jitted, parts: StepParts) -> None:
        # A copy, that counts for itself.
        self._jitted, self._parts = dataclasses.replace(jitted), parts
        self._known: dict[Any, _Ready] = {}

    def run(
        self, plan: Plan, comms: Comms, state: TrainState, args: tuple[Any, ...], even: bool
    ) -> tuple[TrainState, dict[str, Tensor]]:
        """One step."""
        key = even, signature(plan, args), _layouts(state)
        known = self._known.get(key)
        # One rank may know its own while another does not: batches may differ, and so may strides.
        everywhere = all(comms.control.exchange(int(known is not None)))
        if known is None or not everywhere:
            known = self._known[key] = self._make(plan, comms, state, args, even)
        else:
            self._jitted.count(hit=True)
        return self._execute(known, comms, state, tree_leaves(args))

    def cache_info(self) -> CacheInfo:
        """What is remembered."""
        return self._jitted.cache_info()._replace(currsize=len(self._known))

    def lower(
        self, plan: Plan, params: PyTree, opt: PyTree, args: tuple[Any, ...], scale: Tensor | None
    ) -> tuple[StepProgram, Schedule | Choice]:
        """Captures and schedules a step for its shapes, alone: other ranks are taken to do the same.

        Returns:
            The scheduled step; and what scheduled it, as it was given or chosen.
        """
        start = time.perf_counter()
        program = capture_step(self._parts, plan, params, opt, args, scale, even=True)
        _refuse_no_gradient(program, [program.differentiated])
        self._check_types(program)
        choice = self._jitted.choose(program.gm)
        gm = self._jitted.scheduled(program.gm, choice and choice.schedule)
        self._jitted.count(hit=False, seconds=time.perf_counter() - start)
        return dataclasses.replace(program, gm=gm), choice or self._jitted.schedule

    def compile(self, program: StepProgram, backend: str | None, comms: Comms) -> Callable[..., Any]:
        """A lowered step that runs as `run` does. Collective."""
        _agreed(comms, lambda: program, lambda made: (made.outcome, collective_events(made.gm)))
        ready = self._compile(program, comms, backend)

        def run(plan: Plan, comms: Comms, state: TrainState, args: tuple[Any, ...], even: bool) -> Any:
            del plan, even
            return self._execute(ready, comms, state, tree_leaves(args))

        return run

    def _execute(
        self, ready: "_Ready", comms: Comms, state: TrainState, arg_leaves: list[Tensor]
    ) -> tuple[TrainState, dict[str, Tensor]]:
        program = ready.program
        num, names = len(program.plan.leaves), program.metrics
        scale = scale_of(state)
        arg_leaves = arg_leaves if scale is None else [*arg_leaves, scale]
        pool = disk_of(program.plan)
        for move in ready.of_the_loss:
            record(move.op, tuple(move.axes.split(",")), move.sent, dtype=move.dtype)
        try:
            with taken(state, donate=self._parts.donate) as held, torch.no_grad(), plain_arithmetic():
                given = [x if isinstance(x, Tensor) else token_of(x) for x in tree_leaves(held)]
                with bind_channels(comms.channels), bind_pool(pool):
                    outs = ready.run(*given, *arg_leaves)
        except StoppedError as stopped:  # before anything was written
            metrics = dict(zip(names, stopped.carried, strict=True))
            metrics["skipped"] = torch.ones_like(metrics["skipped"])
            return state, metrics
        values = outs[len(outs) - len(names) :]
        new_held = [stored_of(x) if kind == "disk" else x for x, kind in zip(outs, program.kinds, strict=False)]
        blocks, opt_state = new_held[:num], tree_unflatten(program.opt_treedef, new_held[num:])
        return next_state(program.plan, state, blocks, opt_state), dict(zip(names, values, strict=True))

    def _make(
        self,
        plan: Plan,
        comms: Comms,
        state: TrainState,
        args: tuple[Any, ...],
        even: bool,
    ) -> "_Ready":
        start = time.perf_counter()
        params, opt, scale = state.params, state.opt_state, scale_of(state)

        def make() -> tuple[StepProgram, GraphModule]:
            choice = None
            try:
                program = capture_step(self._parts, plan, params, opt, args, scale, even=even)
                choice = self._jitted.choose(program.gm) if comms.control.rank == 0 else None
            finally:  # a rank that fails takes part, too: the others wait for it
                schedule = self._schedule(comms, choice)
            # Where there is none rank 0 has failed, and all are about to say so.
            return program, program.gm if schedule is None else self._jitted.scheduled(program.gm, schedule)

        program, gm = _agreed(comms, make, lambda made: (made[0].outcome, collective_events(made[1])))
        _refuse_no_gradient(program, comms.control.exchange(int(program.differentiated)))
        # Only once all are known to run the same collectives: else that is the error.
        _agreed(comms, lambda: (self._check_types(program), True), lambda _: ("", Events([], [])))
        # A phase of the optimizer has a plan, and so a graph, of its own.
        name = "a step" if plan.phase is None else f"a step in the phase {plan.phase.name!r}"
        report(name, "batch", args[0], sum(of == id(plan) for _, (of, *_), _ in self._known))
        self._jitted.count(hit=False, seconds=time.perf_counter() - start)
        return self._compile(dataclasses.replace(program, gm=gm), comms, None)

    def _check_types(self, program: StepProgram) -> None:
        if self._jitted.check_types:
            check_types(program.gm)

    def _schedule(self, comms: Comms, choice: Choice | None) -> Schedule | None:
        """The schedule that all ranks run: the one given, or rank 0's choice; None if rank 0 has none. Collective."""
        given = self._jitted.schedule
        if self._jitted.cluster is None:
            return given
        mine = None if choice is None else dataclasses.replace(choice.schedule, passes=())
        told: Any = comms.control.gather(mine)[0]
        return None if told is None else dataclasses.replace(told, passes=given.passes)

    def _compile(self, program: StepProgram, comms: Comms, backend: str | None) -> "_Ready":
        for axes, kind in channel_axes(program.gm):  # made by all ranks, in one order
            (comms.channels.gather if kind == "gather" else comms.channels.reduce)(axes)
        run = _agreed(comms, lambda: self._jitted.compile(program.gm, backend), lambda made: ("", Events([], [])))
        return _Ready(program, run, sent_by_the_loss(program.gm))


class _Ready(NamedTuple):
    """A step that runs: its graph, what runs it, and the transfers that the loss and the metrics make."""

    program: StepProgram
    run: Compiled
    of_the_loss: list[Transfer]


def _refuse_no_gradient(program: StepProgram, differentiated: Sequence[int]) -> None:
    """Refuses a step whose loss has a gradient on none of the ranks; where some have none, theirs count as zeros."""
    if not any(differentiated):
        raise NoGradientError(program.plan.trained)


def signature(plan: Plan, args: tuple[Any, ...]) -> Any:
    """What a graph is made for: the layout, what comes with the state, and what is ambient."""
    leaves, treedef = tree_flatten(args)
    return id(plan), ambient(), treedef, *((tuple(x.shape), x.stride(), x.dtype, x.device) for x in leaves)


def _layouts(state: TrainState) -> Any:
    """What a graph takes for granted of the state."""
    leaves, treedef = tree_flatten(state.opt_state)
    held: list[Tensor | Stored] = [x.held for x in (*tree_leaves(state.params), *leaves)]
    return treedef, *((x.stride() if isinstance(x, Tensor) else x.shape, x.dtype) for x in held)


def _agreed(comms: Comms, make: Callable[[], _Made], told: Callable[[_Made], tuple[str, Events]]) -> _Made:
    """What `make` makes, if all ranks succeed and none would wait for ever; else all raise.

    Raises:
        RankError: another rank failed, or ranks would run different collectives, or wait for one another.
    """
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
    if error is not None:
        raise error
    failed = [f"  - rank {rank} failed: {what}" for rank, (what, events) in enumerate(all_told) if events is None]
    if failed:
        raise RankError("\n".join(["another rank could not capture or compile the step:", *failed]))
    assert made is not None
    if not same:
        comms.control.agree("what the loss returns", mine[0])
        compare_events([events for _, events in all_told], comms.mesh.shape)
    return made
