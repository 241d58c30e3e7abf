"""Back ends run a captured graph op by op, or with compiled arithmetic."""

import dataclasses
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from shardfn.core import raise_all

from ._emit import emit, name_line
from ._exact_rows import exact_rows
from ._fusions import with_fusions
from ._inductor import compile_regions, find_compiler
from ._regions import Region, cut

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
