"""A function over sharded leaves as a program: a forward, and nothing else, and its calls, eager or by a graph."""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardfn.capture import recorder
from shardfn.collectives import Agreed, GlobalTensor
from shardfn.core import PyTree, tree_leaves, tree_unflatten
from shardfn.engine.agreement import Comms
from shardfn.engine.loss import Jitted, leaf_signature
from shardfn.engine.plan import Plan
from shardfn.engine.transfers import disk_of
from shardfn.graph import Choice, Schedule, storage_of
from shardfn.leaves import check_graph
from shardfn.modules import computing_in
from shardfn.state import as_graph_value

from ._arguments import Argument
from ._graphs import Graphs, ProgramCall, Ready, signature
from ._interface import (
    REMEDY,
    Interface,
    ResultPlaces,
)
from ._program import CapturedProgram, Input, Program, ProgramResults, capture_program
from ._run_backward import run_forward

# Functions whose order of gathers a layout remembers.
MAX_APPLIED = 16


class FunctionArgs(NamedTuple):
    """The arguments of a call of a sharded function.

    Attributes:
        plan: layout of the first argument.
        params: first argument, a tree of `GlobalTensor`.
        arguments: leaves of the other arguments.
        treedef: structure of the tuple of the other arguments.
    """

    plan: Plan
    params: PyTree
    arguments: list[Argument]
    treedef: Any

    def moved(self, device: torch.device) -> "FunctionArgs":
        """Returns the arguments with blocks that are kept elsewhere on the device."""
        return FunctionArgs(self.plan, self.params, [a.moved(device) for a in self.arguments], self.treedef)


class FunctionPrograms:
    """The calls of a single function. An eager call leaves only the order of use, in its plan.

    Args:
        f: function of leaves as it sees them.
        interface: annotations of the arguments beyond the first, and of the result.
        what: the call, in words.
        compute: dtype in which parameters that modules make are computed, or None without a policy.
        jitted: how to schedule and compile the graphs, or None for eager calls.
    """

    def __init__(
        self,
        f: Callable[..., Any],
        interface: Interface,
        what: str,
        compute: torch.dtype | None,
        jitted: Jitted | None,
    ) -> None:
        self._f, self._interface, self._what, self._compute = f, interface, what, compute
        self.eager = jitted is None
        # Of `lower`, too, where calls are eager.
        self.graphs = Graphs(jitted or Jitted(f))

    def call(self, given: FunctionArgs) -> ProgramCall[PyTree]:
        """Returns the call of the function."""
        if self.eager:
            return self._run_eager(given)
        key = self.signature(given)

        def run(comms: Comms, agreed: Agreed, now: FunctionArgs) -> PyTree:
            return self._run_graph(self.ready(comms, key, now, everywhere=agreed.ready), comms, now)

        known = self.graphs.knows(key)
        return ProgramCall(run, (known, known))

    def _run_eager(self, given: FunctionArgs) -> ProgramCall[PyTree]:
        plan, key = given.plan, (self._what, self._f)

        def run(comms: Comms, agreed: Agreed, given: FunctionArgs) -> PyTree:
            # A rank may have forgotten an order that others have learnt: then all learn it again.
            if not agreed.ready:
                plan.learnt.forget_order(key)
            args = tree_unflatten(given.treedef, [a.seen for a in given.arguments])
            held = [x.held for x in tree_leaves(given.params)]
            with computing_in(self._compute):
                f = self._interface.following(plan, self._f, given.arguments, args)
                out = run_forward(plan, comms, held, key, f)
            plan.learnt.forget_orders(MAX_APPLIED)
            return out

        known = key in plan.learnt.use_orders
        return ProgramCall(run, (known, known))

    def signature(self, given: FunctionArgs) -> Any:
        """Returns the signature of a call, which determines its graph.

        Raises:
            TypeError: an argument is neither a tensor nor hashable.
        """
        held = [x.held for x in tree_leaves(given.params)]
        layouts = tuple(x.stride() if isinstance(x, Tensor) else x.shape for x in held)
        leaves = (leaf_signature(a.given) for a in given.arguments)
        key = *signature(given.plan, ()), given.treedef, layouts, *leaves
        try:
            hash(key)
        except TypeError as error:
            raise TypeError(f"an argument of a jitted function is neither a tensor nor hashable: {error}.") from error
        return key

    def ready(self, comms: Comms, key: Any, given: FunctionArgs, *, everywhere: bool, expected: bool = False) -> Ready:
        """Returns the graph of a signature. See `Graphs.ready`."""
        shown = {a.path: a.given for a in given.arguments}
        capture = functools.partial(self._capture_function, given)
        return self.graphs.ready(comms, key, capture, self._what, shown, everywhere=everywhere, expected=expected)

    def lower(self, given: FunctionArgs) -> tuple[CapturedProgram, Schedule | Choice]:
        """Captures and schedules the function for its shapes. See `Graphs.lower`."""
        return self.graphs.lower(functools.partial(self._capture_function, given))

    def compile(
        self, program: CapturedProgram, backend: str | None, comms: Comms
    ) -> Callable[[FunctionArgs], ProgramCall[PyTree]]:
        """Returns a lowered function, which is called as `call` is. Collective."""
        ready = self.graphs.compile(program, backend, comms)
        return lambda given: ProgramCall(lambda comms, agreed, now: self._run_graph(ready, comms, now))

    def _capture_function(self, given: FunctionArgs) -> CapturedProgram:
        with computing_in(self._compute):
            return capture_program(function_program(self._f, given, self._interface))

    def _run_graph(self, ready: Ready, comms: Comms, given: FunctionArgs) -> PyTree:
        blocks = [as_graph_value(x.held) for x in tree_leaves(given.params)]
        flat = [*blocks, *_tensors_of([a.seen for a in given.arguments])]
        return ready.program.results(ready(comms, disk_of(given.plan), flat)).tree


def function_program(f: Callable[..., Any], args: FunctionArgs, interface: Interface) -> Program:
    """Returns `f(params, *args)` as a program. A graph of it writes to the memory of donated arguments only.

    Args:
        f: function of leaves as it sees them.
        args: arguments, of which only shape, strides, dtype and device of tensors count.
        interface: annotations of the arguments beyond the first, and of the result.
    """
    arguments = args.arguments
    seen, num = [a.seen for a in arguments], len(args.plan.leaves)

    def run(plan: Plan, comms: Comms, values: list[Any]) -> ProgramResults:
        given = iter(values[num:])
        rest = tree_unflatten(args.treedef, [_fill_leaf(x, given) for x in seen])
        kept = {storage_of(x): a.path for a, x in _iterate_sharded(arguments, values[num:]) if not a.donated}
        out = run_forward(plan, comms, values[:num], "captured", interface.following(plan, f, arguments, rest))
        if (notes := recorder()) is not None:
            check_graph(notes.tracer.graph, kept, "the function", "arguments", REMEDY)
        return ProgramResults(out)

    pairs = zip(args.plan.leaves, tree_leaves(args.params), strict=True)
    inputs = [Input(leaf.path, "params", x, leaf.param.axes) for leaf, x in pairs]
    for a, x in zip(arguments, seen, strict=True):
        if isinstance(x, Tensor | GlobalTensor):
            own, axes = x.local if isinstance(x, GlobalTensor) else x, () if a.spec is None else a.spec.axes
            inputs.append(Input(a.path, "batch", own, axes, donated=a.donated, on_host=a.on_host))

    def results(found: ProgramResults) -> list[tuple[str, tuple[str, ...]]]:
        return list(_describe_results(found.tree, interface.places(found.tree, arguments), args.plan))

    return Program(args.plan, inputs, run, results)


def _tensors_of(leaves: Sequence[Any]) -> list[Tensor]:
    """Returns the inputs of a graph from some leaves: tensors, and the blocks of global tensors."""
    held = [x.local if isinstance(x, GlobalTensor) else x for x in leaves]
    return [x for x in held if isinstance(x, Tensor)]


def _fill_leaf(x: Any, given: Iterator[Tensor]) -> Any:
    """Returns a leaf of an argument, of the tensors of the capture."""
    if isinstance(x, GlobalTensor):
        return GlobalTensor(next(given), x.shape, x.spec, x.mesh)
    return next(given) if isinstance(x, Tensor) else x


def _iterate_sharded(arguments: Sequence[Argument], flat: Sequence[Tensor]) -> Iterator[tuple[Argument, Tensor]]:
    """Yields the sharded arguments, each with its tensor of the capture."""
    given = iter(flat)
    for a in arguments:
        x = next(given) if isinstance(a.given, Tensor | GlobalTensor) else None
        if a.spec is not None and x is not None:
            yield a, x


def _describe_results(out: PyTree, places: ResultPlaces, plan: Plan) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Path of each tensor of the result, and the axes along which it may differ: all, where there is no spec."""
    for path, x, spec in zip(places.paths, tree_leaves(out), places.specs, strict=True):
        if isinstance(x, Tensor | GlobalTensor):
            yield path, plan.mesh.axis_names if spec is None else spec.axes
