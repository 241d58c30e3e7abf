"""Compiles regions of a captured graph by torch's inductor: forward only, with a single compilation for equal regions.

Arithmetic keeps the precision: no unsafe maths, no contraction of a b + c, and 16-bit intermediates are rounded op by
op as eager does. Generated code lies in inductor's cache on disk (`TORCHINDUCTOR_CACHE_DIR`), where a later process
finds the code.

A back end runs a captured graph op by op, or with compiled arithmetic.
"""

import contextlib
import dataclasses
import math
import shutil
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

from shardfn._torch import FakeTensorMode, TracingContext, dynamo_counters, inductor, tracing
from shardfn.core import raise_all, serialize_tracing
from shardfn.kernels import num_processors

from ._emit import emit, name_line
from ._exact_rows import exact_rows
from ._fusions import with_fusions
from ._ops import op_of
from ._regions import Region, cut, is_view, peel

_ATEN = torch.ops.aten
_SCALE, _CUBIC = math.sqrt(2 / math.pi), 0.044715

Call = Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]


@dataclasses.dataclass(frozen=True)
class Kernels:
    """Compiled regions of a graph.

    Attributes:
        calls: function of each region's inputs. A function empties the list of inputs.
        num_compiled: number of different regions.
        cache_hits: number of different regions found on disk.
        seconds: seconds that compilation took.
    """

    calls: tuple[Call, ...]
    num_compiled: int
    cache_hits: int
    seconds: float


def compile_regions(regions: Sequence[Region]) -> Kernels:
    """Compiles each region. Regions with equal text share a kernel.

    Returns:
        The kernels, in the order of `regions`.

    Raises:
        RuntimeError: the C++ compiler failed. The message has the remedies.

    Example:
        >>> compile_regions([]).num_compiled
        0
    """
    start, made = time.perf_counter(), dict[str, Call]()
    texts = [canonical(region) for region in regions]
    if not regions:
        return Kernels((), 0, 0, 0.0)
    with _use_compiler():
        before = _count_hits()
        for text, region in zip(texts, regions, strict=True):
            if text not in made:
                made[text] = _compile_region(region)
        hits = _count_hits() - before
    return Kernels(tuple(made[text] for text in texts), len(made), hits, time.perf_counter() - start)


def canonical(region: Region) -> str:
    """Returns the region as a text without names. Regions that can share a kernel have equal texts.

    Example:
        >>> print(canonical(Region((), (), ())))
        graph():
            return ()
    """
    graph = _region_graph(region)
    inputs = [f"{_describe_value(node)}\n" for node in graph.nodes if node.op == "placeholder"]
    outputs = [_describe_value(node) for node in region.outputs]
    return "".join(inputs) + "".join(f"-> {look}\n" for look in outputs) + str(graph)


def find_compiler() -> str | None:
    """Returns the C++ compiler that inductor would call (`CXX`, else g++), or None if there is no such compiler.

    Example:
        >>> find_compiler() is None or len(find_compiler()) > 0
        True
    """
    config = inductor("config")
    names = config.cpp.cxx if isinstance(config.cpp.cxx, list | tuple) else (config.cpp.cxx,)
    found = (shutil.which(str(name).split()[0]) for name in names if name)
    return next((path for path in found if path), None)


def _describe_value(node: Node) -> str:
    value = node.meta["val"]
    return f"{tuple(value.shape)} {value.stride()} {value.dtype} {value.device}"


# A region as a separate graph.


def _region_graph(region: Region) -> Graph:
    graph, inner = Graph(), dict[Node, Node]()
    for i, node in enumerate(region.inputs):
        inner[node] = graph.placeholder(f"p{i}")
        inner[node].meta["val"] = node.meta["val"]
    for node in region.nodes:
        for given in node.all_input_nodes:
            _copy_views(graph, given, inner)
        inner[node] = _copy_node(graph, node, inner)
    graph.output(tuple(inner[node] for node in region.outputs))
    return graph


def _copy_node(graph: Graph, node: Node, inner: dict[Node, Node]) -> Node:
    if op_of(node).identity:
        return inner[node.all_input_nodes[0]]
    args, kwargs = torch.fx.map_arg((node.args, node.kwargs), inner.__getitem__)
    return graph.create_node("call_function", node.target, args, kwargs, name="n")


def _copy_views(graph: Graph, node: Node, inner: dict[Node, Node]) -> None:
    chain = []
    while node not in inner:
        assert is_view(node), (node, peel(node))
        chain.append(node)
        node = node.all_input_nodes[0]
    for view in reversed(chain):
        inner[view] = _copy_node(graph, view, inner)


# A region as a kernel.


def _compile_region(region: Region) -> Call:
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    # Shapes are numbers, but without an environment for symbols inductor's cache stays shut.
    mode = FakeTensorMode(shape_env=ShapeEnv())
    with mode:
        inputs = [_empty_like(node.meta["val"]) for node in region.inputs]
        gm = make_fx(
            _functionalize(GraphModule({}, _region_graph(region))), decomposition_table=_decomposition_table()
        )(*inputs)
    output = next(iter(reversed(gm.graph.nodes)))
    output.meta["original_output_strides"] = [node.meta["val"].stride() for node in region.outputs]
    output.meta["user_visible_output_idxs"] = list(range(len(region.outputs)))
    try:
        with tracing(TracingContext(mode)):
            compiled = inductor("compile_fx").compile_fx_inner(gm, inputs, is_inference=True)
    except Exception as error:
        raise _explain_error(error) from error
    return compiled.current_callable  # pyright: ignore[reportAttributeAccessIssue]


def _functionalize(gm: GraphModule) -> Callable[..., Any]:
    """Returns a decomposition without writes in place: inputs must not change."""
    return torch.func.functionalize(lambda *args: gm(*args), remove="mutations")


def _empty_like(value: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)


def _decomposition_table() -> dict[Any, Any]:
    table = inductor("decomposition").select_decomp_table()
    tanh = {_ATEN.gelu.default: _tanh_gelu, _ATEN.gelu_backward.default: _tanh_gelu_backward}
    return table | {op: _select_tanh(form, table[op]) for op, form in tanh.items()}


def _select_tanh(form: Callable[..., Any], other: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: form(*args) if kwargs.get("approximate") == "tanh" else other(*args, **kwargs)


def _tanh_gelu(x: torch.Tensor) -> torch.Tensor:
    """Returns GELU by 0.5 (1 + tanh u) = sigmoid(2 u): equal up to the last bits, in half the time."""
    wide = _to_wide(x)
    return (wide * torch.sigmoid(2 * _tanh_argument(wide))).to(x.dtype)


def _tanh_gelu_backward(grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    wide = _to_wide(x)
    gate = torch.sigmoid(2 * _tanh_argument(wide))
    slope = 2 * _SCALE * (1 + 3 * _CUBIC * wide * wide)
    return (_to_wide(grad) * (gate + wide * gate * (1 - gate) * slope)).to(x.dtype)


def _tanh_argument(x: torch.Tensor) -> torch.Tensor:
    return _SCALE * (x + _CUBIC * x * x * x)


def _to_wide(x: torch.Tensor) -> torch.Tensor:
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def _explain_error(error: Exception) -> Exception:
    inner, kinds = getattr(error, "inner_exception", error), inductor("exc")
    if not isinstance(inner, kinds.CppCompileError | kinds.InvalidCxxCompiler):
        return error
    return RuntimeError(
        f"backend='inductor': the C++ compiler {find_compiler()!r} cannot compile torch's kernels; install a working"
        f" g++ (or name one in CXX), or use backend='graph', which needs none. Its error: {str(inner)[-800:]}"
    )


@contextlib.contextmanager
def _use_compiler() -> Iterator[None]:
    """Calls inductor with our settings. Kernels go to the C++ compiler while the next region is still being lowered."""
    inductor("compile_fx")
    config, AsyncCompile = inductor("config"), inductor("async_compile").AsyncCompile  # a class
    cores = num_processors()
    under_way: list[tuple[Any, dict[str, Any]]] = []
    with (
        serialize_tracing(),
        config.patch(_SETTINGS | {"compile_threads": max(1, min(cores, config.compile_threads or 1))}),
    ):
        # The wait for a region's code comes after the last region has been lowered. Only a single thread at a time is
        # here.
        wait = AsyncCompile.wait
        AsyncCompile.wait = lambda self, scope: under_way.append((self, scope))
        try:
            yield
        finally:
            AsyncCompile.wait = wait
        try:
            for compiler, scope in under_way:
                compiler.wait(scope)
        except Exception as error:
            raise _explain_error(error) from error


_SETTINGS: dict[str, Any] = {
    "fx_graph_cache": True,
    "freezing": False,
    "max_autotune": False,
    "emulate_precision_casts": True,
    "cpp.enable_unsafe_math_opt_flag": False,
    "cpp.enable_floating_point_contract_flag": "off",
    # 0.3 us a tensor, against code that would read past the tensor's end.
    "size_asserts": True,
}


def _count_hits() -> int:
    return dynamo_counters()["inductor"]["fxgraph_cache_hit"]


Backend = Literal["graph", "inductor"]
_REMEDY = "install g++ (Debian: apt install g++), or name a compiler in the environment variable CXX"
_WARNED: list[str] = []


@dataclasses.dataclass(frozen=True)
class Compiled:
    """Graph that runs.

    Attributes:
        function: function from the tensors of the graph's arguments to the tuple of outputs, without autograd.
        backend: back end that runs the graph, for example "inductor".
        seconds: seconds that compilation took.
        num_regions: number of regions of arithmetic. Each region is a single call.
        num_compiled: number of different regions that were compiled.
        cache_hits: number of different regions found in the cache on disk.
    """

    function: Callable[..., tuple[Any, ...]]
    backend: Backend
    seconds: float
    num_regions: int = 0
    num_compiled: int = 0
    cache_hits: int = 0

    def __call__(self, *flat: Tensor) -> tuple[Any, ...]:
        """Runs the graph.

        Example:
            >>> Compiled(lambda x: (x + 1,), "graph", 0.0)(torch.zeros(1))
            (tensor([1.]),)
        """
        with torch.no_grad():
            try:
                return self.function(*flat)
            except Exception as error:
                name_line(error)
                raise


def resolve_backend(backend: str | None) -> Backend:
    """Returns the name of the back end to use.

    For None, "inductor" if a C++ compiler is found, else "graph" with a warning.

    Raises:
        ValueError: no such backend.
        RuntimeError: "inductor" without a C++ compiler.

    Example:
        >>> resolve_backend("graph")
        'graph'
    """
    if backend not in (None, "graph", "inductor"):
        raise ValueError(
            f"backend={backend!r} must be one of 'graph', 'inductor', None (the best that this machine can run)."
        )
    if backend == "graph" or find_compiler():
        return "graph" if backend == "graph" else "inductor"
    if backend == "inductor":
        raise RuntimeError(f"backend='inductor' expected a C++ compiler, got none: {_REMEDY}, or use backend='graph'.")
    if not _WARNED:
        _WARNED.append("said")
        text = f"no C++ compiler found: the step runs uncompiled (backend='graph'). To compile it, {_REMEDY}."
        warnings.warn(text, stacklevel=2)
    return "graph"


def compile_graph(gm: GraphModule, backend: Backend | None = None, *, min_bytes: int = 1 << 16) -> Compiled:
    """Makes a function that runs a captured graph.

    "graph": each node is a call, in the graph's order, bit-identical to eager. "inductor": runs of pointwise ops and
    reductions become compiled calls (see `cut`). Transfers, writes in place, matrix products and attention are as in
    "graph", at the same places. So are ops on rows that come by an exchange, since the number of such rows is data, and
    ops captured under `op_by_op`. With either back end a value is dropped after the last use.

    Args:
        gm: flat graph of aten ops with `meta["val"]`.
        backend: name of the back end. None is the best that this machine can run.
        min_bytes: lower limit. Runs that read and write fewer bytes are not compiled.

    Returns:
        The callable, with the time and counts of the compilation.

    Raises:
        ValueError: no such backend.
        RuntimeError: "inductor" without a working C++ compiler.

    The callable raises ValueError if an argument of compiled code has another shape or strides than the traced
    argument.

    Example:
        >>> from torch.fx.experimental.proxy_tensor import make_fx
        >>> gm = make_fx(lambda x: (x + 1,), tracing_mode="fake")(torch.zeros(1))
        >>> compile_graph(gm, "graph")(torch.zeros(1))
        (tensor([1.]),)

    References:
        Ansel et al., PyTorch 2, 2024, https://pytorch.org/assets/pytorch2-2.pdf
    """
    start = time.perf_counter()
    chosen = resolve_backend(backend)
    gm = with_fusions(exact_rows(gm))
    if chosen == "graph":
        return Compiled(emit(gm, list(gm.graph.nodes), ()), chosen, time.perf_counter() - start)
    steps = cut(gm, min_bytes=min_bytes)
    kernels = compile_regions([step for step in steps if isinstance(step, Region)])
    function = _guard_strides(emit(gm, steps, kernels.calls), steps)
    seconds = time.perf_counter() - start
    return Compiled(function, chosen, seconds, len(kernels.calls), kernels.num_compiled, kernels.cache_hits)


def _guard_strides(function: Callable[..., Any], steps: Sequence[Node | Region]) -> Callable[..., Any]:
    """Wraps compiled code, which relies on strides, in a check of the strides of its arguments."""
    # Ops that are called one by one look at strides themselves.
    read = {node for step in steps if isinstance(step, Region) for node in step.inputs}
    given = [step for step in steps if isinstance(step, Node) and step.op == "placeholder"]
    expected = [(i, *_layout_of(n.meta["val"])) for i, n in enumerate(given) if n in read]

    def run_guarded(*flat: Tensor) -> Any:
        if any(flat[i].stride() != stride or flat[i].shape != shape for i, shape, stride in expected):
            raise_all(
                ValueError,
                "compiled step:",
                [_describe_mismatch(given[i], flat[i]) for i, *layout in expected if [*_layout_of(flat[i])] != layout],
            )
        return function(*flat)

    return run_guarded


def _layout_of(tensor: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return tuple(tensor.shape), tensor.stride()


def _describe_mismatch(node: Node, found: Tensor) -> str:
    (shape, stride), (other, steps) = _layout_of(node.meta["val"]), _layout_of(found)
    return (
        f"{node.meta.get('leaf', node.name)} has shape {other} and strides {steps}, but was captured with {shape} and"
        f" {stride}; pass `.contiguous()` tensors in every call, or use backend='graph'."
    )
