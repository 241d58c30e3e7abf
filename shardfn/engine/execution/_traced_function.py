"""A function over sharded leaves as a function of flat tensors, and its capture: a forward, and nothing else."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

from torch import Tensor
from torch.fx import Node

from shardfn.capture import Recorder, capture
from shardfn.collectives import GlobalTensor, TracedChannels, TracedControl, bind_mesh
from shardfn.core import PyTree, tree_flatten, tree_leaves, tree_unflatten
from shardfn.engine.agreement import Comms
from shardfn.engine.loss import ResultSlot, copied_loop, slot_of
from shardfn.engine.plan import Plan
from shardfn.graph import Leaf, storage_of
from shardfn.leaves import check_graph
from shardfn.nn import looping
from shardfn.state import Likeness, entered, graph_inputs

from ._argument import Argument
from ._backward import run_forward
from ._graphs import Program
from ._interface import (
    REMEDY,
    Interface,
    ResultPlaces,
)
from ._traced_step import annotate


@dataclasses.dataclass(frozen=True)
class FunctionProgram(Program):
    """A captured function.

    Its graph takes this rank's blocks of the first argument, then the tensors of the others; it returns the tensors of
    the result. Only the memory of donated arguments is written to.

    Attributes:
        treedef: the structure of the result.
        leaves: its leaves: a `ResultSlot` for each tensor, and any other value as the function returned it in the
            capture.
    """

    treedef: Any
    leaves: list[Any]

    def result(self, outs: Sequence[Any]) -> PyTree:
        """The result, made of the graph's outputs."""
        values = iter(outs)
        return tree_unflatten(
            self.treedef, [x.fill(next(values)) if isinstance(x, ResultSlot) else x for x in self.leaves]
        )

    def abstract_result(self) -> PyTree:
        """The result without data, from the capture."""
        (outs,) = self.gm.graph.output_node().args
        return self.result([x.meta["val"] for x in cast("Sequence[Node]", outs)])


def tensors_of(leaves: Sequence[Any]) -> list[Tensor]:
    """The inputs of a graph from some leaves: tensors, and the blocks of global tensors."""
    held = [x.local if isinstance(x, GlobalTensor) else x for x in leaves]
    return [x for x in held if isinstance(x, Tensor)]


def capture_function(
    f: Callable[..., Any],
    plan: Plan,
    params: PyTree,
    arguments: Sequence[Argument],
    treedef: Any,
    interface: Interface,
) -> FunctionProgram:
    """Captures `f(params, *args)`; it neither computes nor sends values.

    Args:
        f: the function, of leaves as it sees them.
        plan: the layout of its first argument.
        params: tree of `GlobalTensor`; only the shape, strides, dtype and device of tensors count.
        arguments: the leaves of the others.
        treedef: the structure of the tuple of the others.
        interface: how the result is cut.
    """
    plan, recorder = plan.for_capture(), Recorder()
    comms = Comms(plan.mesh, TracedChannels(plan.mesh), TracedControl(plan.mesh), recorder.mark)
    held: list[GlobalTensor] = tree_leaves(params)
    seen, likes = [a.seen for a in arguments], [Likeness.of(x) for x in held]
    made: list[Any] = []

    def program(*flat: Tensor) -> list[Tensor]:
        blocks, given = [entered(x, like) for x, like in zip(flat, likes, strict=False)], iter(flat[len(held) :])
        args = tree_unflatten(treedef, [_filled(x, given) for x in seen])
        kept = {storage_of(x): a.path for a, x in _sharded(arguments, flat[len(held) :]) if not a.donated}
        with bind_mesh(plan.mesh), looping(copied_loop):
            out = run_forward(plan, comms, blocks, "captured", interface.following(plan, f, arguments, args))
            check_graph(recorder.tracer.graph, kept, "the function", "arguments", REMEDY)
        leaves, structure = tree_flatten(out)
        made[:] = [structure, [slot_of(x) for x in leaves], list(_results(out, interface.places(out, arguments), plan))]
        return tensors_of(leaves)

    gm = capture(program, [*graph_inputs(held, plan.mesh.device), *tensors_of(seen)], recorder)
    given = [a for a, x in zip(arguments, seen, strict=True) if isinstance(x, Tensor | GlobalTensor)]
    named = [(x.path, "params") for x in plan.leaves] + [(a.path, "batch") for a in given]
    annotate(gm, plan.mesh, named, held)
    inputs = [n for n in gm.graph.nodes if n.op == "placeholder"]
    known = [Leaf(x.path, x.param.axes) for x in plan.leaves]
    known += [Leaf(a.path, a.spec.axes if a.spec is not None else ()) for a in given]
    for node, leaf in zip(inputs, known, strict=True):
        node.meta["enters"] = leaf
    for node, a in zip(inputs[len(held) :], given, strict=True):
        if a.on_host:
            node.meta["memory"] = "host"
    gm.meta["donated"] = {n.name for n, a in zip(inputs[len(held) :], given, strict=True) if a.donated}
    gm.meta["batch_axes"], gm.meta["results"] = plan.batch_axes, made[2]
    return FunctionProgram(gm, f"a tree {made[0]}", made[0], made[1])


def _filled(x: Any, given: Iterator[Tensor]) -> Any:
    """A leaf of an argument, of the tensors of the capture."""
    if isinstance(x, GlobalTensor):
        return GlobalTensor(next(given), x.shape, x.spec, x.mesh)
    return next(given) if isinstance(x, Tensor) else x


def _sharded(arguments: Sequence[Argument], flat: Sequence[Tensor]) -> Iterator[tuple[Argument, Tensor]]:
    """The sharded arguments, each with its tensor of the capture."""
    given = iter(flat)
    for a in arguments:
        x = next(given) if isinstance(a.given, Tensor | GlobalTensor) else None
        if a.spec is not None and x is not None:
            yield a, x


def _results(out: PyTree, places: ResultPlaces, plan: Plan) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Path of each tensor of the result, and the axes along which it may differ: all, where there is no spec."""
    for path, x, spec in zip(places.paths, tree_leaves(out), places.specs, strict=True):
        if isinstance(x, Tensor | GlobalTensor):
            yield path, plan.mesh.axis_names if spec is None else spec.axes
