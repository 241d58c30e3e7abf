"""Writes of a captured forward, replaced by operations that return new values: functionalisation of a graph.

A tensor and the tensor's views share memory. A write to a view becomes an operation that returns the new value. The new
value is put back into the viewed tensor, and so on up to the tensor that owns the memory. Views that are used later are
taken again, from there:

    v = x[:, 1:]             v  = x[:, 1:]
    v.add_(1)                v' = v + 1;  x' = slice_scatter(x, v', 1, 1)
    y = x.sum()              y  = x'.sum()

PyTorch does the same while tracing (https://dev-discuss.pytorch.org/t/functionalization-in-pytorch-2/965, 2022). Here
functionalisation is a pass, so that lines, loops and sections stay next to the operations.

Loops over layers in the graph of a forward.

The graph has the body once, and a node that runs the body for each layer.

    given ... = loop_input()                  placeholders of the carry and of the layer's x
    ...                                       the body; meta["loop"] of each node is the loop's mark
    out = looped(carry, layers, given, ends)  the last carry, then the ys of each layer

`ends` are the nodes of the returned carry and y.
"""

import dataclasses
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node, map_arg

from ._op import by_identity
from ._ops import find_op
from ._values import where_of

_ATEN = torch.ops.aten
_REMEDY = "write to a clone(), or use the operation that returns a new value"


def without_writes(gm: GraphModule) -> Iterator[str]:
    """Replaces the writes of a captured forward. Yields writes that cannot be replaced, with a remedy."""
    walk = _Walk(gm)
    for node in list(gm.graph.nodes):
        reason = walk.visit(node)
        if reason:
            yield f"{where_of(node) or 'a line unknown'}: {node.target} {reason}"
    for node in reversed(walk.replaced):
        gm.graph.erase_node(node)


class _Walk:
    """Goes through a graph in order, and tracks the current value of each tensor.

    Attributes:
        replaced: writes, without users.
    """

    def __init__(self, gm: GraphModule) -> None:
        self.replaced: list[Node] = []
        self._gm = gm
        self._parents: dict[Node, Node] = {}  # by view, the viewed node
        self._written: dict[Node, Node] = {}  # by write, the returned tensor
        self._values: dict[Node, Node] = {}
        self._counts: dict[Node, int] = {}  # by owner of memory, the writes
        self._seen: dict[Node, int] = {}  # by view, how many of the writes the view's value has seen
        self._differentiated: set[Node] = set()
        self._unclear = False  # the gradient of a detached view is lost where the view is taken again

    def visit(self, node: Node) -> str:
        """Takes the next operation, and returns the reason why a write cannot be replaced, or ""."""
        called = node.op == "call_function"
        at = viewed(node.target) if called else None
        parent = None if at is None else self._tensor_of(node.args[at])
        written = self._tensor_of(node.args[0]) if called and find_op(node.target).writes else None
        for given in list(node.all_input_nodes):
            now = self._value_at(given, node)
            if now is not given:
                node.replace_input_with(given, now)
        if self._unclear:
            return f"takes a detached view that was written, as was its base; {_REMEDY}"
        if written is not None:
            found = functional(node)
            if found is None:
                return f"writes to a value; {_REMEDY.split(', or ')[1]}"
            if viewed(found) is None:
                return self._replace_write(node, written, found)
            node.target, parent = found, written  # `t_()`, which only changes the view of the memory
        if parent is not None and (node.target is not operator.getitem or parent in self._parents):
            self._parents[node] = parent
            self._seen[node] = self._counts.get(self._owner_of(node), 0)
        self._note_gradient(node)
        return ""

    def _tensor_of(self, node: Any) -> Node:
        return self._written[node] if node in self._written else node

    def _owner_of(self, tensor: Node) -> Node:
        while (parent := self._parents.get(tensor)) is not None:
            tensor = parent
        return tensor

    def _value_at(self, node: Node, user: Node) -> Node:
        """Returns the value of a tensor at the position of `user`."""
        tensor = self._tensor_of(node)
        count = self._counts.get(self._owner_of(tensor), 0)
        if tensor in self._parents and self._seen[tensor] != count:
            parent = self._value_at(self._parents[tensor], user)
            self._unclear |= tensor.target is _ATEN.detach.default and self._values.get(tensor) in self._differentiated
            target: Any = _ATEN.reshape.default if tensor.target in _RESHAPES else tensor.target
            args = map_arg(tensor.args, lambda n: parent)
            self._values[tensor] = self._insert_call(user, tensor, target, args, dict(tensor.kwargs))
            self._seen[tensor] = count
        return self._values.get(tensor, tensor)

    def _replace_write(self, node: Node, tensor: Node, target: Any) -> str:
        reason = self._refuse_write(node, tensor)
        if reason:
            return reason
        if target is _ATEN.copy.default:
            new = self._copy_value(node)
        else:
            new = self._insert_call(node, node, target, node.args, dict(node.kwargs))
        dtype = tensor.meta["val"].dtype
        if new.meta["val"].dtype != dtype:  # as for a comparison, or a copy from another dtype
            new = self._insert_call(node, node, _ATEN._to_copy.default, (new,), {"dtype": dtype})
        self._store_value(node, tensor, new)
        self._written[node] = tensor
        self.replaced.append(node)
        return ""

    def _copy_value(self, node: Node) -> Node:
        """Returns the value that `x.copy_(y)` writes. Torch does not differentiate the functional `copy`."""
        like = node.meta["val"]
        new = self._insert_call(node, node, _ATEN.expand.default, (node.args[1], list(like.shape)))
        return self._insert_call(node, node, _ATEN.detach.default, (new,)) if node.meta.get("no_grad") else new

    def _store_value(self, node: Node, tensor: Node, value: Node) -> None:
        """Gives a new value to a tensor, and so to the viewed tensors."""
        if tensor not in self._parents:
            self._counts[tensor] = self._counts.get(tensor, 0) + 1
        else:
            source = self._source_of(tensor)
            whole = self._value_at(source, node)
            target, *rest = put_back(tensor, whole)  # pyright: ignore[reportGeneralTypeIssues]
            scatters = target in _SCATTERS
            args = (whole, value, *rest) if scatters else (value, *rest)
            self._store_value(node, source, self._insert_call(node, node, target, args))
            self._seen[tensor] = self._counts[self._owner_of(tensor)]
        self._values[tensor] = value

    def _source_of(self, view: Node) -> Node:
        """Returns the viewed tensor. For a part of a split, the tensor that was split."""
        parent = self._parents[view]
        return self._parents[parent] if view.target is operator.getitem else parent

    def _refuse_write(self, node: Node, tensor: Node) -> str:
        owner, views = self._owner_of(tensor), []
        while tensor in self._parents:
            views.append(tensor)
            tensor = self._source_of(tensor)
        if owner.op != "call_function":
            return f"writes to an argument of the loss, or to a constant that it closes over; {_REMEDY}"
        if owner.target is loop_input or any(x.meta.get("loop") is not node.meta.get("loop") for x in (owner, *views)):
            return "in a scan writes to a value from outside; return it in the carry"
        for view in views:
            if put_back(view, self._source_of(view)) is None:
                return f"writes through a view of another kind ({view.target}); {_REMEDY}"
        unseen = node.meta.get("no_grad") or any(x.target is _ATEN.detach.default for x in views)
        if unseen and self._values.get(owner, owner) in self._differentiated:
            return (
                "writes to a value that is differentiated, where autograd does not see it (under no_grad, or through"
                " detach()); use the operation that returns a new value"
            )
        return ""

    def _insert_call(
        self, user: Node, like: Node, target: Any, args: Any, kwargs: dict[str, Any] | None = None
    ) -> Node:
        """Returns a new operation before `user`, with the metadata of `like`."""
        with self._gm.graph.inserting_before(user):
            new = self._gm.graph.call_function(target, tuple(args), kwargs or {})
        new.meta = dict(like.meta)
        if like.meta.get("loop") is user.meta.get("loop"):
            new.meta["section"] = user.meta.get("section")
        given, named = map_arg((new.args, new.kwargs), lambda n: n.meta["val"])
        new.meta["val"] = target(*given, **named)
        self._note_gradient(new)
        return new

    def _note_gradient(self, node: Node) -> None:
        """Notes whether a gradient may arrive."""
        if node.op == "get_attr":
            able = operator.attrgetter(str(node.target))(self._gm).requires_grad
        else:
            able = node.op == "placeholder" or any(x in self._differentiated for x in node.all_input_nodes)
        val = node.meta.get("val")
        floats = not isinstance(val, Tensor) or val.is_floating_point() or val.is_complex()
        if able and floats and not node.meta.get("no_grad") and node.target is not _ATEN.detach.default:
            self._differentiated.add(node)


@by_identity
def viewed(target: Any) -> int | None:
    """Returns the argument that the results of an op are views of, or None if the results are not views."""
    row = find_op(target)
    if row.views is not None or row.writes:
        return row.views
    if target is operator.getitem:
        return 0
    schema = getattr(target, "_schema", None)
    if schema is None or not any(r.alias_info is not None for r in schema.returns):
        return None
    return next(i for i, a in enumerate(schema.arguments) if a.alias_info is not None)


def functional(node: Node) -> Any:
    """Returns the op that returns the value that a writing op writes, or None without such an op."""
    found, val = _find_functional(node.target), node.meta.get("val")
    if found is None or not isinstance(node.args[0], Node) or not isinstance(val, Tensor):
        return None
    args, kwargs = map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    made = found(*args, **kwargs)
    same = isinstance(made, Tensor) and made.shape == val.shape
    return found if same and len(find_op(node.target).writes) == 1 else None


@by_identity
def _find_functional(target: Any) -> Any:
    """Returns the overload that takes the same arguments, and writes nothing."""
    name = str(target.overloadpacket).removeprefix("aten.")
    base = getattr(_ATEN, name.removesuffix("_"), None) if name.endswith("_") else None
    overloads = [] if base is None else [getattr(base, x) for x in base.overloads()]
    return next((x for x in overloads if _argument_types(x) == _argument_types(target)), None)


def _argument_types(target: Any) -> list[tuple[str, str]]:
    return [(a.name, str(a.type)) for a in target._schema.arguments]


# By view, the op and the further arguments that put the value back into the source.

_RESHAPES = {_ATEN.view.default, _ATEN._unsafe_view.default, _ATEN.reshape.default}
_SCATTERS = {_ATEN.slice_scatter.default, _ATEN.select_scatter.default, _ATEN.diagonal_scatter.default}


def put_back(view: Node, whole: Node) -> tuple[Any, ...] | None:
    """Returns an op and further arguments.

    A scatter takes the whole and the value. Another op takes only the value.
    """
    packet = getattr(view.target, "overloadpacket", view.target)
    found = _PUT_BACK.get(packet)
    if found is None or view.target is _ATEN.view.dtype:
        return None
    return found(view, whole.meta["val"].shape)


def _reshape_back(view: Node, shape: torch.Size) -> tuple[Any, ...] | None:
    repeats = view.meta["val"].numel() != shape.numel()  # an expand: elements share memory
    return None if repeats else (_ATEN.reshape.default, list(shape))


def _permute_back(view: Node, shape: torch.Size) -> tuple[Any, ...]:
    order = [d % len(shape) for d in view.args[1]]  # pyright: ignore
    return _ATEN.permute.default, [order.index(d) for d in range(len(shape))]


def _scatter_slice(view: Node, shape: torch.Size) -> tuple[Any, ...]:
    given = dict(zip(("dim", "start", "end", "step"), view.args[1:], strict=False)) | view.kwargs
    if view.meta["val"].shape == shape:
        return (_ATEN.alias.default,)
    named = given.get("dim", 0), given.get("start"), given.get("end"), given.get("step", 1)
    return _ATEN.slice_scatter.default, *named


def _scatter_part(view: Node, shape: torch.Size) -> tuple[Any, ...] | None:
    """Puts a result of `split` or `unbind` back."""
    del shape
    source, at = view.args
    packet = getattr(source.target, "overloadpacket", None)  # pyright: ignore
    given = dict(zip(("sizes", "dim"), source.args[1:], strict=False)) | source.kwargs  # pyright: ignore
    if packet is _ATEN.unbind:
        return _ATEN.select_scatter.default, given.get("sizes", given.get("dim", 0)), at
    if packet not in (_ATEN.split, _ATEN.split_with_sizes):
        return None
    dim = given.get("dim", 0)
    start = sum(x.shape[dim] for x in source.meta["val"][:at])  # pyright: ignore
    return _ATEN.slice_scatter.default, dim, start, start + view.meta["val"].shape[dim], 1


_PUT_BACK: dict[Any, Callable[[Node, torch.Size], tuple[Any, ...] | None]] = {
    **dict.fromkeys((_ATEN.view, _ATEN._unsafe_view, _ATEN.reshape), _reshape_back),
    **dict.fromkeys((_ATEN.unsqueeze, _ATEN.squeeze, _ATEN.expand), _reshape_back),
    **dict.fromkeys((_ATEN.alias, _ATEN.lift_fresh), lambda view, shape: (_ATEN.alias.default,)),
    _ATEN.detach: lambda view, shape: (_ATEN.detach.default,),
    _ATEN.t: lambda view, shape: (_ATEN.t.default,),
    _ATEN.transpose: lambda view, shape: (_ATEN.transpose.int, *view.args[1:]),
    _ATEN.permute: _permute_back,
    _ATEN.select: lambda view, shape: (_ATEN.select_scatter.default, *view.args[1:]),
    _ATEN.slice: _scatter_slice,
    _ATEN.diagonal: lambda view, shape: (_ATEN.diagonal_scatter.default, *view.args[1:]),
    operator.getitem: _scatter_part,
}


def loop_input() -> Any:
    """Target of a node that is a placeholder of a body's argument."""


def looped(carry: Any, layers: Any, given: Any, ends: Any) -> Any:
    """Target of a node that runs a body, as the node's `meta["body"]` marks."""


@dataclasses.dataclass(eq=False)
class LoopMark:
    """Mark of the loop that a node is a part of. Nodes of an inner loop have the inner loop's mark."""


@dataclasses.dataclass(frozen=True, eq=False)
class Body:
    """Operations that a loop runs for each layer.

    Attributes:
        nodes: operations in order, without operations of inner loops.
        given: placeholders of the carry and of x.
        num_carry: number of placeholders of the carry.
        ends: nodes of the returned carry, then of y.
        outside: nodes of the surrounding graph that the body uses, directly or in inner loops.
    """

    nodes: list[Node]
    given: list[Node]
    num_carry: int
    ends: list[Node]
    outside: list[Node]


def bodies_of(graph: Graph) -> tuple[list[Node], dict[Node, Body]]:
    """Returns the nodes outside of all loops, in order, and the body of each loop, by the node that runs the body.

    Raises:
        ValueError: a value that a body makes is used outside of the body. The message has the line.
    """
    within: dict[LoopMark | None, list[Node]] = {None: []}
    for node in graph.nodes:
        # A constant is the same for all layers, and the constant's node may serve several bodies.
        mark = None if node.op == "get_attr" else node.meta.get("loop")
        within.setdefault(mark, []).append(node)
    bodies: dict[Node, Body] = {}
    for node in graph.nodes:  # inner loops end before the surrounding loops
        if node.target is looped:
            bodies[node] = _add_body(node, within.get(node.meta["body"], []), bodies)
    for nodes in within.values():
        _check_scope(nodes, bodies)
    return within[None], bodies


def reads(node: Node, bodies: dict[Node, Body]) -> list[Node]:
    """Returns the surrounding nodes that a node needs."""
    if node.target is not looped:
        return node.all_input_nodes
    args: Any = node.args
    return list(dict.fromkeys([*args[0], *(n for x in args[1] for n in x), *bodies[node].outside]))


def _add_body(node: Node, nodes: Sequence[Node], bodies: dict[Node, Body]) -> Body:
    args: Any = node.args
    carry, _, given, ends = args
    own = {*nodes}
    needed = dict.fromkeys(n for inner in nodes for n in reads(inner, bodies))
    needed |= dict.fromkeys(ends)
    kept = [n for n in nodes if n.target is not loop_input]
    outside = [n for n in needed if n not in own]
    return Body(kept, list(given), len(carry), list(ends), outside)


def _check_scope(nodes: Sequence[Node], bodies: dict[Node, Body]) -> None:
    """Refuses uses, outside of a body, of values that the body has made and does not return."""
    for node in nodes:
        mark = node.meta.get("loop") if node.op != "get_attr" else None
        for n in reads(node, bodies):
            made_in = None if n.op == "get_attr" else n.meta.get("loop")
            if made_in is not None and made_in is not mark and not _is_around(made_in, node, bodies):
                raise ValueError(
                    f"{where_of(n) or 'a line unknown'}: a tensor that the function of a scan has made is"
                    " used outside of the function, and must be in the carry or in y. Return the tensor,"
                    " since the function's Python runs for one layer only."
                )


def _is_around(mark: LoopMark, node: Node, bodies: dict[Node, Body]) -> bool:
    """Returns whether a node is in a loop inside the loop of this mark."""
    here = node.meta.get("loop")
    while here is not None and here is not mark:
        here = next((n.meta.get("loop") for n in bodies if n.meta["body"] is here), None)
    return here is mark
