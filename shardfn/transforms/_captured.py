"""Captured steps at run time: one graph a signature, the same collectives on all ranks, donation as in eager steps."""

import dataclasses
import time
from typing import Any

import torch
from torch import Tensor

from shardfn.collectives import StoppedError, bind_channels, channel_axes, text_hash
from shardfn.core import PyTree, RankError, tree_flatten, tree_leaves, tree_map, tree_unflatten
from shardfn.graph import collective_sequence, compare_sequences

from ._comms import Comms
from ._jit import CacheInfo, Jitted, report
from ._plan import Plan
from ._state import TrainState
from ._traced_step import StepParts, StepProgram, capture_step
from ._update import next_state, take_state


class CapturedSteps:
    """The graphs of one step, by signature.

    Args:
        jitted: how to schedule and compile.
        parts: loss and optimizer.
        donate: whether a step consumes its state.
    """

    def __init__(self, jitted: Jitted, parts: StepParts, donate: bool) -> None:
        # A copy, that counts for itself.
        self._jitted, self._parts, self._donate = dataclasses.replace(jitted), parts, donate
        self._known: dict[Any, tuple[StepProgram, Any]] = {}

    def run(
        self, plan: Plan, comms: Comms, state: TrainState, args: tuple[Any, ...], even: bool
    ) -> tuple[TrainState, dict[str, Tensor]]:
        """One step."""
        blocks, opt = [x.local for x in tree_leaves(state.params)], tree_map(lambda x: x.local, state.opt_state)
        key = signature(plan, args, even)
        known = self._known.get(key)
        # Where batches differ, one rank may know its shapes while another does not.
        everywhere = known is not None if even else all(comms.control.exchange(int(known is not None)))
        if known is None or not everywhere:
            known = self._known[key] = self._capture(plan, comms, blocks, opt, args, even)
        else:
            self._jitted.count(hit=True)
        del blocks, opt
        return self._execute(*known, comms, state, tree_leaves(args))

    def cache_info(self) -> CacheInfo:
        """What is remembered."""
        return self._jitted.cache_info()._replace(currsize=len(self._known))

    def lower(self, plan: Plan, blocks: list[Any], opt: PyTree, args: tuple[Any, ...]) -> StepProgram:
        """Captures and schedules a step for its shapes, alone: other ranks are taken to do the same."""
        program = capture_step(self._parts, plan, blocks, opt, args, even=True)
        return dataclasses.replace(program, gm=self._jitted.schedule(program.gm))

    def adopt(self, key: Any, program: StepProgram, backend: str | None, comms: Comms) -> None:
        """Compiles a lowered step and keeps it under its signature. Collective."""
        self._prepare(comms, program, None)
        jitted = dataclasses.replace(self._jitted, backend=backend or self._jitted.backend)
        self._known[key] = program, jitted.compile(program.gm)

    def _execute(
        self, program: StepProgram, compiled: Any, comms: Comms, state: TrainState, arg_leaves: list[Tensor]
    ) -> tuple[TrainState, dict[str, Tensor]]:
        num, names = len(program.plan.leaves), program.metrics
        # A step that may be skipped must leave its state alive until it is known not to be.
        donates = self._donate and not self._parts.skip_nonfinite
        params, opt = take_state(state, donated=donates, copied=not self._donate)
        try:
            with torch.no_grad(), bind_channels(comms.channels):
                outs = compiled(*tree_leaves(params), *tree_leaves(opt), *arg_leaves)
        except StoppedError as stopped:
            metrics = dict(zip(names, stopped.carried, strict=True))
            metrics["skipped"] = torch.ones_like(metrics["skipped"])
            return state, metrics
        if self._donate and not donates:
            take_state(state, donated=True, copied=False)
        blocks, rest, values = list(outs[:num]), outs[num : len(outs) - len(names)], outs[len(outs) - len(names) :]
        opt_state = tree_unflatten(program.opt_treedef, rest)
        new = next_state(program.plan, state, blocks, opt_state)
        return new, dict(zip(names, values, strict=True))

    def _capture(
        self, plan: Plan, comms: Comms, blocks: list[Tensor], opt: PyTree, args: tuple[Any, ...], even: bool
    ) -> tuple[StepProgram, Any]:
        start = time.perf_counter()
        program = error = None
        try:
            program = capture_step(self._parts, plan, blocks, opt, args, even=even)
        except Exception as caught:
            error = caught
        self._prepare(comms, program, error)
        assert program is not None
        report("a step", "batch", args[0], len(self._known))
        self._jitted.count(hit=False, seconds=time.perf_counter() - start)
        return program, self._jitted.build(program.gm)

    def _prepare(self, comms: Comms, program: StepProgram | None, error: Exception | None) -> None:
        """Agrees on what was captured and makes the channels that it uses, in one order on all ranks."""
        if program is None:
            _agree_on_capture(comms, [f"failed: {type(error).__name__}: {error}"], error)
            return
        _agree_on_capture(comms, [f"returns {program.outcome}", *collective_sequence(program.gm)], error)
        for axes, kind in channel_axes(program.gm):
            (comms.channels.gather if kind == "gather" else comms.channels.reduce)(axes)


def signature(plan: Plan, args: tuple[Any, ...], even: bool) -> Any:
    """What a graph is made for: the layout, and the shapes of what comes with the state."""
    leaves, treedef = tree_flatten(args)
    return id(plan), treedef, even, *((tuple(x.shape), x.stride(), x.dtype) for x in leaves)


def _agree_on_capture(comms: Comms, lines: list[str], error: Exception | None) -> None:
    """Compares what the ranks have captured: in each group the same collectives in the same order, or nobody runs."""
    same = len(set(comms.control.exchange(text_hash("\n".join(lines))))) == 1
    told: Any = [lines] if same else comms.control.gather(lines)
    if error is not None:
        raise error
    failed = [f"  - rank {rank} {theirs[0]}" for rank, theirs in enumerate(told) if theirs[0].startswith("failed: ")]
    if failed:
        raise RankError("\n".join(["another rank could not capture the step:", *failed]))
    comms.control.agree("what the loss returns", lines[0])
    compare_sequences([theirs[1:] for theirs in told], comms.mesh.shape)
