"""The calls of a single step: the step, its gradients and its update. Each runs eagerly, or by a graph per signature.

    step        differentiate, measure, choose, update                                         writes the state
    gradients   differentiate, measure, and the factor that gradients still lack               reads the state
    update      measure, choose, update                                                        writes the state

`step == update . gradients`, bit for bit: both halves are the parts of `one_step`, cut between measure and choose.
"""

import dataclasses
import operator
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch
from torch import Tensor

from shardfn.collectives import Agreed, GlobalTensor, StoppedError, list_blocks
from shardfn.core import PyTree, are_tensors, tree_flatten, tree_leaves, tree_paths, tree_unflatten
from shardfn.engine.agreement import Comms
from shardfn.engine.loss import Finish, Jitted, ambient, finished, noting_exceptions, policy_in, put_in
from shardfn.engine.plan import Plan, phase_of
from shardfn.engine.transfers import Blocks, FoundGradients, Metrics, StepParts, by_leaf, disk_of, pool_of
from shardfn.graph import Choice, Schedule
from shardfn.kernels import TensorLayouts
from shardfn.optim import GradientTransformation, Phase, bind_stats
from shardfn.state import TrainState, apart, as_graph_value, scale_of, taken

from ._graphs import Graphs, ProgramCall, Ready, signature
from ._program import CapturedProgram, Input, Program, ProgramResults, capture_program
from ._step_parts import check_backend
from ._step_run import StepRun, UpdateArgs, exact, found_of, one_step, run_gradients, run_step, run_update, skipped
from ._update import blocks_of, decided_on, next_state, update, update_blocks, whole

Result = TypeVar("Result")
# A step or an update, as a call returns it.
Stepped = tuple[TrainState, Metrics]


class StepPrograms:
    """The calls of a single step.

    Args:
        parts: loss, optimizer and flags of the step.
        jitted: how to schedule and compile the graphs, or None for eager calls.
    """

    def __init__(self, parts: StepParts, jitted: Jitted | None) -> None:
        self.parts, self.eager, self._policy = parts, jitted is None, policy_in(parts.loss)
        # For a step, gradients and an update.
        self._layouts = [_TreeLayouts() for _ in range(3)]
        # For `lower`, too, where calls are eager.
        self.graphs = Graphs(jitted or Jitted(parts.loss))

    def step(self, plan: Plan, state: TrainState, args: tuple[Any, ...]) -> ProgramCall[Stepped]:
        """Returns the call of a single step."""
        if self.eager:
            return ProgramCall(lambda comms, agreed, now: run_step(self.parts, plan, comms, now, args, agreed.even))

        phase = phase_of(self.parts.optimizer, state.opt_state)

        def make(now: TrainState, even: bool) -> Program:
            return step_program(_parts_in_phase(self.parts, plan, phase), plan, now, args, even=even)

        # A state of the optimizer may come with another structure or in other memory under the same plan.
        key = (
            *signature(plan, args),
            phase,
            self._layouts[0].describe((state.params, state.opt_state, state.model_state)),
        )
        name = "a step" if phase is None else f"a step in the phase {phase.name!r}"
        return self._call_graph(
            key, make, name, args[0], lambda ready, comms, now: self._run_step(ready, comms, now, args)
        )

    def gradients(self, plan: Plan, state: TrainState, args: tuple[Any, ...]) -> ProgramCall[FoundGradients]:
        """Returns the call of the gradients of a single step."""
        parts = self.parts
        if self.eager:
            return ProgramCall(lambda comms, agreed, now: run_gradients(parts, plan, comms, now, args, agreed.even))

        def make(now: TrainState, even: bool) -> Program:
            return gradient_program(parts, plan, now, args, even=even)

        def run(ready: Ready, comms: Comms, now: TrainState) -> FoundGradients:
            held = [x.held for x in tree_leaves((now.params, now.model_state))]
            found = self._run_graph(ready, comms, [*held, *_loss_values(args, scale_of(now))], own=True)
            grads, kept = found.tree
            return found_of(plan, by_leaf(plan, grads), kept, now, found.metrics)

        # A model state that another loss has left is contiguous in each call, so one graph of these keys fits it.
        first, *rest = signature(plan, args)
        key = (
            ("gradients", first),
            *rest,
            self._layouts[1].describe((state.params, state.model_state)),
            scale_of(state) is None,
        )
        return self._call_graph(key, make, "the gradients of a step", args[0], run)

    def update(self, plan: Plan, state: TrainState, passed: UpdateArgs) -> ProgramCall[Stepped]:
        """Returns the call of the update by gradients."""
        parts, finish = self.parts, passed.finish(self.parts)
        if self.eager:

            def apply(comms: Comms, now: TrainState, grads: Blocks, kept: PyTree) -> TrainState:
                return update(plan, comms.channels, parts, now, grads.pop, model_state=kept, finish=finish, scale=None)

            return ProgramCall(lambda comms, agreed, now: run_update(parts, plan, comms, now, passed, apply))
        grads = tree_leaves(passed.grads)
        if not plan.at_home:  # a gradient on disk that was read and changed is on the host
            grads = [x.replace_block(x.held) if isinstance(x.held, Tensor) else x for x in grads]
        last = () if finish is None else passed.model_state
        phase = phase_of(parts.optimizer, state.opt_state)

        def make(now: TrainState, even: bool) -> Program:
            del even
            optimizer = _parts_in_phase(parts, plan, phase).optimizer
            return update_program(optimizer, plan, now, grads, model_state=last, finish=finish)

        def run(ready: Ready, comms: Comms, now: TrainState) -> Stepped:
            def apply(comms: Comms, now: TrainState, grads: Blocks, kept: PyTree) -> TrainState:
                with taken(blocks_of(now), donate=parts.donate) as (params, opt_state, old):
                    held = [*tree_leaves((params, opt_state)), *grads.values()]
                    grads.clear()
                    held += [] if finish is None else tree_leaves(kept)
                    blocks, opt_state, new = self._run_graph(ready, comms, held).tree
                    old = put_in(old, kept if finish is None else new)
                return next_state(plan, now, (blocks, opt_state, old))

            return run_update(parts, plan, comms, now, passed, apply)

        # All ranks have the graph, or all capture it: before the update decides whether it is skipped.
        layouts = self._layouts[2].describe((state.params, state.opt_state, grads, last))
        key = ("update", id(plan), phase), ambient(), layouts, finish is None
        return self._call_graph(key, make, "the update of a step", (), run)

    def lower(
        self, plan: Plan, state: TrainState, args: tuple[Any, ...], phase: Phase | None
    ) -> tuple[CapturedProgram, Schedule | Choice]:
        """Captures and schedules a step for its shapes, in a phase of the optimizer. See `Graphs.lower`."""
        parts = _parts_in_phase(self.parts, plan, phase)
        return self.graphs.lower(lambda: capture_program(step_program(parts, plan, state, args, even=True)))

    def compile(
        self, program: CapturedProgram, backend: str | None, comms: Comms
    ) -> Callable[[Plan, TrainState, tuple[Any, ...]], ProgramCall[Stepped]]:
        """Returns a lowered step, which is called as `step` is. Collective.

        Raises:
            ValueError: sums are canonical, and the back end is not "graph".
        """
        check_backend(program.plan, self.graphs.resolve(backend))
        ready = self.graphs.compile(program, backend, comms)

        def call(plan: Plan, state: TrainState, args: tuple[Any, ...]) -> ProgramCall[Stepped]:
            del plan, state
            return ProgramCall(lambda comms, agreed, now: self._run_step(ready, comms, now, args))

        return call

    def _call_graph(
        self,
        key: tuple[Any, ...],
        make: Callable[[TrainState, bool], Program],
        name: str,
        batch: PyTree,
        run: Callable[[Ready, Comms, TrainState], Result],
    ) -> ProgramCall[Result]:
        """Returns a call by the graph of a signature. There is one for even batches and one for uneven batches."""
        keys = (*key, True), (*key, False)

        def call(comms: Comms, agreed: Agreed, now: TrainState) -> Result:
            def capture() -> CapturedProgram:
                return capture_program(make(now, agreed.even))

            key = keys[0 if agreed.even else 1]
            return run(self.graphs.ready(comms, key, capture, name, batch, everywhere=agreed.ready), comms, now)

        return ProgramCall(call, (self.graphs.knows(keys[0]), self.graphs.knows(keys[1])))

    def _run_step(self, ready: Ready, comms: Comms, state: TrainState, args: tuple[Any, ...]) -> Stepped:
        try:
            with taken(blocks_of(state), donate=self.parts.donate) as held:
                found = self._run_graph(ready, comms, [*tree_leaves(held), *_loss_values(args, scale_of(state))])
        except StoppedError as stopped:  # before anything was written
            return skipped(state, ready.program.metrics, stopped)
        return next_state(ready.program.plan, state, found.tree), found.metrics

    def _run_graph(self, ready: Ready, comms: Comms, values: Sequence[Any], *, own: bool = False) -> ProgramResults:
        """Runs a graph on the values of its inputs; with `own`, its results share no memory with them."""
        program: CapturedProgram = ready.program
        flat = [*values] if are_tensors(values) else [as_graph_value(x) for x in values]
        with self._naming(program.plan):
            outs = ready(comms, disk_of(program.plan), flat)
        return program.results(_separate_results(outs, flat) if own else outs)

    def _naming(self, plan: Plan) -> AbstractContextManager[Any]:
        return noting_exceptions(self._policy, lambda: [(x.path, x.dtypes.compute) for x in plan.leaves])


def _parts_in_phase(parts: StepParts, plan: Plan, phase: Phase | None) -> StepParts:
    """Returns the parts of a step with the optimizer as it steps in a phase, for a graph that reads no state."""
    if phase is None:
        return parts
    rule = bind_stats(decided_on(plan, parts.optimizer), whole(plan), phase=phase)
    needs = rule.needs._replace(resolve_masks=None, bind_stats=None, phases=None)
    return dataclasses.replace(parts, optimizer=rule._replace(needs=needs))


def step_program(parts: StepParts, plan: Plan, state: TrainState, args: tuple[Any, ...], *, even: bool) -> Program:
    """Returns one step as a program.

    Args:
        parts: loss, optimizer and flags of the step.
        plan: layout.
        state: state. Only shape, strides, dtype and device of tensors count.
        args: batch of this rank, and a key if the loss takes one.
        even: whether all ranks hold batches of the same shapes.
    """
    held, scale = (tree_leaves(state.params), state.opt_state, state.model_state), scale_of(state)
    treedef = tree_flatten((held, args, () if scale is None else scale))[1]

    def run(plan: Plan, comms: Comms, values: list[Any]) -> ProgramResults:
        blocks, given, factor = tree_unflatten(treedef, values)
        step = StepRun.of_blocks(parts, plan, comms, blocks, given, None if scale is None else factor, even=even)
        new, metrics = one_step(step)
        return ProgramResults(new, metrics, step.received)

    inputs = _state_inputs(plan, *held, donated=True)

    def results(found: ProgramResults) -> list[tuple[str, tuple[str, ...]]]:
        return [*_name_renewed(inputs), *((f"new metrics[{name!r}]", ()) for name in found.metrics)]

    return Program(plan, [*inputs, *_loss_inputs(plan, args, scale)], run, results, _list_notes(parts))


def gradient_program(parts: StepParts, plan: Plan, state: TrainState, args: tuple[Any, ...], *, even: bool) -> Program:
    """Returns a step's gradients as a program, which writes to no input. For arguments see `step_program`."""
    held, scale = (tree_leaves(state.params), (), state.model_state), scale_of(state)
    treedef = tree_flatten((held, args, () if scale is None else scale))[1]

    def run(plan: Plan, comms: Comms, values: list[Any]) -> ProgramResults:
        blocks, given, factor = tree_unflatten(treedef, values)
        step = StepRun.of_blocks(parts, plan, comms, blocks, given, None if scale is None else factor, even=even)
        grads, kept, metrics = step.gradients()
        # A gradient on disk as a separate value: others share the value of all leaves that are sent together.
        pool = pool_of(plan)
        found = [apart(x, plan.leaves[i].ways.summed, pool) for i, x in sorted(grads.items())]
        return ProgramResults((found, kept), metrics, step.received)

    inputs = _state_inputs(plan, *held, donated=False)
    # Before the end of the step, ranks may hold parts of a sum that is made there.
    free = () if parts.finish is None else plan.mesh.axis_names

    def results(found: ProgramResults) -> list[tuple[str, tuple[str, ...]]]:
        names = [(f"the gradient of {leaf.path}", leaf.shard.axes) for leaf in plan.leaves if leaf.trainable]
        names += [(name, (*axes, *free)) for name, axes in _name_renewed(inputs[len(plan.leaves) :])]
        return [*names, *((f"metrics[{name!r}]", ()) for name in found.metrics)]

    return Program(plan, [*inputs, *_loss_inputs(plan, args, scale)], run, results, _list_notes(parts))


def update_program(
    optimizer: GradientTransformation,
    plan: Plan,
    state: TrainState,
    grads: Sequence[GlobalTensor],
    *,
    model_state: PyTree = (),
    finish: Finish | None = None,
) -> Program:
    """Returns one update as a program.

    Args:
        optimizer: optimizer.
        plan: layout.
        state: state, of which params and optimizer state are updated.
        grads: gradients of the trainable leaves.
        model_state: model state that `finish` takes, or () without one. The update does not write to it.
        finish: end of the step for the model state.
    """
    held = (tree_leaves(state.params), state.opt_state, list(grads), model_state)
    treedef = tree_flatten(held)[1]

    def run(plan: Plan, comms: Comms, values: list[Any]) -> ProgramResults:
        blocks, opt_state, own, kept = tree_unflatten(treedef, values)
        with torch.no_grad(), exact(plan):
            comms.mark("update")
            kept = finished(finish, kept)
            blocks, opt_state = update_blocks(
                plan, comms.channels, optimizer, blocks, opt_state, by_leaf(plan, own).pop, None
            )
        return ProgramResults((blocks, opt_state, kept))

    state_inputs = _state_inputs(plan, *held[:2], (), donated=True)
    named = zip(plan.trained, grads, strict=True)
    given = [
        Input(f"the gradient of {path}", "other", x, x.spec.axes, donated=x.quantization is None) for path, x in named
    ]
    kept_inputs = _list_other_inputs(model_state, donated=False)
    results = [*_name_renewed(state_inputs), *_name_renewed(kept_inputs)]
    return Program(plan, [*state_inputs, *given, *kept_inputs], run, lambda found: results)


def _state_inputs(plan: Plan, params: PyTree, opt_state: PyTree, model_state: PyTree, *, donated: bool) -> list[Input]:
    """Returns the inputs of a program for the leaves of a state. Blocks in codes are never written to."""
    pairs = zip(plan.leaves, tree_leaves(params), strict=True)
    out = [
        Input(leaf.path, "params", x, x.spec.axes, leaf.trainable, donated=donated and x.quantization is None)
        for leaf, x in pairs
    ]
    named = zip(tree_paths(opt_state, "opt_state"), tree_leaves(opt_state), strict=True)
    out += [Input(path, "optimizer", x, x.spec.axes, donated=donated and x.quantization is None) for path, x in named]
    return [*out, *_list_other_inputs(model_state, donated=donated)]


def _list_other_inputs(model_state: PyTree, *, donated: bool) -> list[Input]:
    named = zip(tree_paths(model_state, "model_state"), tree_leaves(model_state), strict=True)
    return [Input(path, "other", x, x.spec.axes, donated=donated and x.quantization is None) for path, x in named]


def _loss_inputs(plan: Plan, args: tuple[Any, ...], scale: Tensor | None) -> list[Input]:
    """Returns the inputs of a program for the other arguments of a loss: batch, key, number of the step, loss scale."""
    named = zip(tree_paths(args[0], "batch"), tree_leaves(args[0]), strict=True)
    out = [Input(path, "batch", x, plan.batch_axes) for path, x in named]
    out += [Input("key" if x.ndim else "step", "other", x) for x in args[1:]]
    return out if scale is None else [*out, Input("loss_scale", "other", scale)]


def _loss_values(args: tuple[Any, ...], scale: Tensor | None) -> list[Tensor]:
    """Returns the values of the inputs that `_loss_inputs` describes."""
    return tree_leaves(args) if scale is None else [*tree_leaves(args), scale]


def _name_renewed(inputs: Sequence[Input]) -> list[tuple[str, tuple[str, ...]]]:
    """Returns names and axes of results that take the places of inputs."""
    return [(f"new {x.path}", x.axes or ()) for x in inputs]


def _list_notes(parts: StepParts) -> dict[str, Any]:
    return {} if parts.table is None else {"pipeline": parts.table}


def _separate_results(outs: Sequence[Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
    """Returns the results of a graph in memory that an update may write to: shared with no input, and no other result.

    A gradient may be an input itself, or the gradient of two leaves, or one number for all elements.
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


class _TreeLayouts:
    """The properties of trees of global tensors that a graph relies on. Those of the last tree are kept."""

    def __init__(self) -> None:
        self._last: tuple[Any, list[Any], TensorLayouts, Any] | None = None

    def describe(self, tree: PyTree) -> Any:
        """Returns structure, memories, shapes, strides and dtypes of a tree."""
        leaves, treedef = tree_flatten(tree)
        held, kinds = list_blocks(leaves), [*map(_MEMORY_KIND, leaves)]
        last = self._last
        if last is not None and are_tensors(held) and (treedef, kinds) == last[:2] and last[2].match(held):
            return last[3]
        shapes = ((tuple(x.shape), x.stride() if isinstance(x, Tensor) else None, x.dtype) for x in held)
        found = treedef, *kinds, *shapes
        if are_tensors(held):
            self._last = treedef, kinds, TensorLayouts(held), found
        return found


_MEMORY_KIND = operator.attrgetter("memory_kind")
