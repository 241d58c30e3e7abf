"""`BoundCall`: a captured sharded function, prepared once for a single layout of its arguments, for calls that repeat.

The law: `f.bind(params, *args)(params, *args) == f(params, *args)`, bit for bit, also for other values of the layout.
A call has no agreement of ranks and no exchange of shapes: both happened in `bind`. `Blocks` has the rules for memory
that both ways of calling share: which blocks may be written, and which the result may keep.
"""

import collections
import operator
from collections.abc import Callable, Container, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardfn.collectives import AnyControl, GlobalTensor, bind_mesh, transforming
from shardfn.core import (
    Mesh,
    P,
    PyTree,
    raise_all,
    tree_flatten,
    tree_leaves,
    tree_paths,
    tree_unflatten,
)
from shardfn.engine.agreement import comms_of, losing_no_peer
from shardfn.engine.execution import REMEDY, Argument, FunctionArgs, Interface, Ready, on_device, taking_the_place_of
from shardfn.engine.loss import ResultSlot, agree_on_step, ambient, leaf_signature
from shardfn.engine.transfers import disk_of
from shardfn.graph import MemoryAnalysis, memory_analysis
from shardfn.state import as_graph_value, taken, version_of

_REMEDY = "Bind the function again for this layout, or call it without bind."


class ResultLayout(NamedTuple):
    """The layout of a result that is cut, and if it takes the place of a donated leaf, the index of that argument."""

    shape: torch.Size
    spec: P
    owner: int | None = None


def layouts_of(
    out: PyTree, arguments: Sequence[Argument], interface: Interface, control: AnyControl
) -> list[ResultLayout | None]:
    """Returns the layouts of a result, from its blocks without data. Collective where one is cut."""
    places, leaves = interface.places(out, arguments), tree_leaves(out)
    cut = interface.cut_shapes(leaves, places, interface.shapes_by(control))
    found = [ResultLayout(*cut[i]) if i in cut else None for i in range(len(leaves))]
    for i, a in enumerate(places.owners):
        if a is not None:
            found[i] = ResultLayout(a.given.shape, a.given.spec, arguments.index(a))
    return found


class BoundCall:
    """A captured sharded function for arguments of a single layout; made by `Sharded.bind`, which documents it.

    Args:
        what: the call, in words.
        ready: the graph.
        mesh: the function's mesh.
        given: the arguments.
        results: for each leaf of the result, its layout, or None where it is passed on.
        check_every: the number of calls from one agreement of ranks to the next; 0 = none.
    """

    def __init__(
        self,
        what: str,
        ready: Ready,
        mesh: Mesh,
        given: FunctionArgs,
        results: Sequence[ResultLayout | None],
        check_every: int,
    ) -> None:
        self._what, self._ready, self._mesh, self._pool = what, ready, mesh, disk_of(given.plan)
        self._arguments, self._results, self._check_every = given.arguments, results, check_every
        self._moves = [a.moves for a in given.arguments]
        leaves, treedef = tree_flatten(given.params)
        self._treedefs = treedef, given.treedef
        self._wanted = [_describe_leaf(x, mesh) for x in leaves], [leaf_signature(a.given) for a in given.arguments]
        self._ambient, self._calls = ambient(), 0
        # The last first argument, which most calls pass again. It stays alive until another comes.
        self._last: list[GlobalTensor] = []
        self._values: list[Tensor] = []
        self._memory: frozenset[int] = frozenset()
        self._keep_leaves(leaves)

    @property
    def graph(self) -> Callable[..., Any]:
        """Returns the compiled graph, of this rank's blocks of `params` and the tensors of the other arguments."""
        return self._ready.run

    def memory_analysis(self) -> MemoryAnalysis:
        """Returns the bytes that a call needs on this rank, its arguments included."""
        return memory_analysis(self._ready.program.gm)

    def __call__(self, params: PyTree, /, *args: Any) -> Any:
        """Returns the function's value.

        Raises:
            ValueError: the arguments have another layout. The message lists the leaves. Or one requires a gradient, a
                transform of torch.func is around the call, or autocast differs.
            DonatedError: an argument was consumed before.
            RankError: another rank failed, or (every `check_every` calls) is at another call.
        """
        self._calls += 1  # first: also a call that is refused counts, so that ranks check at the same one
        comms = comms_of(self._mesh)  # made anew after an error
        with bind_mesh(self._mesh), losing_no_peer(comms):
            comms.control.begin(f"call {self._calls} of the bound {self._what}")
            if ambient() != self._ambient:
                raise ValueError(f"{self._what} is bound under other settings of torch (autocast). {_REMEDY}")
            if transforming():
                raise ValueError(f"{self._what} is bound, so torch.func cannot transform it; call it without bind.")
            self._enter_call(params)
            given, treedef = tree_flatten(args)
            if treedef != self._treedefs[1]:
                raise ValueError(f"{self._what} is bound to args {self._treedefs[1]}, not {treedef}. {_REMEDY}")
            seen, memory, donated = self._inspect_inputs(given)
            inputs = [*self._values, *seen]
            if torch.is_grad_enabled() and any(x.requires_grad for x in inputs):
                raise ValueError(
                    f"{self._what} is bound, so its result has no gradient, and an argument requires one. Call it"
                    " without bind, or under torch.no_grad()."
                )
            if self._check_every and self._calls % self._check_every == 0:
                agree_on_step(comms.control, f"call {self._calls} of the bound {self._what}")
            with taken(donated, donate=True):
                return self._make_result(self._ready(comms, self._pool, inputs), memory, given)

    def _enter_call(self, params: PyTree) -> None:
        leaves, treedef = tree_flatten(params)
        if treedef != self._treedefs[0]:
            raise ValueError(f"{self._what} is bound to params {self._treedefs[0]}, not {treedef}. {_REMEDY}")
        if all(map(operator.is_, leaves, self._last)):
            for x in leaves:
                if x.donated:
                    _ = x.held  # raises DonatedError
            return
        found = [_describe_leaf(x, self._mesh) for x in leaves]
        if found != self._wanted[0]:
            raise ValueError(self._find_differences(tree_paths(params, "params"), self._wanted[0], found))
        self._keep_leaves(leaves)

    def _keep_leaves(self, leaves: list[GlobalTensor]) -> None:
        self._last, self._values = leaves, [as_graph_value(x.held) for x in leaves]
        self._memory = frozenset(memory_of(x) for x in self._values)

    def _inspect_inputs(self, given: Sequence[Any]) -> tuple[list[Tensor], dict[int, bool], list[GlobalTensor]]:
        """Returns the inputs of the graph, their memory (and if it is donated), and the donated leaves."""
        seen: list[Tensor] = []
        kept: list[Tensor] = []  # blocks on the host, where `seen` has their copies
        donated: list[GlobalTensor] = []
        memory: dict[int, bool] = {}
        shared = False
        for x, a, away, want in zip(given, self._arguments, self._moves, self._wanted[1], strict=True):
            cut = type(x) is GlobalTensor and a.spec is not None
            held = x.held if cut else x.local if type(x) is GlobalTensor else x
            if cut and not away and isinstance(held, Tensor):
                same = (held.shape, held.stride(), held.dtype, held.device) == want[4]
                same = same and (x.shape, x.spec, x.memory_kind) == (*want[:2], want[3]) and x.mesh.is_like(want[2])
            else:
                same = leaf_signature(x) == want
            if not same:
                self._refuse_call(given)
            if away:
                own, held = held, on_device(x, self._mesh.device)
                if isinstance(own, Tensor) and own.numel():
                    shared = shared or memory_of(own) in memory or memory_of(own) in self._memory
                    memory[memory_of(own)] = True
                    kept.append(own)
            if not isinstance(held, Tensor):
                continue
            m = memory_of(held)
            if held.numel():
                shared = shared or (a.donated and (m in memory or m in self._memory)) or memory.get(m, False)
            memory[m] = a.donated or memory.get(m, False)
            seen.append(held)
            if a.donated:
                donated.append(x)
        if shared:
            pairs = zip(self._arguments, given, strict=True)
            named = [(a.path, x.held) for a, x in pairs if a.donated and isinstance(x.held, Tensor)]
            refuse_twice(named, [*self._values, *seen, *kept])
        return seen, memory, donated

    def _refuse_call(self, given: Sequence[Any]) -> None:
        found = [leaf_signature(x) for x in given]
        raise ValueError(self._find_differences([a.path for a in self._arguments], self._wanted[1], found))

    def _find_differences(self, paths: Sequence[str], wanted: Sequence[Any], found: Sequence[Any]) -> str:
        lines = [f"  - {n} is bound as {w}, and is {x}" for n, w, x in zip(paths, wanted, found, strict=True) if w != x]
        return "\n".join([f"{self._what} is bound to another layout of its arguments. {_REMEDY}", *lines])

    def _make_result(self, outs: Sequence[Any], memory: dict[int, bool], given: Sequence[Any]) -> PyTree:
        """Returns the result, made of the graph's outputs.

        Those that alias an argument are cloned, as in other calls.
        """
        program = self._ready.program
        values = iter(outs)
        leaves = [x.fill(next(values)) if isinstance(x, ResultSlot) else x for x in program.leaves]
        donated = {m for m, is_donated in memory.items() if is_donated}
        leaves = apart(leaves, donated, memory, self._memory)
        for k, layout in enumerate(self._results):
            if layout is not None and layout.owner is not None:
                leaves[k] = taking_the_place_of(given[layout.owner], leaves[k])
            elif layout is not None and isinstance(leaves[k], Tensor):
                leaves[k] = GlobalTensor(leaves[k], layout.shape, layout.spec, self._mesh)
        return tree_unflatten(program.treedef, leaves)


def _describe_leaf(x: Any, mesh: Mesh) -> Any:
    """Returns the properties of a leaf of the first argument that the graph relies on; like meshes count as `mesh`."""
    if not isinstance(x, GlobalTensor):
        return type(x)
    held = x.held
    layout = held.stride() if isinstance(held, Tensor) else None
    on = mesh if x.mesh.is_like(mesh) else x.mesh
    return tuple(x.shape), x.spec, on, x.memory_kind, x.dtype, x.device, tuple(held.shape), layout


class Blocks:
    """The memory of a call's global tensors, during it: which may be written, and which the result may keep.

    Made before the function runs. `check` and `apart` come after.
    """

    def __init__(self, params: PyTree, arguments: Sequence[Argument]) -> None:
        own = [a for a in arguments if a.spec is not None]
        held = [x.held for x in tree_leaves(params)]
        away = [a for a in own if a.moves and isinstance(a.given.held, Tensor)]
        # By the address of a storage. Those of arguments, and of the parameters, that the call may not keep in its
        # result are in `_describe_leaf`. Of donated ones it may keep one tensor. All of them outlive the call, so no
        # address is another's.
        self._donated = {memory_of(a.seen) for a in own if a.donated}
        seen = [a.seen for a in arguments if isinstance(a.seen, Tensor)]
        self._kept = {memory_of(x) for x in (*held, *seen) if isinstance(x, Tensor)}
        self._watched = [(a.path, a.seen, version_of(a.seen)) for a in own if not a.donated]
        # The memory that the call may write over: the block as it is kept, or if that is on disk, its copy.
        given = [(a.path, a.given.held if isinstance(a.given.held, Tensor) else a.seen) for a in own if a.donated]
        refuse_twice(given, [x for x in (*held, *seen, *(a.given.held for a in away)) if isinstance(x, Tensor)])

    def check(self) -> None:
        """Refuses writes to arguments that are not donated.

        Raises:
            ValueError: lists them.
        """
        written = [path for path, x, version in self._watched if version_of(x) != version]
        if written:
            raise ValueError(
                f"arguments are written to inside the function: {', '.join(written)}. {REMEDY} They have changed on"
                " this rank, and must not be used any more."
            )

    def apart(self, out: PyTree) -> PyTree:
        """Clones results that alias an argument, except the largest result per donated argument."""
        leaves, treedef = tree_flatten(out)
        return tree_unflatten(treedef, apart(leaves, self._donated, self._kept))


def apart(leaves: Sequence[Any], donated: Container[int], *kept: Container[int]) -> list[Any]:
    """Results that share no memory with an argument, except the largest result per donated memory. Others are cloned.

    Args:
        leaves: the results. Values that are not tensors are returned unchanged.
        donated: the donated memory, by `memory_of`.
        *kept: all memory that a result may not share otherwise, donated memory included.
    """
    largest: dict[int, Tensor] = {}
    for x in leaves:
        if isinstance(x, Tensor) and (m := memory_of(x)) in donated:
            before = largest.setdefault(m, x)
            largest[m] = x if x.numel() > before.numel() else before

    def own(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        m = memory_of(x)
        if not any(m in memory for memory in kept):
            return x
        return x if largest.get(m) is x else x.clone()

    return [own(x) for x in leaves]


def refuse_twice(donated: Sequence[tuple[str, Tensor]], passed: Sequence[Tensor]) -> None:
    """Refuses memory that is donated and passed again: another argument, or a parameter, would see the writes.

    Args:
        donated: the donated arguments, by path.
        passed: the blocks of all arguments, parameters included.

    Raises:
        ValueError: lists the donated arguments whose memory is passed again.
    """
    counts = collections.Counter(memory_of(x) for x in passed if x.numel())
    raise_all(
        ValueError,
        "donated arguments share memory with others; give each a copy of its own, or leave them out of donate=:",
        [path for path, x in donated if counts[memory_of(x)] > 1],
    )


def memory_of(x: Tensor) -> int:
    """Returns the address of a tensor's storage, which is another's once the storage is gone."""
    return x.untyped_storage()._cdata
