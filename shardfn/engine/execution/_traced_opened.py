"""The captures of a step's two halves: its gradients, and the update that takes them."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from shardfn.capture import Recorder, capture
from shardfn.collectives import GlobalTensor, bind_mesh
from shardfn.core import PyTree, tree_flatten, tree_leaves, tree_paths, tree_unflatten
from shardfn.engine.loss import Finish, finished
from shardfn.engine.plan import Plan
from shardfn.engine.transfers import Metrics, StepParts, by_leaf, pool_of
from shardfn.optim import GradientTransformation
from shardfn.state import Likeness, apart, as_graph_value, entered, graph_inputs

from ._graphs import Program
from ._opened import gradients_of
from ._traced_step import (
    StepInputs,
    TracedStep,
    annotate,
    capture_run,
    check_differentiated,
    say_types,
    traced_comms,
)
from ._update import update_blocks


@dataclasses.dataclass(frozen=True)
class GradientProgram(Program):
    """The captured gradients of a step.

    Its graph takes this rank's blocks of params and model state, which it does not write, a key if the loss takes one,
    this rank's rows, and the loss scale if there is one. It returns the gradients of trainable leaves, the blocks of
    the new model state, and the metrics. For a gradient on disk it returns a token.

    Attributes:
        plan: the layout.
        metrics: their names, in order.
        differentiated: whether the loss gives a gradient to a trainable leaf on this rank, or no leaf is trainable.
    """

    plan: Plan
    metrics: tuple[str, ...]
    differentiated: bool

    def check(self, exchange: Callable[[int], Sequence[int]]) -> None:
        """Refuses a loss that has a gradient on no rank; see `check_differentiated`."""
        check_differentiated(self.plan, self.differentiated, exchange)


@dataclasses.dataclass(frozen=True)
class UpdateProgram(Program):
    """The captured update of a step.

    Its graph takes this rank's blocks of params, optimizer state and gradients (donated), and returns the new blocks of
    params and optimizer state. For a block on disk it takes and returns a token. Where the step has an end for the
    model state, the graph also takes that of the last microbatch, and returns the finished one.

    Attributes:
        plan: the layout.
        blocks: of params and optimizer state.
        opt_treedef: structure of the optimizer state.
    """

    plan: Plan
    blocks: tuple[Likeness, ...]
    opt_treedef: Any


def capture_gradients(
    parts: StepParts,
    plan: Plan,
    params: PyTree,
    args: tuple[Any, ...],
    scale: Any = None,
    *,
    even: bool,
    model_state: PyTree = (),
) -> GradientProgram:
    """Captures the gradients of one step; it neither computes nor sends values. For arguments see `capture_step`."""

    def run(step: TracedStep) -> tuple[list[Tensor], Metrics]:
        grads, kept, metrics = gradients_of(step, step.plan)
        # A gradient on disk as a value of its own: others share the value of all leaves that travel together.
        plan, pool = step.plan, pool_of(step.plan)
        found = [apart(x, plan.leaves[i].ways.summed, pool) for i, x in sorted(grads.items())]
        values = [as_graph_value(x) for x in found]
        return [*values, *tree_leaves(kept)], metrics

    inputs = StepInputs(plan.for_capture(), params, (), model_state, args, scale)
    plan = inputs.plan
    gm, metrics, received = capture_run(parts, inputs, run, even=even)
    results = [(f"the gradient of {leaf.path}", leaf.shard.axes) for leaf in plan.leaves if leaf.trainable]
    # Before the end of the step, ranks may hold parts of a sum that is made there.
    free = () if parts.finish is None else plan.mesh.axis_names
    results += [(f"new {path}", (*x.spec.axes, *free)) for path, x in inputs.named[len(plan.leaves) :]]
    inputs.note(gm, parts, [*results, *((f"metrics[{name!r}]", ()) for name in metrics)])
    gm.meta["donated"] = set()
    return GradientProgram(gm, plan.learnt.outcome or "", plan, metrics, received)


def capture_update(
    optimizer: GradientTransformation,
    plan: Plan,
    params: PyTree,
    opt_state: PyTree,
    grads: Sequence[GlobalTensor],
    *,
    model_state: PyTree = (),
    finish: Finish | None = None,
) -> UpdateProgram:
    """Captures one update; it neither computes nor sends values.

    Args:
        optimizer: the optimizer.
        plan: the layout.
        params: tree of `GlobalTensor`; only the shape, strides, dtype and device of tensors count.
        opt_state: tree of `GlobalTensor`.
        grads: those of the trainable leaves.
        model_state: tree of `GlobalTensor`, that `finish` takes; () without one.
        finish: the end of the step for the model state.
    """
    plan, recorder = plan.for_capture(), Recorder()
    comms = traced_comms(plan, recorder)
    opt_leaves, opt_treedef = tree_flatten(opt_state)
    last, kept_treedef = tree_flatten(model_state)
    held: list[GlobalTensor] = [*tree_leaves(params), *opt_leaves, *grads, *last]
    likes = [Likeness.of(x) for x in held]
    num, then, ends = len(plan.leaves), len(plan.leaves) + len(opt_leaves), len(held) - len(last)

    def program(*flat: Tensor) -> list[Tensor]:
        state = [entered(x, like) for x, like in zip(flat, likes, strict=True)]
        opt, own = tree_unflatten(opt_treedef, state[num:then]), by_leaf(plan, state[then:ends])
        blocks, kept = state[:num], tree_unflatten(kept_treedef, state[ends:])
        del state
        with bind_mesh(plan.mesh), torch.no_grad():
            comms.mark("update")
            kept = finished(finish, kept)
            blocks, opt = update_blocks(plan, comms.channels, optimizer, blocks, opt, own.pop, None)
        return [*map(as_graph_value, (*blocks, *tree_leaves(opt), *tree_leaves(kept)))]

    gm = capture(program, graph_inputs(held, plan.mesh.device), recorder)
    paths = [(leaf.path, "params") for leaf in plan.leaves]
    paths += [(p, "optimizer") for p in tree_paths(opt_state, "opt_state")]
    paths += [(f"the gradient of {path}", "other") for path in plan.trained]
    kept_paths = tree_paths(model_state, "model_state")
    paths += [(path, "other") for path in kept_paths]
    annotate(gm, plan.mesh, paths, held)
    inputs = [n.name for n in gm.graph.nodes if n.op == "placeholder"]
    gm.meta["donated"] -= {*inputs[ends:]}  # its caller keeps it
    results = [(f"new {path}", x.spec.axes) for (path, _), x in zip(paths, held[:then], strict=False)]
    results += [(f"new {path}", x.spec.axes) for path, x in zip(kept_paths, last, strict=True)]
    say_types(gm, plan, held, results)
    return UpdateProgram(gm, plan.learnt.outcome or "", plan, tuple(likes[:then]), opt_treedef)
