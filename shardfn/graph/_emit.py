# pyright: reportPrivateImportUsage=false
"""Compiles a list of steps to a Python function.

The function drops values after the last use, and looks each op up once.

fx's code looks every op up by four attributes at every call, and calls the op through a wrapper in Python. Here an op
is a global of the generated module: torch's binding of the kernel if there is a binding, at half the time, or for an op
of `shardfn.kernels` the function in Python, at a third of the time.
"""

import linecache
import operator
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from shardfn._torch import OpOverload
from shardfn.core import is_in_memory
from shardfn.kernels import KernelChain, without_dispatch
from shardfn.memory import on_host

from ._chains import ChainRegion, list_needed, reads, whole_views, with_chains
from ._ops import op_of
from ._regions import Region, is_view
from ._transfers import memory_of
from ._values import overwritten, part_of, storage_of, tensors_of

_FILE = "<shardfn graph "
_LOOKS = (torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default)


def emit(gm: GraphModule, steps: Sequence[Node | Region], calls: Sequence[Callable[..., Any]]) -> Callable[..., Any]:
    """Returns the function `(*flat) -> tuple` that runs `steps` in order.

    Args:
        gm: graph of the steps. Attributes of the graph are bound.
        steps: nodes and regions, each after the inputs. The last step is the output.
        calls: function of each region, in order. A function empties the list of inputs.

    Example:
        >>> gm = torch.fx.symbolic_trace(lambda x: (x + 1,))
        >>> emit(gm, list(gm.graph.nodes), [])(torch.zeros(1))
        (tensor([1.]),)
    """
    views = whole_views(steps)
    (steps, outside), written, given = with_chains(list_needed(steps, views), views), overwritten(gm), iter(calls)
    regions = [step for step in steps if isinstance(step, Region)]
    calls = [_write_chain(gm, r, written, views) if isinstance(r, ChainRegion) else next(given) for r in regions]
    writer = _CodeWriter(gm, iter(calls), written, outside)
    last = _last_uses(steps, outside)
    for i, step in enumerate(steps):
        writer.write(step, last.get(i, []))
    return writer.function()


def _write_chain(gm: GraphModule, region: ChainRegion, written: set[Any], views: dict[Node, Node]) -> KernelChain:
    writer = _CodeWriter(gm, iter(()), written, views)
    for node in region.inputs:
        writer.take(node)
    last, kept = _last_uses(region.steps, views), {*region.inputs, *region.outputs}
    for i, node in enumerate(region.steps):
        writer.write(node, [n for n in last.get(i, []) if n not in kept])
    writer.give(region.outputs)
    given, results = ([node.meta["val"] for node in nodes] for nodes in (region.inputs, region.outputs))
    plain = writer.function(f".{region.nodes[0].name}")
    return KernelChain(region.calls, region.place, given, region.room, results, plain)


def name_line(error: BaseException) -> None:
    """Adds a note to an error from inside an emitted function: which op failed, and at which line of the user's code.

    Example:
        >>> def fails(x):
        ...     return (x.view(1, 3),)
        >>> from torch.fx.experimental.proxy_tensor import make_fx
        >>> gm = make_fx(fails, tracing_mode="fake")(torch.zeros(3))
        >>> next(n for n in gm.graph.nodes if n.op == "call_function").meta["where"] = "model.py:7 in forward"
        >>> try:
        ...     emit(gm, list(gm.graph.nodes), [])(torch.zeros(2))
        ... except RuntimeError as error:
        ...     name_line(error)
        ...     error.__notes__
        ['in a captured step, at model.py:7 in forward: v1 = g0(v0, [1, 3])']
    """
    at, text = error.__traceback__, ""
    while at is not None:
        if at.tb_frame.f_code.co_filename.startswith(_FILE):
            text = linecache.getline(at.tb_frame.f_code.co_filename, at.tb_lineno).strip()
        at = at.tb_next
    call, _, where = text.partition("  # ")
    if where:
        error.add_note(f"in a captured step, at {where}: {call}")


def _view_or_copy(x: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Returns a view if possible, else a copy: a kernel may return other strides than the abstract value has."""
    try:
        return x.view(shape)
    except RuntimeError:
        return x.reshape(shape)


def _is_same(node: Node, of: Node) -> bool:
    """Returns whether a view of all elements can be the viewed value. A returned view must be a separate tensor."""
    same = node.meta["val"].shape == of.meta["val"].shape
    return same and not (is_view(node) and any(user.op == "output" for user in node.users))


def _results_of(step: Node | Region) -> Sequence[Node]:
    return step.outputs if isinstance(step, Region) else (step,)


def _last_uses(steps: Sequence[Node | Region], first: dict[Node, Node]) -> dict[int, list[Node]]:
    """Returns for each step the values that no later step needs, without arguments and constants, owned elsewhere."""
    last: dict[Node, int] = {}
    for i, step in enumerate(steps):
        for node in (*_results_of(step), *reads(step, first)):
            if node.op not in ("placeholder", "get_attr", "output"):
                last[node] = i
    by_step: dict[int, list[Node]] = {}
    for node, i in last.items():
        by_step.setdefault(i, []).append(node)
    return by_step


def _drop_lines(name: str, entry: tuple[Any, ...]) -> None:
    """Drops the lines of a function that is gone, unless a later graph has the same name, made of an id."""
    if linecache.cache.get(name) is entry:
        del linecache.cache[name]


class _CodeWriter:
    def __init__(self, gm: GraphModule, calls: Any, written: set[Any], first: dict[Node, Node]) -> None:
        self.gm, self.calls, self.written, self.first = gm, calls, written, first
        self.names: dict[Node, str] = {}
        self.globals: dict[str, Any] = {}
        self.bound: dict[Any, str] = {}
        self.arguments: list[str] = []
        self.lines: list[str] = []
        self.on_host = False

    def write(self, step: Node | Region, dead: list[Node]) -> None:
        self._switch_block(
            isinstance(step, Node) and step.op == "call_function" and is_in_memory(memory_of(step), "host")
        )
        if isinstance(step, Region):
            self._write_region(step, dead)
        elif step.op == "placeholder":
            self.take(step)
        elif step.op == "get_attr":
            self.names[step] = self._add_global(operator.attrgetter(str(step.target))(self.gm))
        elif step.op == "output":
            self.give(_to_tuple(step.args[0]))
        else:
            self._write_call(step, dead)

    def take(self, node: Node) -> None:
        """Makes a value an argument of the function."""
        self.arguments.append(self._name_of(node))

    def give(self, values: tuple[Any, ...]) -> None:
        """Makes values the results of the function."""
        self._write_line(f"return {self._format_value(values)}")

    def function(self, part: str = "") -> Callable[..., Any]:
        """Compiles the written lines. Tracebacks show the lines."""
        source = "\n".join([f"def step({', '.join(self.arguments)}):", *self.lines])
        name = f"{_FILE}{id(self.gm):x}{part}>"
        entry = linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
        exec(compile(source, name, "exec"), self.globals)
        weakref.finalize(self.globals["step"], _drop_lines, name, entry).atexit = False
        return self.globals["step"]

    def _switch_block(self, host: bool) -> None:
        """Opens or closes the block in which values are made on the host, so that the ledger counts host memory."""
        if host and not self.on_host:
            self._write_line(f"with {self._add_global(on_host)}():")
        self.on_host = host

    def _write_region(self, region: Region, dead: list[Node]) -> None:
        """Writes the call of a region. Inputs are in a list, from which the kernel drops inputs on the way."""
        self._write_line(f"given = [{', '.join(self.names[node] for node in region.inputs)}]")
        made = set(region.outputs)
        self._write_drop([node for node in dead if node not in made])
        call = self._add_global(next(self.calls))
        names = "".join(f"{self._name_of(node)}, " for node in region.outputs)
        self._write_line(f"{names}= {call}(given)" if names else f"{call}(given)")

    def _write_call(self, node: Node, dead: list[Node]) -> None:
        text = (
            self._write_view(node, self.first[node])
            if node in self.first
            else f"{self._write_op(node)}({self._format_arguments(node)})"
        )
        where = "; ".join(part for part in (node.meta.get("where"), part_of(node)) if part)
        unused = [n for n in dead if n is node]
        self._write_line(("" if unused else f"{self._name_of(node)} = ") + text + (f"  # {where}" if where else ""))
        self._write_drop([n for n in dead if n is not node])

    def _write_view(self, node: Node, of: Node) -> str:
        if _is_same(node, of):
            return self.names[of]
        shape = self._format_value(list(node.meta["val"].shape))
        return f"{self._add_global(self._view_function(node))}({self.names[of]}, {shape})"

    def _view_function(self, node: Node) -> Callable[..., torch.Tensor]:
        """Returns the function that takes a view. A view of memory that is written must not be a copy."""
        apart = self.written.isdisjoint(map(storage_of, tensors_of(node)))
        return _view_or_copy if apart else torch.Tensor.view

    def _write_op(self, node: Node) -> str:
        if node.op == "call_method":
            return self._add_global(getattr(torch.Tensor, str(node.target)))
        if node.op == "call_module":
            return self._add_global(self.gm.get_submodule(str(node.target)))
        op: Any = node.target
        if op in _LOOKS:
            return self._add_global(self._view_function(node))
        # The same kernels through torch's parsers written in C++: 1 us a call less, a gain for small ops.
        if not node.kwargs and (function := without_dispatch(op)) is not None:
            return self._add_global(function)
        binding = op_of(node).calls.get(getattr(op, "_overloadname", ""))
        return self._add_global(binding or (op._op if isinstance(op, OpOverload) else op))

    def _format_arguments(self, node: Node) -> str:
        named = [f"{key}={self._format_value(value)}" for key, value in node.kwargs.items()]
        return ", ".join([*map(self._format_value, node.args), *named])

    def _format_value(self, value: Any) -> str:
        if isinstance(value, Node):
            return self.names[value]
        if isinstance(value, tuple):
            return f"({''.join(self._format_value(v) + ', ' for v in value)})"
        if isinstance(value, list):
            return f"[{', '.join(map(self._format_value, value))}]"
        plain = value is None or type(value) in (int, bool, str)
        return repr(value) if plain else self._add_global(value)

    def _add_global(self, value: Any) -> str:
        key = (type(value), id(value))
        if key not in self.bound:
            self.bound[key] = f"g{len(self.bound)}"
            self.globals[self.bound[key]] = value
        return self.bound[key]

    def _name_of(self, node: Node) -> str:
        return self.names.setdefault(node, f"v{len(self.names)}")

    def _write_drop(self, nodes: list[Node]) -> None:
        if nodes:
            self._write_line(f"del {', '.join(self.names[node] for node in nodes)}")

    def _write_line(self, text: str) -> None:
        self.lines.append("    " * (2 if self.on_host else 1) + text)


def _to_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list | tuple) else (value,)
