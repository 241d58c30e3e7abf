"""The complete training step as a function of flat tensors, and its capture.

The engine itself is captured: it runs on tensors without data, with communicators that record transfers.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import GraphModule

from shardfn.capture import Recorder, capture
from shardfn.collectives import GlobalTensor, TracedChannels, TracedControl, bind_mesh
from shardfn.core import (
    Mesh,
    PyTree,
    StoredValue,
    tree_flatten,
    tree_leaves,
    tree_paths,
    tree_structure,
    tree_unflatten,
)
from shardfn.engine.agreement import Comms
from shardfn.engine.loss import NoGradientError, copied_loop, finished, put_in, warn_of_draws_in
from shardfn.engine.plan import Plan
from shardfn.engine.transfers import Metrics, Outcome, StepParts, one_step
from shardfn.graph import Leaf
from shardfn.nn import looping
from shardfn.state import Likeness, as_graph_value, codes_of, entered, graph_inputs

from ._backward import run_backward
from ._graphs import Program
from ._metrics import measure
from ._update import update_blocks


@dataclasses.dataclass(frozen=True)
class StepProgram(Program):
    """A captured step.

    Its graph takes this rank's blocks of params, optimizer state and model state (donated), a key if the loss takes
    one, and this rank's rows; it returns the new blocks and the metrics. For a block on disk it takes and returns a
    token.

    Attributes:
        plan: the layout.
        blocks: of params, optimizer state and model state.
        opt_treedef: structure of the optimizer state.
        metrics: their names, in order.
        differentiated: whether the loss gives a gradient to a trainable leaf on this rank, or no leaf is trainable.
    """

    plan: Plan
    blocks: tuple[Likeness, ...]
    opt_treedef: Any
    metrics: tuple[str, ...]
    differentiated: bool

    def check(self, exchange: Callable[[int], Sequence[int]]) -> None:
        """Refuses a loss that has a gradient on no rank; see `check_differentiated`."""
        check_differentiated(self.plan, self.differentiated, exchange)


def check_differentiated(plan: Plan, differentiated: bool, exchange: Callable[[int], Sequence[int]]) -> None:
    """Refuses a captured loss that has a gradient on no rank.

    Where only some ranks have a gradient, those of the others count as zeros.
    """
    if not any(exchange(int(differentiated))):
        raise NoGradientError(plan.trained)


def capture_step(
    parts: StepParts,
    plan: Plan,
    params: PyTree,
    opt_state: PyTree,
    args: tuple[Any, ...],
    scale: Any = None,
    *,
    even: bool,
    model_state: PyTree = (),
) -> StepProgram:
    """Captures one step; it neither computes nor sends values.

    Args:
        parts: loss and optimizer.
        plan: the layout.
        params: tree of `GlobalTensor`; only the shape, strides, dtype and device of tensors count.
        opt_state: tree of `GlobalTensor`.
        args: this rank's batch, and a key if the loss takes one.
        scale: the factor of the loss, the last input of the graph; None = no factor, and no input.
        even: whether all ranks hold batches of the same shapes.
        model_state: tree of `GlobalTensor`.
    """

    def run(step: TracedStep) -> tuple[list[Tensor], Metrics]:
        (blocks, opt, kept), metrics = one_step(step)
        return [*map(as_graph_value, (*blocks, *tree_leaves(opt), *tree_leaves(kept)))], metrics

    inputs = StepInputs(plan.for_capture(), params, opt_state, model_state, args, scale)
    gm, metrics, received = capture_run(parts, inputs, run, even=even)
    results = [(f"new {path}", x.spec.axes) for path, x in inputs.named]
    inputs.note(gm, parts, [*results, *((f"new metrics[{name!r}]", ()) for name in metrics)])
    plan, likes = inputs.plan, tuple(Likeness.of(x) for _, x in inputs.named)
    return StepProgram(gm, plan.learnt.outcome or "", plan, likes, tree_structure(opt_state), metrics, received)


class StepInputs(NamedTuple):
    """The inputs of the graph of a step or of its gradients: leaves of the state, and the other arguments of the loss.

    Attributes:
        plan: the layout, of the capture alone.
        params: tree of `GlobalTensor`.
        opt_state: tree of `GlobalTensor`; () where the optimizer has no part.
        model_state: tree of `GlobalTensor`.
        args: this rank's batch, and a key if the loss takes one.
        scale: the factor of the loss, the last input; None = no factor, and no input.
    """

    plan: Plan
    params: PyTree
    opt_state: PyTree
    model_state: PyTree
    args: tuple[Any, ...]
    scale: Any

    @property
    def named(self) -> list[tuple[str, GlobalTensor]]:
        """The leaves of the state, by path."""
        paths = [leaf.path for leaf in self.plan.leaves]
        paths += [*tree_paths(self.opt_state, "opt_state"), *tree_paths(self.model_state, "model_state")]
        held = [*tree_leaves(self.params), *tree_leaves(self.opt_state), *tree_leaves(self.model_state)]
        return list(zip(paths, held, strict=True))

    def note(self, gm: GraphModule, parts: StepParts, results: Sequence[tuple[str, tuple[str, ...]]]) -> None:
        """Notes the inputs in a graph, and its results: each with its name and the axes that cut it."""
        num, num_opt = len(self.plan.leaves), len(tree_leaves(self.opt_state))
        paths = [
            (path, "params" if i < num else "optimizer" if i < num + num_opt else "other")
            for i, (path, _) in enumerate(self.named)
        ]
        paths += [(p, "batch") for p in tree_paths(self.args[0], "batch")] + [("key", "other")] * (len(self.args) - 1)
        paths += [] if self.scale is None else [("loss_scale", "other")]
        held = [x for _, x in self.named]
        annotate(gm, self.plan.mesh, paths, held)
        warn_of_draws_in(gm)
        say_types(gm, self.plan, held, results)
        if parts.table is not None:
            gm.meta["pipeline"] = parts.table


def capture_run(
    parts: StepParts, inputs: StepInputs, run: "Callable[[TracedStep], tuple[list[Tensor], Metrics]]", *, even: bool
) -> tuple[GraphModule, tuple[str, ...], bool]:
    """Captures a step, or its gradients.

    Args:
        parts: loss and optimizer.
        inputs: those of the graph.
        run: runs the parts of the step that are captured; returns their results, and the metrics, which come last.
        even: whether all ranks hold batches of the same shapes.

    Returns:
        The graph, the names of the metrics, and whether a trainable leaf has a gradient.
    """
    plan, recorder = inputs.plan, Recorder()
    comms = traced_comms(plan, recorder)
    held = [x for _, x in inputs.named]
    likes = [Likeness.of(x) for x in held]
    arg_leaves, arg_treedef = tree_flatten((inputs.args, () if inputs.scale is None else inputs.scale))
    num, opt_treedef = len(plan.leaves), tree_structure(inputs.opt_state)
    then, kept_treedef = num + opt_treedef.num_leaves, tree_structure(inputs.model_state)
    made: list[Any] = []

    def program(*flat: Tensor) -> list[Tensor]:
        state, rest = [entered(x, like) for x, like in zip(flat, likes, strict=False)], flat[len(held) :]
        given, scaled = tree_unflatten(arg_treedef, rest)
        mine = state[:num], tree_unflatten(opt_treedef, state[num:then]), tree_unflatten(kept_treedef, state[then:])
        del state
        step = TracedStep(parts, plan, comms, mine, given, None if inputs.scale is None else scaled, even)
        with bind_mesh(plan.mesh), looping(copied_loop):
            results, metrics = run(step)
        made[:] = [tuple(metrics), step.received]
        return [*results, *metrics.values()]

    gm = capture(program, [*graph_inputs(held, plan.mesh.device), *arg_leaves], recorder)
    return gm, *made


Blocks = tuple[list[StoredValue], PyTree, PyTree]


@dataclasses.dataclass
class TracedStep:
    """An `Executor` under the tracer, whose states are this rank's blocks: params, optimizer state, model state.

    Attributes:
        received: whether any trainable leaf has got a gradient, or no leaf is trainable.
    """

    parts: StepParts
    plan: Plan
    comms: Comms
    state: Blocks
    args: tuple[Any, ...]
    loss_scale: Tensor | None
    even: bool
    received: bool = False

    def differentiate(self) -> Outcome:
        blocks, _, kept = self.state
        loss_scale, even = self.loss_scale, self.even
        out = run_backward(
            self.plan, self.comms, blocks, self.parts, self.args, even=even, model_state=kept, loss_scale=loss_scale
        )
        self.received = out.reducer.received or not self.plan.trained
        return out

    def measure(self, out: Outcome) -> tuple[Metrics, Tensor | None]:
        return measure(self.plan, out, self.loss_scale)

    def choose(self, metrics: Metrics, update: Callable[[], Blocks]) -> Blocks:
        if self.parts.skips:
            torch.ops.shardfn.stop_unless(metrics["finite"], list(metrics.values()))
        return update()

    def update(self, out: Outcome, scale: Tensor | None) -> Blocks:
        blocks, opt, kept = self.state
        with torch.no_grad():
            grads, channels = out.reducer.gradients(), self.comms.channels
            last = finished(self.parts.finish, out.model_state)
            new = update_blocks(self.plan, channels, self.parts.optimizer, blocks, opt, grads.take, scale)
            return *new, put_in(kept, last)


def traced_comms(plan: Plan, recorder: Recorder) -> Comms:
    """Communicators that record transfers."""
    return Comms(plan.mesh, TracedChannels(plan.mesh), TracedControl(plan.mesh), recorder.mark, recorder.name)


def say_types(
    gm: GraphModule, plan: Plan, held: Sequence[GlobalTensor], results: Sequence[tuple[str, tuple[str, ...]]]
) -> None:
    """Notes the types of inputs and outputs along the axes of the mesh.

    Args:
        gm: the graph, whose first inputs are `held`, params first.
        plan: the layout.
        held: global tensors.
        results: each output's name, and the axes that cut it.
    """
    inputs = [n for n in gm.graph.nodes if n.op == "placeholder"]
    entries = [Leaf(n.meta["leaf"], x.spec.axes) for n, x in zip(inputs, held, strict=False)]
    entries[: len(plan.leaves)] = [
        entry._replace(trained=leaf.trainable) for entry, leaf in zip(entries, plan.leaves, strict=False)
    ]
    for node, entry in zip(inputs, entries, strict=False):
        node.meta["enters"] = entry
    for node in inputs:
        if node.meta["kind"] == "batch":
            node.meta["enters"] = Leaf(node.meta["leaf"], plan.batch_axes)
    gm.meta["batch_axes"] = plan.batch_axes
    gm.meta["results"] = list(results)


def annotate(gm: GraphModule, mesh: Mesh, paths: Sequence[tuple[str, str]], held: Sequence[GlobalTensor]) -> None:
    """Notes the path and kind of each input, and for the first ones, `held`, their memory."""
    inputs = [n for n in gm.graph.nodes if n.op == "placeholder"]
    for node, (leaf, kind) in zip(inputs, paths, strict=True):
        node.meta["leaf"], node.meta["kind"] = leaf, kind
    for node, block in zip(inputs, held, strict=False):
        own = codes_of(block.held)
        node.meta["memory"], node.meta["stored"] = block.memory_kind, (tuple(own.shape), own.dtype)
    gm.meta["mesh_shape"] = dict(mesh.shape)
    gm.meta["coords"] = dict(mesh.coords)
    # Blocks in codes are `Stored`, and so never written over.
    gm.meta["donated"] = {n.name for n, x in zip(inputs, held, strict=False) if x.code is None}
