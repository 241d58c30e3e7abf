"""Runs captured steps: with donation as in eager steps, and with results that become a state."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shardfn.collectives import Agreed, GlobalTensor, StoppedError
from shardfn.core import Stored, tree_flatten, tree_leaves, tree_unflatten
from shardfn.graph import Choice, Schedule
from shardfn.state import TrainState, as_graph_value, returned, scale_of, taken

from ._comms import Comms
from ._graphs import Graphs, Ready, signature
from ._jitted import CacheInfo, Jitted
from ._mixed import policy_in
from ._noted import noting_exceptions
from ._plan import Plan
from ._pools import disk_of
from ._step import StepCall, StepParts
from ._traced_step import StepProgram, capture_step
from ._update import blocks_of, next_state


class CapturedSteps:
    """The graphs of one step, by signature.

    Args:
        jitted: how to schedule and compile.
        parts: what the step is made of.
    """

    def __init__(self, jitted: Jitted, parts: StepParts) -> None:
        self._graphs, self._parts, self._policy = Graphs(jitted), parts, policy_in(parts.loss)

    def call(self, plan: Plan, state: TrainState, args: tuple[Any, ...]) -> StepCall:
        """One step, by the graph of its arguments' signature; there is one for even batches and one for uneven ones."""
        # A state of the optimizer may come with another structure or in other memory under the same plan.
        rest = *signature(plan, args), _layouts(state)
        keys = (*rest, True), (*rest, False)

        def run(comms: Comms, agreed: Agreed) -> tuple[TrainState, dict[str, Tensor]]:
            how: dict[str, Any] = {"even": agreed.even, "model_state": state.model_state}
            capture = functools.partial(
                capture_step, self._parts, plan, state.params, state.opt_state, args, scale_of(state), **how
            )
            # A phase of the optimizer has a plan, and so a graph, of its own.
            name = "a step" if plan.phase is None else f"a step in the phase {plan.phase.name!r}"
            key = keys[0 if agreed.even else 1]
            ready = self._graphs.ready(comms, key, capture, name, args[0], everywhere=agreed.ready)
            return self._execute(ready, comms, state, tree_leaves(args))

        return StepCall(run, (self._graphs.knows(keys[0]), self._graphs.knows(keys[1])))

    def cache_info(self) -> CacheInfo:
        """The counters of the cache of graphs."""
        return self._graphs.cache_info()

    def lower(self, plan: Plan, state: TrainState, args: tuple[Any, ...]) -> tuple[StepProgram, Schedule | Choice]:
        """Captures and schedules a step for its shapes; see `Graphs.lower`."""
        params, opt, scale = state.params, state.opt_state, scale_of(state)
        how: dict[str, Any] = {"even": True, "model_state": state.model_state}
        return self._graphs.lower(lambda: capture_step(self._parts, plan, params, opt, args, scale, **how))

    def compile(
        self, program: StepProgram, backend: str | None, comms: Comms
    ) -> Callable[[Plan, TrainState, tuple[Any, ...]], StepCall]:
        """A lowered step, called as `call` is. Collective."""
        ready = self._graphs.compile(program, backend, comms)

        def call(plan: Plan, state: TrainState, args: tuple[Any, ...]) -> StepCall:
            del plan
            return StepCall(lambda comms, agreed: self._execute(ready, comms, state, tree_leaves(args)))

        return call

    def _execute(
        self, ready: Ready, comms: Comms, state: TrainState, arg_leaves: list[Tensor]
    ) -> tuple[TrainState, dict[str, Tensor]]:
        program: StepProgram = ready.program
        num, names = len(program.plan.leaves), program.metrics
        scale = scale_of(state)
        arg_leaves = arg_leaves if scale is None else [*arg_leaves, scale]
        leaves = program.plan.leaves
        noting = noting_exceptions(self._policy, lambda: [(x.path, x.dtypes.compute) for x in leaves])
        try:
            with noting, taken(blocks_of(state), donate=self._parts.donate) as held:
                given = [as_graph_value(x) for x in tree_leaves(held)]
                outs = ready(comms, disk_of(program.plan), [*given, *arg_leaves])
        except StoppedError as stopped:  # before anything was written
            metrics = dict(zip(names, stopped.carried, strict=True))
            metrics["skipped"] = torch.ones_like(metrics["skipped"])
            return state, metrics
        values = outs[len(outs) - len(names) :]
        new_held = [returned(x, like) for x, like in zip(outs, program.blocks, strict=False)]
        then = num + program.opt_treedef.num_leaves
        # Model state is always a tensor of the device.
        opt_state, kept = tree_unflatten(program.opt_treedef, new_held[num:then]), outs[then : len(new_held)]
        new = next_state(program.plan, state, new_held[:num], opt_state, kept)
        return new, dict(zip(names, values, strict=True))


def _layouts(state: TrainState) -> Any:
    """What a graph relies on in the layout of a state."""
    leaves, treedef = tree_flatten((state.opt_state, state.model_state))
    held: list[Tensor | Stored] = [x.held for x in (*tree_leaves(state.params), *leaves)]
    kinds = [x.memory_kind for x in leaves if isinstance(x, GlobalTensor)]
    shapes = ((tuple(x.shape), x.stride() if isinstance(x, Tensor) else None, x.dtype) for x in held)
    return treedef, *kinds, *shapes
