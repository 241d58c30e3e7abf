"""The function that `jit` returns, captured, scheduled and compiled for each signature.

A `BoundedCache` has the graphs by signature, a limited number. The least recently used graph leaves first.
"""

import contextlib
import dataclasses
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.fx import GraphModule

from shardfn.capture import CaptureError, capture, is_traced, quiet
from shardfn.collectives import GlobalTensor, bind_mesh, current_mesh, noting_meshes
from shardfn.core import Mesh, PyTree, first_of, is_evaluating, named_leaves, tree_flatten, tree_paths, tree_unflatten
from shardfn.graph import (
    Choice,
    Cluster,
    Compiled,
    Schedule,
    check_fits,
    choose,
    compile_graph,
    resolve_backend,
    transfers,
)
from shardfn.leaves import LazyLeaf
from shardfn.memory import bind_pool
from shardfn.nn import looping

from ._scan_copy import copied_loop
from ._transform_order import Transform

_Kept = TypeVar("_Kept")


class BoundedCache(Generic[_Kept]):
    """Cache of at most `size` values, in the order of last use. `in` is not a use.

    Args:
        size: the number, at least 1.

    Example:
        >>> cache = BoundedCache(2)
        >>> cache.keep("a", 1), cache.keep("b", 2), cache.find("a"), cache.keep("c", 3)
        (None, None, 1, 2)
        >>> cache.find("b"), list(cache.values())
        (None, [1, 3])
    """

    def __init__(self, size: int) -> None:
        assert size > 0
        self.size = size
        # From the least recently used to the most recently used.
        self._kept: dict[object, _Kept] = {}

    def __contains__(self, key: object) -> bool:
        return key in self._kept

    def __len__(self) -> int:
        return len(self._kept)

    def find(self, key: object) -> _Kept | None:
        """Returns the value of a key, and counts a use, or None if the value is not kept."""
        if key not in self._kept:
            return None
        self._kept[key] = made = self._kept.pop(key)
        return made

    def keep(self, key: object, made: _Kept) -> _Kept | None:
        """Keeps a value as the most recently used value.

        Returns:
            The evicted value, or None if there was room.
        """
        self._kept.pop(key, None)
        self._kept[key] = made
        return self._kept.pop(next(iter(self._kept))) if len(self._kept) > self.size else None

    def values(self) -> Iterable[_Kept]:
        """Yields the values, from the least recently used to the most recently used."""
        return self._kept.values()


# The default: a limit for shapes that never repeat, above the number of padded lengths of usual programs.
MAX_GRAPHS = 64


@dataclasses.dataclass
class Counts:
    """Counts of a cache of graphs, from the beginning.

    Attributes:
        hits: calls that found a graph.
        misses: calls that captured a graph.
        evictions: graphs that were dropped to make room.
        capture_seconds: time spent capturing and scheduling.
        compile_seconds: time spent compiling.
    """

    hits: int = 0
    misses: int = 0
    evictions: int = 0
    capture_seconds: float = 0.0
    compile_seconds: float = 0.0


class _Entry(NamedTuple, Generic[_Kept]):
    made: _Kept
    name: str
    shown: Mapping[str, str]


class GraphCache(Generic[_Kept]):
    """Cache of at most `max_graphs` graphs, in the order of last use.

    An evicted graph and the graph's function are freed: the cache has the only lasting reference, but for functions
    that are bound to a single graph. Kernels that inductor has loaded stay in the process, as torch keeps kernels, and
    are shared by graphs.

    Invariant: a graph is used only by a call. All ranks make the same calls in the same order, and compare `max_graphs`
    before the first call, so all ranks evict at the same calls. `in` is no use: ranks look before they agree on a call,
    and the call may be refused. Where signatures differ between ranks, for example with uneven rows, a rank may have
    evicted a graph that another rank still has. Ranks exchange this fact before each call, and all ranks capture.

    Args:
        max_graphs: the size, at least 1.

    Example:
        >>> cache = GraphCache(1)
        >>> for key in ("a", "b"):
        ...     cache.keep(key, f"graph {key}", "f", {})
        >>> cache.find("a"), cache.find("b"), cache.counts.evictions
        (None, 'graph b', 1)
    """

    def __init__(self, max_graphs: int) -> None:
        self.max_graphs, self.counts = max_graphs, Counts()
        self._entries = BoundedCache[_Entry[_Kept]](max_graphs)
        self._warned = False

    def __contains__(self, key: object) -> bool:
        return key in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, key: object) -> _Kept | None:
        """Returns the graph of a signature, and counts a hit and a use, or None if the graph is not kept."""
        entry = self._entries.find(key)
        if entry is None:
            return None
        self.counts.hits += 1
        return entry.made

    def keep(self, key: object, made: _Kept, name: str, shown: Mapping[str, str]) -> None:
        """Keeps a graph as the most recently used, and evicts another graph if there are too many.

        Args:
            key: signature.
            made: the graph, with everything that belongs to the graph.
            name: the captured function, for the warning.
            shown: arguments by path, for the warning. See `argument_shapes`.
        """
        evicted = self._entries.keep(key, _Entry(made, name, shown))
        if evicted is not None:
            self.counts.evictions += 1
            self._warn_evictions(evicted)

    def _warn_evictions(self, evicted: _Entry[_Kept]) -> None:
        """Logs that graphs are evicted again and again, once."""
        if self._warned or self.counts.evictions <= self.max_graphs:
            return
        self._warned = True
        entries = [evicted, *self._entries.values()]
        # In the log: a warning that a program turns into an error could be raised on a single rank, in the middle of a
        # call.
        log.warning(
            "%d graphs were evicted, more than max_graphs=%d keeps; one that is needed again is captured again, which"
            " takes seconds. Graphs of %s; %s. Pass jit(max_graphs=) at least the number of shapes that take turns, or"
            " pad the arguments to fewer shapes, by sf.bucketed.",
            self.counts.evictions,
            self.max_graphs,
            " and ".join(dict.fromkeys(x.name for x in entries)),
            _changed_arguments(entries),
        )


def argument_shapes(tree: PyTree, root: str) -> dict[str, str]:
    """Returns the shape of each tensor of a tree, and the value of each other leaf, by path.

    Example:
        >>> import torch
        >>> argument_shapes({"x": torch.ones(2, 3), "n": 4}, "batch")
        {"batch['n']": '4', "batch['x']": '(2, 3)'}
    """
    return {
        path: str(tuple(x.shape)) if isinstance(x, Tensor | GlobalTensor) else f"{x!r:.40}"
        for path, x in named_leaves(tree, root)
    }


def _changed_arguments(entries: Iterable[_Entry[_Kept]]) -> str:
    """Returns the arguments that differ between graphs of one name, each with its first few values."""
    values: dict[tuple[str, str], dict[str, None]] = {}
    for entry in entries:
        for path, text in entry.shown.items():
            values.setdefault((entry.name, path), {})[text] = None
    changed = [f"{path} is {', '.join(first_of([*x], 4))}" for (_, path), x in values.items() if len(x) > 1]
    if not changed:
        return "all shapes are equal, so dtypes, strides, structures or layouts differ"
    return "these arguments change: " + "; ".join(first_of(changed, 4))


log = logging.getLogger("shardfn.jit")


_SCHEDULE = Schedule()


class CacheInfo(NamedTuple):
    """Counters of a captured function's cache.

    Attributes:
        hits: calls that found a graph.
        misses: calls that captured a graph.
        currsize: graphs kept.
        capture_seconds: time spent capturing and scheduling.
        compile_seconds: time spent compiling.
        evictions: graphs that were dropped, since more than `maxsize` signatures were in use.
        maxsize: graphs that may be kept, `jit(max_graphs=)`. For a step of several losses, of all losses together.
    """

    hits: int = 0
    misses: int = 0
    currsize: int = 0
    capture_seconds: float = 0.0
    compile_seconds: float = 0.0
    evictions: int = 0
    maxsize: int = 0


@dataclasses.dataclass(frozen=True)
class Jitted(Transform):
    """Function that runs as a graph. `sharded_step` takes the whole step into the graph.

    Attributes:
        inner: the function.
        backend: "inductor", "graph", or None for the best there is.
        schedule: options of the passes over the graph, with a cluster only the given fields.
        cluster: the machines for which the cost model chooses the schedule. None means `schedule`.
        memory: bytes that the device may hold. Default: the cluster's memory.
        given: the fields of the schedule that are not chosen.
        check_types: whether a step with a missing, or doubled, collective is refused.
        max_graphs: number of graphs that are kept.
        graphs: these graphs. A step around the function keeps separate graphs, in a copy of this value.
    """

    transform: ClassVar[str] = "jit"

    inner: Callable[..., Any]
    backend: str | None = None
    schedule: Schedule = _SCHEDULE
    cluster: Cluster | None = None
    memory: int | None = None
    given: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    check_types: bool = True
    max_graphs: int = MAX_GRAPHS
    graphs: GraphCache[Any] = dataclasses.field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Makes an empty cache."""
        object.__setattr__(self, "graphs", GraphCache(self.max_graphs))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the function's value."""
        leaves, treedef = tree_flatten((args, kwargs))
        # Part of a larger graph, of a torch.func transform, or of an eager step that gathers during the run.
        if is_traced() or any(type(x) is LazyLeaf for x in leaves):
            return self.inner(*args, **kwargs)
        at = [i for i, x in enumerate(leaves) if isinstance(x, Tensor | GlobalTensor)]
        # A graph takes this rank's blocks; the global tensors are in the signature, and results are wrapped in the same
        # way.
        inputs = [x.local if isinstance(x, GlobalTensor) else x for x in (leaves[i] for i in at)]
        _refuse_gradients(inputs, leaves, treedef, at)
        key = (treedef, current_mesh(), ambient(), *(leaf_signature(x) for x in leaves))
        try:
            found = self.graphs.find(key)
        except TypeError as error:
            raise TypeError(f"an argument of a jitted function is neither a tensor nor hashable: {error}.") from error
        if found is None:
            self.graphs.counts.misses += 1
            found = self._make(leaves, treedef, at, inputs)
            args, named = tree_unflatten(treedef, leaves)
            self.graphs.keep(
                key, found, self._function_name, argument_shapes(args, "args") | argument_shapes(named, "kwargs")
            )
        compiled, mesh, out_def, statics = found
        with (
            torch.no_grad(),
            plain_arithmetic(),
            bind_pool(),
            contextlib.nullcontext() if mesh is None else bind_mesh(mesh),
        ):
            outs = iter(compiled(*inputs))
        return tree_unflatten(out_def, [s.fill(next(outs)) if isinstance(s, ResultSlot) else s for s in statics])

    def cache_info(self) -> CacheInfo:
        """Returns the counts of the cache, and the size."""
        return CacheInfo(**vars(self.graphs.counts), currsize=len(self.graphs), maxsize=self.max_graphs)

    def choose(self, gm: GraphModule) -> Choice | None:
        """Returns the schedule that the cost model chooses for a graph, or None without a cluster."""
        if self.cluster is None:
            return None
        start = time.perf_counter()
        with quiet():
            choice = choose(gm, self.cluster, memory=self.memory, given=self.given, fuses=self.backend != "graph")
        log.info("in %.1f s %s", time.perf_counter() - start, choice)
        return choice

    def chooses_by(self) -> str:
        """Returns the facts that ranks must agree on for a common choice: whether to choose, and the given fields."""
        given = {k: v for k, v in sorted(self.given.items()) if k != "passes"}
        return "by the schedule given" if self.cluster is None else f"by cluster=, with {given or 'nothing'} given"

    def scheduled(self, gm: GraphModule, schedule: Schedule | None = None) -> GraphModule:
        """Returns the graph after the passes, for the graph's back end, by `schedule` if one was chosen."""
        with quiet():
            out = (schedule or self.schedule)(gm, fuses=self.backend != "graph")
        if self.cluster is not None:
            check_fits(out, self.cluster.device.memory if self.memory is None else self.memory)
        return out

    def compile(self, gm: GraphModule, backend: str | None = None) -> Compiled:
        """Compiles a scheduled graph."""
        compiled = compile_graph(gm, resolve_backend(backend or self.backend))
        self.graphs.counts.compile_seconds += compiled.seconds
        log.info("compiled for %r in %.1f s: %d regions", compiled.backend, compiled.seconds, compiled.num_regions)
        return compiled

    def count_capture(self, seconds: float) -> None:
        """Counts a capture by the step around the function."""
        self.graphs.counts.misses += 1
        self.graphs.counts.capture_seconds += seconds

    @property
    def _function_name(self) -> str:
        return getattr(self.inner, "__name__", "a function")

    def _make(self, leaves: list[Any], treedef: Any, at: list[int], inputs: list[Tensor]) -> Any:
        start = time.perf_counter()
        result: list[Any] = []
        mesh = current_mesh()

        def run_flat(*tensors: Tensor) -> list[Tensor]:
            filled = list(leaves)
            for i, x in zip(at, tensors, strict=True):
                old = leaves[i]
                filled[i] = old.replace_block(x) if isinstance(old, GlobalTensor) else x
            args, kwargs = tree_unflatten(treedef, filled)
            # The mesh as at the function's call, since a captured function may bind others.
            with bind_mesh(mesh), looping(copied_loop):
                outs, out_def = tree_flatten(self.inner(*args, **kwargs))
            result[:] = [out_def, [slot_of(x) for x in outs]]
            return [x.local if isinstance(x, GlobalTensor) else x for x in outs if isinstance(x, Tensor | GlobalTensor)]

        with noting_meshes() as meshes:
            gm = capture(run_flat, inputs)
        gm.meta |= {"mesh_shape": {}, "coords": {}}
        for bound in meshes:
            gm.meta["mesh_shape"] |= bound.shape
            gm.meta["coords"] |= bound.coords
        earlier = len(self.graphs) + self.graphs.counts.evictions
        report(self._function_name, "args", tree_unflatten(treedef, leaves)[0], earlier)
        # Each rank chooses separately: the passes keep the order of a function's collectives under any choice.
        choice = self.choose(gm)
        gm = self.scheduled(gm, choice and choice.schedule)
        self.graphs.counts.capture_seconds += time.perf_counter() - start
        return self.compile(gm), _mesh_of_the_loss(gm, meshes), *result


class ResultSlot(NamedTuple):
    """Place of a tensor of the graph in the result, as a `GlobalTensor` like `like`, if given."""

    like: GlobalTensor | None

    def fill(self, x: Tensor) -> Tensor | GlobalTensor:
        """Returns the leaf of the result."""
        return x if self.like is None else self.like.replace_block(x)


def slot_of(x: Any) -> Any:
    """Returns a placeholder for a leaf of a result: a `ResultSlot` for a tensor, else the leaf itself."""
    if isinstance(x, GlobalTensor):
        return ResultSlot(x)
    return ResultSlot(None) if isinstance(x, Tensor) else x


def _mesh_of_the_loss(gm: GraphModule, meshes: Sequence[Mesh]) -> Mesh | None:
    """Returns the mesh of the axes that this package's ops name, or None if no op sends.

    Raises:
        CaptureError: the function has bound several meshes.
    """
    if not any(t.channel.startswith("loss") and t.num_ranks > 1 for t in transfers(gm)):
        return None
    several = list(dict.fromkeys(mesh for mesh in meshes if mesh.size > 1))
    if len(several) > 1:
        raise CaptureError(
            f"a jitted function binds {len(several)} meshes ({', '.join(map(str, several))}), so that it is unknown"
            " along which of them the exchanges of its graph go. Wrap the functions on each mesh in a jit of their own."
        )
    return several[0] if several else None


def ambient() -> Any:
    """Returns the settings besides arguments on which a function's result depends: autocast, and eval mode."""
    return is_evaluating(), tuple((k, torch.get_autocast_dtype(k)) for k in _autocast_kinds())


def _autocast_kinds() -> list[str]:
    """Returns the kinds of devices on which autocast is on."""
    return [*filter(torch.is_autocast_enabled, ("cpu", "cuda"))]


@contextlib.contextmanager
def plain_arithmetic() -> Iterator[None]:
    """Turns autocast off: for graphs, which already have casts, and for the optimizer, which a policy determines."""
    kinds = _autocast_kinds()
    if not kinds:
        yield
        return
    with contextlib.ExitStack() as stack:
        for kind in kinds:
            stack.enter_context(torch.autocast(kind, enabled=False))
        yield


def report(name: str, root: str, tree: PyTree, earlier: int) -> None:
    """Logs a capture: the first capture at level INFO, later captures, caused by a change of shapes, as warnings.

    Args:
        name: the captured function.
        root: the name of the function's arguments.
        tree: the arguments.
        earlier: number of earlier captures, evicted graphs included.
    """
    pairs = named_leaves(tree, root)
    shown = ", ".join(f"{p} {tuple(x.shape)}" for p, x in pairs if isinstance(x, Tensor))
    if not earlier:
        log.info("captured %s for %s", name, shown)
    else:
        log.warning("captured %s again, for the shapes %s: graph number %d", name, shown, earlier + 1)


def leaf_signature(x: Any) -> Any:
    """Returns the properties of an argument's leaf on which a graph relies, such as shape and dtype."""
    if isinstance(x, Tensor):
        return tuple(x.shape), x.stride(), x.dtype, x.device
    if isinstance(x, GlobalTensor):
        # A block that is not a tensor is loaded, and then contiguous.
        own = leaf_signature(x.held) if isinstance(x.held, Tensor) else (tuple(x.held.shape), x.dtype, x.quantization)
        return tuple(x.shape), x.spec, x.mesh, x.memory_kind, own
    # 1, 1.0 and True are equal, and so are 0.0 and -0.0.
    return type(x), repr(x) if isinstance(x, float) else x


def _refuse_gradients(inputs: list[Tensor], leaves: list[Any], treedef: Any, at: list[int]) -> None:
    if not torch.is_grad_enabled() or not any(x.requires_grad for x in inputs):
        return
    paths = tree_paths(tree_unflatten(treedef, leaves))
    names = [paths[i] for i, x in zip(at, inputs, strict=True) if x.requires_grad]
    raise CaptureError(
        f"a jitted function was given tensors that require a gradient ({', '.join(names[:4])}). A graph holds no"
        " autograd. Capture the gradient with it: jit(value_and_grad(f)) in place of value_and_grad(jit(f)),"
        " jit(remat(f)) in place of remat(jit(f))."
    )
