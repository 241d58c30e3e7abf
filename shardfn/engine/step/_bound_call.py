"""`BoundCall`: a captured sharded function, prepared once for a single layout of its arguments, for calls that repeat.

The law: `f.bind(params, *args)(params, *args) == f(params, *args)`, bit for bit, also for other values of the layout.
A call has no agreement of ranks and no exchange of shapes: both happened in `bind`. `Blocks` has the rules for memory
that both ways of calling share: which blocks may be written, and which the result may keep.
"""

import collections
import itertools
import math
import operator
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from shardfn.collectives import AnyControl, GlobalTensor, bind_mesh_of_graph, list_blocks, transforming
from shardfn.core import (
    Mesh,
    P,
    PyTree,
    are_tensors,
    is_device,
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
from shardfn.kernels import TensorLayouts
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


class GivenBlocks(NamedTuple):
    """The arguments of a call that fit their layout.

    Attributes:
        inputs: inputs of the graph.
        kept: blocks on the host that have copies among the inputs.
        memory: memory of the inputs, by `memory_of`.
        donated: memory that the result may keep.
        leaves: donated leaves.
        are_apart: whether no two blocks share memory.
    """

    inputs: list[Tensor]
    kept: list[Tensor]
    memory: set[int]
    donated: set[int]
    leaves: list[GlobalTensor]
    are_apart: bool


class _ArgumentLayout:
    """Layout of the arguments after the first, which is recorded once and compared in each later call.

    Args:
        arguments: the arguments.
        device: device of the graph.
    """

    def __init__(self, arguments: Sequence[Argument], device: torch.device) -> None:
        self._arguments, self._device = arguments, device
        self.signatures = [leaf_signature(a.given) for a in arguments]
        places = range(len(arguments))
        self._sharded = [i for i in places if _is_on_device(arguments[i])]
        # Compared at once: plain tensors, and blocks on the device. Other values are read and compared one by one.
        self._tensors = [i for i in places if isinstance(arguments[i].given, Tensor) or i in self._sharded]
        self._others = [i for i in places if i not in self._tensors]
        self._donated = [i for i in places if arguments[i].donated]
        self._inputs = [i for i in places if isinstance(arguments[i].given, Tensor | GlobalTensor)]
        self._get_sharded, self._get_tensors = _get_items(self._sharded), _get_items(self._tensors)
        self._get_inputs, self._get_donated = _get_items(self._inputs), _get_items(self._donated)
        leaves, kept = [arguments[i].given for i in self._sharded], [arguments[i] for i in self._tensors]
        self._leaf_layouts, self._meshes = [*map(_LEAF_LAYOUT, leaves)], [*map(_MESH, leaves)]
        self._layouts = TensorLayouts([a.given if a.spec is None else a.given.held for a in kept])
        inputs = [arguments[i] for i in self._inputs]
        # Tensors without elements share no memory.
        self._filled = [_num_elements(a.given) > 0 for a in inputs]
        self._donates = [a.donated for a in inputs]

    def read(self, given: Sequence[Any]) -> GivenBlocks | None:
        """Returns the blocks of arguments, or None for arguments of another layout.

        Raises:
            DonatedError: an argument was consumed before.
        """
        leaves: Sequence[GlobalTensor] = self._get_sharded(given)
        if not all(map(operator.is_, map(type, leaves), itertools.repeat(GlobalTensor))):
            return None
        values, kept = list(given), list[Tensor]()
        for i, block in zip(self._sharded, list_blocks(leaves), strict=True):
            values[i] = block
        tensors = self._get_tensors(values)
        if not are_tensors(tensors) or not (
            self._layouts.match(tensors)
            and [*map(_LEAF_LAYOUT, leaves)] == self._leaf_layouts
            and self._have_meshes([*map(_MESH, leaves)])
        ):
            return None
        for i in self._others:
            if leaf_signature(given[i]) != self.signatures[i]:
                return None
            if self._arguments[i].moves:
                own, values[i] = given[i].held, on_device(given[i], self._device)
                if isinstance(own, Tensor) and own.numel():
                    kept.append(own)
            elif isinstance(given[i], GlobalTensor):
                values[i] = given[i].local
        inputs = [*self._get_inputs(values)]
        memory, own = memories_of(inputs), memories_of(kept)
        donated = {*itertools.compress(memory, self._donates), *own}
        filled = [*itertools.compress(memory, self._filled), *own]
        are_apart = len(set(filled)) == len(filled)
        return GivenBlocks(inputs, kept, set(memory), donated, [*self._get_donated(given)], are_apart)

    def _have_meshes(self, meshes: Sequence[Mesh]) -> bool:
        if all(map(operator.is_, meshes, self._meshes)):
            return True
        return all(x is mesh or x.is_like(mesh) for x, mesh in zip(meshes, self._meshes, strict=True))


class BoundCall:
    """A captured sharded function for arguments of a single layout; made by `Sharded.bind`, which documents it.

    Args:
        what: the call, in words.
        ready: the graph.
        mesh: the function's mesh.
        given: the arguments.
        results: layout of each leaf of the result, or None where it is passed on.
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
        self._arguments, self._check_every = given.arguments, check_every
        self._layout = _ArgumentLayout(given.arguments, mesh.device)
        self._results = [(k, x) for k, x in enumerate(results) if x is not None]
        # Arguments on the device: the result for such an argument is the next block.
        own = enumerate(given.arguments)
        self._here = {i for i, a in own if _is_on_device(a) and is_device(a.given.memory_kind)}
        self._slots = None if all(x == ResultSlot(None) for x in ready.program.leaves) else ready.program.leaves
        leaves, treedef = tree_flatten(given.params)
        self._treedefs = treedef, given.treedef
        self._wanted = [_describe_leaf(x, mesh) for x in leaves]
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
        with bind_mesh_of_graph(self._mesh), losing_no_peer(comms):
            comms.control.begin(f"call {self._calls} of the bound {self._what}")
            if ambient() != self._ambient:
                raise ValueError(f"{self._what} is bound under other settings of torch (autocast). {_REMEDY}")
            if transforming():
                raise ValueError(f"{self._what} is bound, so torch.func cannot transform it. Call it without bind.")
            self._enter_call(params)
            given, treedef = tree_flatten(args)
            if treedef != self._treedefs[1]:
                raise ValueError(f"{self._what} is bound to args {self._treedefs[1]}, not {treedef}. {_REMEDY}")
            blocks = self._layout.read(given)
            if blocks is None:
                self._refuse_call(given)
            inputs = [*self._values, *blocks.inputs]
            if not (blocks.are_apart and self._memory.isdisjoint(blocks.donated)):
                self._refuse_shared(given, [*inputs, *blocks.kept])
            if torch.is_grad_enabled() and any(map(_REQUIRES_GRAD, inputs)):
                raise ValueError(
                    f"{self._what} is bound, so its result has no gradient, and an argument requires one. Call it"
                    " without bind, or under torch.no_grad()."
                )
            if self._check_every and self._calls % self._check_every == 0:
                agree_on_step(comms.control, f"call {self._calls} of the bound {self._what}")
            with taken(blocks.leaves, donate=True):
                return self._make_result(self._ready(comms, self._pool, inputs), blocks, given)

    def _enter_call(self, params: PyTree) -> None:
        leaves, treedef = tree_flatten(params)
        if treedef != self._treedefs[0]:
            raise ValueError(f"{self._what} is bound to params {self._treedefs[0]}, not {treedef}. {_REMEDY}")
        if all(map(operator.is_, leaves, self._last)):
            list_blocks(leaves)  # raises DonatedError
            return
        found = [_describe_leaf(x, self._mesh) for x in leaves]
        if found != self._wanted:
            raise ValueError(self._find_differences(tree_paths(params, "params"), self._wanted, found))
        self._keep_leaves(leaves)

    def _keep_leaves(self, leaves: list[GlobalTensor]) -> None:
        self._last, self._values = leaves, [as_graph_value(x.held) for x in leaves]
        self._memory = frozenset(memories_of(self._values))

    def _refuse_call(self, given: Sequence[Any]) -> NoReturn:
        found = [leaf_signature(x) for x in given]
        raise ValueError(self._find_differences([a.path for a in self._arguments], self._layout.signatures, found))

    def _refuse_shared(self, given: Sequence[Any], passed: Sequence[Tensor]) -> None:
        pairs = zip(self._arguments, given, strict=True)
        refuse_twice([(a.path, x.held) for a, x in pairs if a.donated and isinstance(x.held, Tensor)], passed)

    def _find_differences(self, paths: Sequence[str], wanted: Sequence[Any], found: Sequence[Any]) -> str:
        lines = [f"  - {n} is bound as {w}, and is {x}" for n, w, x in zip(paths, wanted, found, strict=True) if w != x]
        return "\n".join([f"{self._what} is bound to another layout of its arguments. {_REMEDY}", *lines])

    def _make_result(self, outs: Sequence[Any], blocks: GivenBlocks, given: Sequence[Any]) -> PyTree:
        """Returns the result, made of the graph's outputs.

        Results that alias an argument are cloned, as in other calls.
        """
        leaves: list[Any] = [*outs]
        if self._slots is not None:
            values = iter(outs)
            leaves = [x.fill(next(values)) if isinstance(x, ResultSlot) else x for x in self._slots]
        leaves = apart(leaves, blocks.donated, blocks.memory | self._memory)
        for k, layout in self._results:
            if layout.owner in self._here:
                leaves[k] = given[layout.owner].with_block(leaves[k])
            elif layout.owner is not None:
                leaves[k] = taking_the_place_of(given[layout.owner], leaves[k])
            elif isinstance(leaves[k], Tensor):
                leaves[k] = GlobalTensor(leaves[k], layout.shape, layout.spec, self._mesh)
        return tree_unflatten(self._ready.program.treedef, leaves)


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


def apart(leaves: Sequence[Any], donated: AbstractSet[int], kept: AbstractSet[int]) -> list[Any]:
    """Results that share no memory with an argument, except the largest result per donated memory. Others are cloned.

    Args:
        leaves: the results. Values that are not tensors are returned unchanged.
        donated: the donated memory, by `memory_of`.
        kept: all memory of arguments. Of this memory, a result may share only the donated memory.
    """
    tensors = leaves if are_tensors(leaves) else [x for x in leaves if isinstance(x, Tensor)]
    memories = memories_of(tensors)
    if len(set(memories)) == len(memories) and (kept - donated).isdisjoint(memories):
        return list(leaves)
    largest: dict[int, Tensor] = {}
    for m, x in zip(memories, tensors, strict=True):
        if m in donated:
            before = largest.setdefault(m, x)
            largest[m] = x if x.numel() > before.numel() else before

    def own(x: Any) -> Any:
        if not isinstance(x, Tensor) or (m := memory_of(x)) not in kept:
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


def memories_of(xs: Sequence[Tensor]) -> list[int]:
    """Returns `memory_of` each tensor."""
    return [*map(_ADDRESS, map(Tensor.untyped_storage, xs))]


# For many tensors at once, in C, without a bytecode for each.
_ADDRESS, _REQUIRES_GRAD = operator.attrgetter("_cdata"), operator.attrgetter("requires_grad")
_LEAF_LAYOUT, _MESH = operator.attrgetter("shape", "spec", "memory_kind"), operator.attrgetter("mesh")


def _get_items(places: Sequence[int]) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """Returns the function from values to the values at some places."""
    if len(places) > 1:
        return operator.itemgetter(*places)
    return lambda values: [values[i] for i in places]


def _is_on_device(a: Argument) -> bool:
    """Returns whether the graph takes a leaf's block where it is kept."""
    return a.spec is not None and not a.moves and isinstance(a.given.held, Tensor)


def _num_elements(x: Any) -> int:
    return math.prod(x.held.shape) if isinstance(x, GlobalTensor) else x.numel()
