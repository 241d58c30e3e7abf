"""Compiles a list of steps to a Python function.

The function drops values after the last use, and looks each op up once.

fx's code looks every op up by four attributes at every call, and calls the op through a wrapper in Python. Here an op
is a global of the generated module: torch's binding of the kernel if there is a binding, at half the time, or for an op
of `shardfn.kernels` the function in Python, at a third of the time.

A kernel of few rows takes about as long as the call, the allocation of results and the views around the kernel. In a
run of kernels, values that nothing else reads are places in a common piece of memory, found for all values when the
program is compiled. A single view of the first tensor can replace a chain of views.
"""

import dataclasses
import linecache
import operator
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from shardfn._torch import OpOverload
from shardfn.core import is_in_memory
from shardfn.kernels import KernelCall, KernelChain, are_built, call_of, without_dispatch
from shardfn.memory import on_host

from ._exact_rows import can_join_kernel, has_short_rows
from ._ops import op_of
from ._regions import Region, is_view
from ._transfers import memory_of
from ._values import num_bytes, overwritten, part_of, storage_of, tensors_of, written_by

# Ops whose results are dense for arguments of any strides.
_ALWAYS_DENSE = (torch.ops.aten.embedding.default,)
_RESIZES = (torch.ops.aten.resize_, torch.ops.aten.resize_as_, torch.ops.aten.set_)


def whole_views(steps: Sequence[Node | Region]) -> dict[Node, Node]:
    """Returns by view the earliest value with all elements of the view in the same order.

    Example:
        >>> from torch.fx.experimental.proxy_tensor import make_fx
        >>> gm = make_fx(lambda x: ((x + 1).view(2, 3)[None][0].t(),), tracing_mode="fake")(torch.ones(6))
        >>> {node.name: of.name for node, of in whole_views(list(gm.graph.nodes)).items()}
        {'view': 'add', 'unsqueeze': 'add', 'select': 'add'}
    """
    first: dict[Node, Node] = {}
    bases: dict[Node, tuple[Node, ...]] = {}  # by view, all viewed values, the earliest first
    # Tensors that get another shape differ from the captured tensors.
    reshaped = {
        storage_of(x) for step in steps if _is_reshaping(step) for n in step.all_input_nodes for x in tensors_of(n)
    }
    for step in steps:
        of = _viewed_node(step) if isinstance(step, Node) else None
        if isinstance(step, Node) and of is not None and reshaped.isdisjoint(map(storage_of, tensors_of(step))):
            bases[step] = (*bases.get(of, ()), of)
            base = next((base for base in bases[step] if _shows_all(step, base)), None)
            if base is not None:
                first[step] = base
    return first


def list_needed(steps: Sequence[Node | Region], first: dict[Node, Node]) -> list[Node | Region]:
    """Returns the steps without views that no other step reads. Views in `first` are read from the first value."""
    read: set[Node] = set()
    kept: list[Node | Region] = []
    for step in reversed(steps):
        if isinstance(step, Node) and step not in read and is_view(step) and not _is_reshaping(step):
            continue
        kept.append(step)
        read.update(reads(step, first))
    return kept[::-1]


def reads(step: Node | Region, first: Mapping[Node, Node]) -> Sequence[Node]:
    """Returns the values that a step reads."""
    if isinstance(step, Region):
        return step.inputs
    return [first[step]] if step in first else step.all_input_nodes


def _viewed_node(node: Node) -> Node | None:
    # `as_strided` counts in memory, and strides at run time may differ.
    of = node.args[0] if is_view(node) and node.target is not torch.ops.aten.as_strided.default else None
    return of if isinstance(of, Node) else None


def _is_reshaping(step: Node | Region) -> TypeGuard[Node]:
    """Returns whether a step changes the shape of a tensor, or the tensor's memory, in place."""
    target: Any = step.target if isinstance(step, Node) else None
    return torch.Tag.inplace_view in getattr(target, "tags", ()) or getattr(target, "overloadpacket", None) in _RESIZES


def _shows_all(node: Node, of: Node) -> bool:
    x, y = of.meta.get("val"), node.meta.get("val")
    if not isinstance(x, torch.Tensor) or not isinstance(y, torch.Tensor) or has_short_rows(node):
        return False
    if x.dtype != y.dtype or x.numel() != y.numel() or not all(type(size) is int for size in (*x.shape, *y.shape)):
        return False
    one_memory = storage_of(x) == storage_of(y) and x.storage_offset() == y.storage_offset()
    # The marks of `conj` and of a negative view are a part of the value.
    one_value = x.is_conj() == y.is_conj() and x.is_neg() == y.is_neg()
    return one_memory and one_value and is_dense(x) and is_dense(y)


def is_dense(x: torch.Tensor) -> bool:
    """Returns whether the strides are the strides of `view`, also in dims of a single element."""
    return x.stride() == torch.empty(x.shape, device="meta").stride()


# The most bytes of results and room. A chain holds these bytes from begin to end. Programs with larger values spend
# little time on calls.
MOST_BYTES = 1 << 22
_ALIGNED = 64

Place = tuple[int, int]  # a storage, and bytes before it
_Run = dict[Node, KernelCall | None]  # in order, or None for views and parts of results


@dataclasses.dataclass(frozen=True)
class ChainRegion(Region):
    """Kernels that run in sequence.

    Attributes:
        steps: nodes, and the views between nodes.
        room: bytes of the values that only these kernels read.
        places: number of the memory, and first byte there, of each value (`kernels.KernelChain`).
    """

    steps: tuple[Node, ...]
    room: int
    places: dict[Place, tuple[int, int]]

    def calls(self) -> list[KernelCall]:
        """Returns the calls, for the present number of threads."""
        return [call for node in self.nodes if (call := _kernel_call(node)) is not None]

    def place(self, x: Tensor) -> tuple[int, int]:
        """Returns the memory of a tensor of the calls, and the tensor's first byte there."""
        return self.places[_place_in_storage(x)]


def with_chains(
    steps: Sequence[Node | Region], views: Mapping[Node, Node]
) -> tuple[list[Node | Region], dict[Node, Node]]:
    """Returns the steps, with a region in place of each run of kernels, and the views outside of regions.

    Args:
        steps: nodes and regions in order.
        views: earliest value with the same elements, by view.

    Returns:
        The steps, and `views` with the results of ops that a region writes over the memory of another value.

    Example:
        >>> import torch
        >>> from torch.fx.experimental.proxy_tensor import make_fx
        >>> from shardfn.kernels import gelu
        >>> gm = make_fx(lambda x: (gelu(x.cos()) + x,), tracing_mode="fake")(torch.ones(2))
        >>> [str(s) if isinstance(s, Node) else len(s.nodes) for s in with_chains(list(gm.graph.nodes), {})[0]]
        ['x_1', 'cos', 2, 'output']
    """
    readers: dict[Node, list[Node | Region]] = {}
    for step in steps:
        for node in reads(step, views):
            readers.setdefault(node, []).append(step)
    out, outside = list[Node | Region](), dict(views)
    run: _Run = {}
    for step in steps:
        if isinstance(step, Node) and _join_run(step, run, views):
            continue
        out += [*_close_run(run, views, outside, readers), step]
        run = {}
    return out, outside


def _join_run(node: Node, run: _Run, views: Mapping[Node, Node]) -> bool:
    """Adds a node to a run if possible, and returns whether the node is a part of the run now."""
    if node in views or node.target is operator.getitem:
        call, joins = None, bool(run) if node in views else node.args[0] in run
    else:
        call = _kernel_call(node)
        # A view that is written may have to be a copy, if the value has other strides than the abstract value.
        strided = [n for n in written_by(node) if n in views and views[n].target not in _ALWAYS_DENSE]
        joins = call is not None and not strided
    if joins:
        run[node] = call
    return joins


def _kernel_call(node: Node) -> KernelCall | None:
    if node.op != "call_function" or node.kwargs or node.target is operator.getitem:
        return None
    around = (node, *node.all_input_nodes)
    if any(n.meta.get("val") is None or not can_join_kernel(n) for n in around):
        return None
    if max(map(num_bytes, tensors_of(node)), default=0) > MOST_BYTES // 2:  # would make the run too large
        return None
    return call_of(node.target, map_arg(node.args, lambda n: n.meta["val"]), node.meta["val"])


def _close_run(
    run: _Run, views: Mapping[Node, Node], outside: dict[Node, Node], readers: dict[Node, list[Node | Region]]
) -> list[Node | Region]:
    """Returns a run as a region, and the views read elsewhere, made afterwards. Without a region, returns the run."""
    nodes = [n for n in run if n not in views]
    made = [n for n in nodes if n.target is not operator.getitem]
    # A run of only additions stays torch's, so that programs without kernels of shardfn build no chains.
    if len(made) < 2 or all(getattr(n.target, "namespace", "") == "aten" for n in made):
        return list(run)
    owners = {n: views[n] for n in run if n in views}
    for node in nodes:
        of = node.args[0]
        if isinstance(of, Node) and isinstance(of.meta["val"], Tensor) and _place_of(node) == _place_of(of):
            owners[node] = of  # an op that writes over the operand
    seen = {n for n in run if any(user not in run for user in readers.get(n, []))}
    shown = [n for n in run if n in owners and n in seen]
    made_by = {n: _find_owner(n, owners) for n in shown}
    seen.update(made_by.values())
    inputs = list(dict.fromkeys(n for step in run for n in reads(step, views) if n not in run))
    outputs = [n for n in nodes if n in seen and n not in owners]
    dense = all(isinstance(n.meta["val"], Tensor) and is_dense(n.meta["val"]) for n in outputs)
    if not dense or not _are_apart(inputs, outputs, views):
        return list(run)
    places, room = _place_values(nodes, inputs, outputs)
    region = ChainRegion(tuple(nodes), tuple(inputs), tuple(outputs), tuple(run), room, places)
    if room + sum(num_bytes(n.meta["val"]) for n in outputs) > MOST_BYTES:
        return list(run)
    if not are_built([call for call in run.values() if call is not None]):
        return list(run)
    outside.update(made_by)
    return [region, *shown]


def _are_apart(inputs: Sequence[Node], outputs: Sequence[Node], views: Mapping[Node, Node]) -> bool:
    """Returns whether each place belongs to a single value. Arguments of a program may share an abstract value."""
    given, made = {_place_of(n) for n in inputs}, {_place_of(n) for n in outputs}
    once = len(given) == len({views.get(n, n) for n in inputs}) and len(made) == len(outputs)
    return once and given.isdisjoint(made)


def _find_owner(node: Node, owners: Mapping[Node, Node]) -> Node:
    while node in owners:
        node = owners[node]
    return node


def _place_of(node: Node) -> Place | None:
    value = node.meta["val"]
    return _place_in_storage(value) if isinstance(value, Tensor) else None


def _place_values(
    nodes: Sequence[Node], inputs: Sequence[Node], outputs: Sequence[Node]
) -> tuple[dict[Place, tuple[int, int]], int]:
    """Returns the places of all values, and the bytes of the room."""
    places = {_place_in_storage(x): (i, 0) for i, n in enumerate(inputs) for x in tensors_of(n)}
    places |= {_place_in_storage(x): (len(inputs) + 1 + i, 0) for i, n in enumerate(outputs) for x in tensors_of(n)}
    last: dict[Place, int] = {}
    for i, node in enumerate(nodes):
        for n in (node, *node.all_input_nodes):
            last |= dict.fromkeys(map(_place_in_storage, tensors_of(n)), i)
    live: list[tuple[int, int, int]] = []  # begin, end, the last call that reads it; by begin
    room = 0
    for i, node in enumerate(nodes):
        live = [x for x in live if x[2] >= i]
        for made in tensors_of(node):
            if _place_in_storage(made) not in places:
                begin, size = 0, -(-num_bytes(made) // _ALIGNED) * _ALIGNED
                for taken, end, _ in live:
                    if begin + size <= taken:
                        break
                    begin = max(begin, end)
                live = sorted([*live, (begin, begin + size, last[_place_in_storage(made)])])
                room = max(room, begin + size)
                places[_place_in_storage(made)] = len(inputs), begin
    return places, room


def _place_in_storage(x: Tensor) -> Place:
    return storage_of(x), int(x.storage_offset()) * x.element_size()


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
