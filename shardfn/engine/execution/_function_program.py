"""A function over sharded leaves as a program: a forward, and nothing else."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor

from shardfn.capture import recorder
from shardfn.collectives import GlobalTensor
from shardfn.core import PyTree, tree_leaves, tree_unflatten
from shardfn.engine.agreement import Comms
from shardfn.engine.plan import Plan
from shardfn.graph import storage_of
from shardfn.leaves import check_graph

from ._argument import Argument
from ._backward import run_forward
from ._interface import (
    REMEDY,
    Interface,
    ResultPlaces,
)
from ._program import Input, Program, Results


def tensors_of(leaves: Sequence[Any]) -> list[Tensor]:
    """The inputs of a graph from some leaves: tensors, and the blocks of global tensors."""
    held = [x.local if isinstance(x, GlobalTensor) else x for x in leaves]
    return [x for x in held if isinstance(x, Tensor)]


def function_program(
    f: Callable[..., Any],
    plan: Plan,
    params: PyTree,
    arguments: Sequence[Argument],
    treedef: Any,
    interface: Interface,
) -> Program:
    """Returns `f(params, *args)` as a program. A graph of it writes to the memory of donated arguments only.

    Args:
        f: function of leaves as it sees them.
        plan: layout of the first argument.
        params: tree of `GlobalTensor`; only shape, strides, dtype and device of tensors count.
        arguments: leaves of the other arguments.
        treedef: structure of the tuple of the other arguments.
        interface: annotations of the other arguments and of the result.
    """
    seen, num = [a.seen for a in arguments], len(plan.leaves)

    def run(plan: Plan, comms: Comms, values: list[Any]) -> Results:
        given = iter(values[num:])
        args = tree_unflatten(treedef, [_filled(x, given) for x in seen])
        kept = {storage_of(x): a.path for a, x in _sharded(arguments, values[num:]) if not a.donated}
        out = run_forward(plan, comms, values[:num], "captured", interface.following(plan, f, arguments, args))
        if (notes := recorder()) is not None:
            check_graph(notes.tracer.graph, kept, "the function", "arguments", REMEDY)
        return Results(out)

    pairs = zip(plan.leaves, tree_leaves(params), strict=True)
    inputs = [Input(leaf.path, "params", x, leaf.param.axes) for leaf, x in pairs]
    for a, x in zip(arguments, seen, strict=True):
        if isinstance(x, Tensor | GlobalTensor):
            own, axes = x.local if isinstance(x, GlobalTensor) else x, () if a.spec is None else a.spec.axes
            inputs.append(Input(a.path, "batch", own, axes, donated=a.donated, on_host=a.on_host))

    def results(found: Results) -> list[tuple[str, tuple[str, ...]]]:
        return list(_results(found.tree, interface.places(found.tree, arguments), plan))

    return Program(plan, inputs, run, results)


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
