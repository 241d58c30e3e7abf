"""Runs captured steps: with donation as in eager steps, and with results that become a state."""

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from shardfn.collectives import Agreed, GlobalTensor, StoppedError
from shardfn.core import PyTree, StoredValue, is_disk, tree_flatten, tree_leaves, tree_unflatten
from shardfn.engine.agreement import Comms
from shardfn.engine.loss import CacheInfo, Jitted, ambient, noting_exceptions, policy_in, put_in
from shardfn.engine.plan import Plan
from shardfn.engine.transfers import Blocks, Found, Metrics, StepCall, StepParts, as_tree, disk_of
from shardfn.graph import Choice, Schedule
from shardfn.state import Likeness, TrainState, as_graph_value, returned, scale_of, taken

from ._graphs import Graphs, Ready, signature
from ._opened import GradientCall, Passed, kept_apart, run_update
from ._traced_opened import (
    GradientProgram,
    UpdateProgram,
    capture_gradients,
    capture_update,
)
from ._traced_step import StepProgram, capture_step
from ._update import blocks_of, next_state


class CapturedSteps:
    """The graphs of one step, by signature.

    Args:
        jitted: how to schedule and compile.
        parts: the parts of the step.
    """

    def __init__(self, jitted: Jitted, parts: StepParts) -> None:
        self._graphs, self._parts, self._policy = Graphs(jitted), parts, policy_in(parts.loss)

    def call(self, plan: Plan, state: TrainState, args: tuple[Any, ...]) -> StepCall:
        """One step, by the graph of its arguments' signature; there is one for even batches and one for uneven ones."""
        # A state of the optimizer may come with another structure or in other memory under the same plan.
        rest = *signature(plan, args), _layouts((state.params, state.opt_state, state.model_state))
        keys = (*rest, True), (*rest, False)

        def run(comms: Comms, agreed: Agreed) -> tuple[TrainState, dict[str, Tensor]]:
            capture = functools.partial(self._capture, plan, state, args, even=agreed.even)
            # A phase of the optimizer has a plan, and so a graph, of its own.
            name = "a step" if plan.phase is None else f"a step in the phase {plan.phase.name!r}"
            key = keys[0 if agreed.even else 1]
            ready = self._graphs.ready(comms, key, capture, name, args[0], everywhere=agreed.ready)
            return self._execute(ready, comms, state, tree_leaves(args))

        return StepCall(run, (self._graphs.knows(keys[0]), self._graphs.knows(keys[1])))

    def gradients(self, plan: Plan, state: TrainState, args: tuple[Any, ...]) -> GradientCall:
        """The gradients of one step, by the graph of their arguments' signature."""
        # A model state that another loss has left is contiguous in each call, so one graph of these keys fits it.
        rest = *signature(plan, args), _layouts((state.params, state.model_state)), scale_of(state) is None
        keys = (("gradients", *rest[:1]), *rest[1:], True), (("gradients", *rest[:1]), *rest[1:], False)

        def run(comms: Comms, agreed: Agreed, now: TrainState) -> Found:
            def capture() -> GradientProgram:
                kept, even = now.model_state, agreed.even
                scale = scale_of(now)
                return capture_gradients(self._parts, plan, now.params, args, scale, even=even, model_state=kept)

            key = keys[0 if agreed.even else 1]
            ready = self._graphs.ready(comms, key, capture, "the gradients of a step", args[0], everywhere=agreed.ready)
            return self._differentiate(ready, comms, plan, now, args)

        return GradientCall(run, (self._graphs.knows(keys[0]), self._graphs.knows(keys[1])))

    def _differentiate(self, ready: Ready, comms: Comms, plan: Plan, state: TrainState, args: tuple[Any, ...]) -> Found:
        program: GradientProgram = ready.program
        held: list[GlobalTensor] = [*tree_leaves(state.params), *tree_leaves(state.model_state)]
        scale = scale_of(state)
        flat = [*(as_graph_value(x.held) for x in held), *tree_leaves(args), *([] if scale is None else [scale])]
        with self._naming(plan):
            outs = iter(_apart(ready(comms, disk_of(plan), flat), flat))
        grads: Blocks = {}
        for i, leaf in enumerate(plan.leaves):
            if leaf.trainable:
                x = next(outs)
                grads[i] = returned(x, Likeness(x.shape, leaf.ways.summed))
        kept, treedef = tree_flatten(state.model_state)
        new = tree_unflatten(treedef, [next(outs) for _ in kept])
        metrics = dict(zip(program.metrics, outs, strict=True))
        return Found(as_tree(plan, grads), kept_apart(new, state.model_state), metrics)

    def update(self, plan: Plan, state: TrainState, passed: Passed) -> StepCall[tuple[TrainState, Metrics]]:
        """The update by gradients, by the graph of the state's and the gradients' layouts."""
        grads = [_as_it_lies(x) for x in tree_leaves(passed.grads)]
        finish = passed.finish(self._parts)
        last = () if finish is None else passed.model_state
        key = ("update", id(plan)), ambient(), _layouts((state.params, state.opt_state, grads, last)), finish is None

        def run(comms: Comms, agreed: Agreed) -> tuple[TrainState, Metrics]:
            def capture() -> UpdateProgram:
                optimizer, params, opt_state = self._parts.optimizer, state.params, state.opt_state
                return capture_update(optimizer, plan, params, opt_state, grads, model_state=last, finish=finish)

            # All ranks have it, or all capture it: before the update decides whether it is skipped.
            ready = self._graphs.ready(comms, key, capture, "the update of a step", (), everywhere=agreed.ready)
            return run_update(
                self._parts, plan, comms, state, passed, functools.partial(self._apply, ready, plan, finish is not None)
            )

        known = self._graphs.knows(key)
        return StepCall(run, (known, known))

    def _apply(
        self,
        ready: Ready,
        plan: Plan,
        finishes: bool,
        comms: Comms,
        state: TrainState,
        grads: Blocks,
        model_state: PyTree,
    ) -> TrainState:
        program: UpdateProgram = ready.program
        last, treedef = tree_flatten(model_state)
        with self._naming(plan), taken(blocks_of(state), donate=self._parts.donate) as (params, opt_state, kept):
            held = [*tree_leaves(params), *tree_leaves(opt_state), *grads.values(), *(last if finishes else ())]
            grads.clear()
            outs = ready(comms, disk_of(plan), [as_graph_value(x) for x in held])
            put_in(kept, tree_unflatten(treedef, outs[len(program.blocks) :] if finishes else last))
        new, num = [returned(x, like) for x, like in zip(outs, program.blocks, strict=False)], len(plan.leaves)
        opt_state = tree_unflatten(program.opt_treedef, new[num:])
        return next_state(plan, state, new[:num], opt_state, tree_leaves(kept))

    def _naming(self, plan: Plan) -> AbstractContextManager[Any]:
        return noting_exceptions(self._policy, lambda: [(x.path, x.dtypes.compute) for x in plan.leaves])

    def cache_info(self) -> CacheInfo:
        """The counters of the cache of graphs."""
        return self._graphs.cache_info()

    def lower(self, plan: Plan, state: TrainState, args: tuple[Any, ...]) -> tuple[StepProgram, Schedule | Choice]:
        """Captures and schedules a step for its shapes; see `Graphs.lower`."""
        return self._graphs.lower(lambda: self._capture(plan, state, args, even=True))

    def compile(
        self, program: StepProgram, backend: str | None, comms: Comms
    ) -> Callable[[Plan, TrainState, tuple[Any, ...]], StepCall]:
        """A lowered step, called as `call` is. Collective."""
        ready = self._graphs.compile(program, backend, comms)

        def call(plan: Plan, state: TrainState, args: tuple[Any, ...]) -> StepCall:
            del plan
            return StepCall(lambda comms, agreed: self._execute(ready, comms, state, tree_leaves(args)))

        return call

    def _capture(self, plan: Plan, state: TrainState, args: tuple[Any, ...], *, even: bool) -> StepProgram:
        params, opt, kept, scale = state.params, state.opt_state, state.model_state, scale_of(state)
        return capture_step(self._parts, plan, params, opt, args, scale, even=even, model_state=kept)

    def _execute(
        self, ready: Ready, comms: Comms, state: TrainState, arg_leaves: list[Tensor]
    ) -> tuple[TrainState, dict[str, Tensor]]:
        program: StepProgram = ready.program
        num, names = len(program.plan.leaves), program.metrics
        scale = scale_of(state)
        arg_leaves = arg_leaves if scale is None else [*arg_leaves, scale]
        plan = program.plan
        try:
            with self._naming(plan), taken(blocks_of(state), donate=self._parts.donate) as held:
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


def _as_it_lies(x: GlobalTensor) -> GlobalTensor:
    """A gradient in the memory of its block, which is the host where a leaf on disk was read and changed."""
    if is_disk(x.memory_kind) and isinstance(x.held, Tensor):
        return GlobalTensor(x.held, x.shape, x.spec, x.mesh, "host")
    return x


def _apart(outs: Sequence[Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
    """The results of a graph, each in memory that an update may write to: no input's, and no other result's.

    A gradient may be an input itself, or that of two leaves, or one number for all elements.
    """
    theirs = {x.untyped_storage()._cdata for x in inputs}
    seen, out = set[int](), list[Tensor]()
    for x in outs:
        own = x.contiguous()
        if own.untyped_storage()._cdata in theirs or (own.numel() and own.data_ptr() in seen):
            own = own.clone()
        seen.add(own.data_ptr())
        out.append(own)
    return out


def _layouts(tree: PyTree) -> Any:
    """The properties of a tree of global tensors that a graph relies on."""
    leaves, treedef = tree_flatten(tree)
    held: list[StoredValue] = [x.held for x in leaves]
    kinds = [x.memory_kind for x in leaves]
    shapes = ((tuple(x.shape), x.stride() if isinstance(x, Tensor) else None, x.dtype) for x in held)
    return treedef, *kinds, *shapes
