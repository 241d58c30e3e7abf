"""A call on a single rank as a program of tensors, and its capture as a graph.

    Program             inputs, run, results        a step, its gradients, its update, or a function
    capture_program     Program -> CapturedProgram  a graph, and the way from its outputs to the results

The engine itself is captured: it runs on tensors without data, with communicators that record transfers. An eager call
runs the same `run` on its real blocks.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

from torch import Tensor
from torch.fx import GraphModule, Node

from shardfn.capture import Recorder, capture, traced_once
from shardfn.collectives import GlobalTensor, TracedChannels, TracedControl, bind_mesh
from shardfn.core import Placement, PyTree, tree_flatten, tree_unflatten
from shardfn.engine.agreement import Comms
from shardfn.engine.loss import NoGradientError, ResultSlot, copied_loop, slot_of, warn_of_draws_in
from shardfn.engine.plan import Plan
from shardfn.engine.transfers import Metrics
from shardfn.graph import Leaf
from shardfn.memory import QuantizedBlocks, TracedStored
from shardfn.nn import looping
from shardfn.state import Likeness, as_graph_value, codes_of, entered, graph_inputs, returned


class Input(NamedTuple):
    """One input of a program.

    Attributes:
        path: name of the input.
        kind: "params", "optimizer", "batch" or "other".
        value: value of the input, of which a capture reads shape, strides, dtype and device. The program gets the block
            of a `GlobalTensor` in its stored form.
        axes: axes of the mesh that cut the value, or None for a value without a type along axes.
        trained: whether the loss gives the input a gradient.
        donated: whether the program may write to the memory of the input.
        on_host: whether a tensor is in the memory of the host.
    """

    path: str
    kind: str
    value: GlobalTensor | Tensor
    axes: tuple[str, ...] | None = None
    trained: bool = False
    donated: bool = False
    on_host: bool = False


class ProgramResults(NamedTuple):
    """The results of a program.

    Attributes:
        tree: tree of blocks, tensors and other values.
        metrics: metrics by name.
        differentiated: whether a trainable leaf has a gradient on this rank, or no leaf is trainable, or None for a
            program without gradients.
    """

    tree: PyTree
    metrics: Metrics = {}  # noqa: RUF012  # never written to
    differentiated: bool | None = None


class Program(NamedTuple):
    """A call on a single rank, which can run eagerly or be captured.

    Attributes:
        plan: layout of the parameters.
        inputs: inputs, the `GlobalTensor`s first.
        run: function of a plan of that layout, of communicators and of the values of the inputs.
        results: gives name and axes for each output of a graph, from the results of `run`.
        notes: further notes in the graph, by name.
    """

    plan: Plan
    inputs: list[Input]
    run: Callable[[Plan, Comms, list[Any]], ProgramResults]
    results: Callable[[ProgramResults], list[tuple[str, tuple[str, ...]]]]
    notes: dict[str, Any] = {}  # noqa: RUF012  # never written to


@dataclasses.dataclass(frozen=True)
class CapturedProgram:
    """A captured program. Its graph takes the tensors of the inputs, and returns the tensors of the results.

    For a block on disk the graph takes and returns a token.

    Attributes:
        gm: graph.
        outcome: description of the results, which must be equal on all ranks.
        plan: layout.
        treedef: structure of the results.
        leaves: leaves of the results: a slot for each tensor, and any other value as in the capture.
        metrics: names of the metrics, in the order of the outputs.
        differentiated: see `ProgramResults`.
        plain: whether all leaves of the results are plain tensors.
    """

    gm: GraphModule
    outcome: str
    plan: Any = None
    treedef: Any = None
    leaves: Sequence[Any] = ()
    metrics: tuple[str, ...] = ()
    differentiated: bool | None = None
    plain: bool = False

    def check(self, exchange: Callable[[int], Sequence[int]]) -> None:
        """Refuses a loss that has a gradient on no rank.

        Where only some ranks have a gradient, the gradients of the others count as zeros.

        Args:
            exchange: function that gives all ranks each rank's number.
        """
        if self.differentiated is not None and not any(exchange(int(self.differentiated))):
            raise NoGradientError(self.plan.trained)

    def results(self, outs: Sequence[Any]) -> ProgramResults:
        """Returns the results, made of the outputs of the graph."""
        num = len(outs) - len(self.metrics)
        leaves: Sequence[Any] = outs[:num]
        if not self.plain:
            values = iter(leaves)
            leaves = [x.fill(next(values)) if isinstance(x, ResultSlot | _BlockSlot) else x for x in self.leaves]
        return ProgramResults(tree_unflatten(self.treedef, leaves), dict(zip(self.metrics, outs[num:], strict=True)))

    def abstract_result(self) -> PyTree:
        """Returns the results without data, from the capture."""
        (outs,) = self.gm.graph.output_node().args
        return self.results([x.meta["val"] for x in cast("Sequence[Node]", outs)]).tree


class _BlockSlot(NamedTuple):
    """The place of a block in the results that is kept elsewhere than in a plain tensor."""

    like: Likeness

    def fill(self, x: Tensor) -> Any:
        """Returns the block."""
        return returned(x, self.like)


def capture_program(program: Program) -> CapturedProgram:
    """Captures a program; neither computes nor sends values."""
    plan, recorder = program.plan.for_capture(), Recorder()
    comms = Comms(
        plan.mesh, TracedChannels(plan.mesh, traced_once), TracedControl(plan.mesh), recorder.mark, recorder.name
    )
    blocks = [x.value for x in program.inputs if isinstance(x.value, GlobalTensor)]
    tensors = [x.value for x in program.inputs if isinstance(x.value, Tensor)]
    likes = [Likeness.of(x) for x in blocks]
    made: list[Any] = []

    def traced(*flat: Tensor) -> list[Tensor]:
        values = [entered(x, like) for x, like in zip(flat, likes, strict=False)]
        with bind_mesh(plan.mesh), looping(copied_loop):
            found = program.run(plan, comms, [*values, *flat[len(likes) :]])
        leaves, treedef = tree_flatten(found.tree)
        slots = [_slot_of(x) for x in leaves]
        made[:] = [found, treedef, slots, program.results(found)]
        return [
            *(_tensor_of(x) for x, slot in zip(leaves, slots, strict=True) if slot is not x),
            *found.metrics.values(),
        ]

    gm = capture(traced, [*graph_inputs(blocks, plan.mesh.device), *tensors], recorder)
    found, treedef, slots, named = made
    _note_inputs(gm, program.inputs)
    gm.meta["mesh_shape"], gm.meta["coords"] = dict(plan.mesh.shape), dict(plan.mesh.coords)
    gm.meta["batch_axes"], gm.meta["results"] = plan.batch_axes, named
    gm.meta |= program.notes
    if found.differentiated is not None:
        warn_of_draws_in(gm)
    outcome = plan.learnt.outcome or f"a tree {treedef}"
    plain = all(isinstance(x, ResultSlot) and x.like is None for x in slots)
    return CapturedProgram(gm, outcome, plan, treedef, slots, tuple(found.metrics), found.differentiated, plain)


def _note_inputs(gm: GraphModule, inputs: Sequence[Input]) -> None:
    """Notes name, kind, memory and type of each input, and the inputs that the graph may write to."""
    nodes = [n for n in gm.graph.nodes if n.op == "placeholder"]
    for node, x in zip(nodes, inputs, strict=True):
        node.meta["leaf"], node.meta["kind"] = x.path, x.kind
        if x.axes is not None:
            node.meta["enters"] = Leaf(x.path, x.axes, x.trained)
        if isinstance(x.value, GlobalTensor):
            own = codes_of(x.value.held)
            node.meta["memory"], node.meta["stored"] = x.value.memory_kind, (tuple(own.shape), own.dtype)
        elif x.on_host:
            node.meta["memory"] = "host"
    gm.meta["donated"] = {n.name for n, x in zip(nodes, inputs, strict=True) if x.donated}


def _slot_of(x: Any) -> Any:
    """Returns the place of a leaf of the results. A leaf without a tensor is its own place."""
    if isinstance(x, TracedStored | QuantizedBlocks):
        kept = Placement(memory_kind=x.kind, dtype=x.dtype, quantization=x.quantization)
        return _BlockSlot(Likeness(x.shape, kept))
    return slot_of(x)


def _tensor_of(x: Any) -> Tensor:
    """Returns the tensor of a leaf of the results in the graph."""
    return x.local if isinstance(x, GlobalTensor) else as_graph_value(x)
