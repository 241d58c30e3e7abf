"""Groups of torch's operations that a single kernel computes with the same bits.

Models of other libraries rotate queries and keys by seven operations, and multiply a gated activation by a separate
product. Where operations run one by one, each operation is a pass over memory and a call. The kernel is a single pass
and a single call, and joins chains (`_emit.py`).
"""

import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from shardfn.kernels import are_built, call_of

from ._edit import call, reorder_graph
from ._exact_rows import can_join_kernel
from ._ops import op_of
from ._regions import is_view
from ._values import overwritten, storage_of, tensors_of, written_by

_ATEN, _KERNELS = torch.ops.aten, torch.ops.shardfn_kernels
_MUL, _ADD = (_ATEN.mul.Tensor, _ATEN.mul_.Tensor), (_ATEN.add.Tensor, _ATEN.add_.Tensor)


class _Fusion(NamedTuple):
    """Group of operations with a single result.

    Attributes:
        inner: operations that only the result reads.
        operands: operands of the kernel.
        write: function that adds the kernel before a result, from the result and the operands, and returns the new
            node.
    """

    inner: tuple[Node, ...]
    operands: tuple[Node, ...]
    write: Callable[..., Node]


def with_fusions(gm: GraphModule) -> GraphModule:
    """Returns the graph with a kernel for each group of operations on a CPU that were captured under `op_by_op`.

    Returns:
        A new graph with the same bits, or the same graph without any such group.

    Example:
        >>> from torch.fx.experimental.proxy_tensor import make_fx
        >>> gm = make_fx(lambda x: (x + 1,), tracing_mode="fake")(torch.ones(2))
        >>> with_fusions(gm) is gm
        True
    """
    order = list(gm.graph.nodes)
    groups = {node: fusion for node in order if (fusion := _find_fusion(node)) is not None}
    if groups:
        groups = _drop_overlaps(groups, order, overwritten(gm))
    if not groups:
        return gm
    out, new = reorder_graph(gm, order)
    for node, fusion in groups.items():
        old = new[node]
        new[node] = fusion.write(old, *(new[n] for n in fusion.operands))
        for erased in (old, *(new[n] for n in fusion.inner)):
            out.graph.erase_node(erased)
    return out


def _drop_overlaps(groups: dict[Node, _Fusion], order: list[Node], lost: set[int]) -> dict[Node, _Fusion]:
    """Returns the groups that share no operation, and whose operands nothing overwrites, in order.

    The strides of operands follow from the graph, not from strides of arguments.
    """
    places, own, found, joined = {n: i for i, n in enumerate(order)}, _find_own_strides(order), {}, set[Node]()
    for node, fusion in groups.items():
        begin = min(places[n] for n in fusion.inner)
        between = [n for n in order[begin : places[node]] if n not in fusion.inner]
        kept = all(n in own and lost.isdisjoint(map(storage_of, tensors_of(n))) for n in fusion.operands)
        if kept and joined.isdisjoint((node, *fusion.inner)) and not any(map(written_by, between)):
            found[node] = fusion
            joined.update((node, *fusion.inner))
    return found


# Operations with strides of results that follow from strides of operands.
_FOLLOWING = (_ATEN.cat.default, _ATEN._to_copy.default, _ATEN.mean.dim, operator.getitem)


def _find_own_strides(order: list[Node]) -> set[Node]:
    """Returns the values whose strides do not depend on the strides of arguments of two dims or more."""
    own = set[Node]()
    for node in order:
        value = node.meta.get("val")
        fixed = node.op == "get_attr" or getattr(node.target, "namespace", "") == "shardfn_kernels"
        fixed = fixed or (isinstance(value, Tensor) and value.ndim < 2 and value.is_contiguous())
        follows = is_view(node) or node.target in _FOLLOWING or op_of(node).pointwise
        if fixed or (follows and own.issuperset(node.all_input_nodes)):
            own.add(node)
    return own


def _find_fusion(node: Node) -> _Fusion | None:
    if node.kwargs or not isinstance(node.meta.get("val"), Tensor):
        return None
    fusion = _find_rotation(node) if node.target in _ADD else _find_gated(node) if node.target in _MUL else None
    if fusion is None or not all(len(n.users) == 1 for n in fusion.inner):
        return None
    # A write to an operand is not the kernel's.
    if not all(n in fusion.inner for n in written_by(node)):
        return None
    group = (node, *fusion.inner)
    around = {n for made in group for n in (made, *made.all_input_nodes)}
    alone = all(n.meta.get("op_by_op") for n in group)
    return fusion if alone and all(map(can_join_kernel, around)) else None


# x cos + (-b, a) sin of x = (a, b) [batch, heads, time, k], whose memory is [batch, time, heads, k].


def _find_rotation(node: Node) -> _Fusion | None:
    one, other = node.args
    for plain, turned in ((one, other), (other, one)):
        match, factors = _split_halves(turned), _arguments_of(plain, _MUL[:1])
        if match is None or factors is None:
            continue
        x, sin, inner = match
        cos = factors[1] if factors[0] is x else factors[0] if factors[1] is x else None
        if isinstance(plain, Node) and isinstance(cos, Node) and _is_rotation(node, x, cos, sin):
            return _Fusion((plain, *inner), (x, cos, sin), _write_rotation)
    return None


def _split_halves(turned: Any) -> tuple[Node, Node, tuple[Node, ...]] | None:
    """Returns the parts of `(-b, a) sin`: x = (a, b), the sine, and the operations."""
    cat: Any
    cat, sin = _arguments_of(turned, _MUL) or (None, None)
    parts, dim = (*(_arguments_of(cat, (_ATEN.cat.default,)) or ()), 0, 0)[:2]
    if not isinstance(parts, list | tuple) or len(parts) != 2 or not isinstance(sin, Node):
        return None
    negative, a = parts
    b: Any
    (b,) = _arguments_of(negative, (_ATEN.neg.default,)) or (None,)
    first, second = _slice_bounds(a), _slice_bounds(b)
    if first is None or second is None or first[0] is not second[0]:
        return None
    x, last = first[0], first[0].meta["val"].ndim - 1
    size = x.meta["val"].shape[-1]
    if dim not in (-1, last) or size % 2 or first[1:] != (last, 0, size // 2) or second[1:] != (last, size // 2, size):
        return None
    return x, sin, (turned, cat, negative, a, b)


def _slice_bounds(node: Any) -> tuple[Node, int, int, int] | None:
    """Returns the tensor, the dim, the begin and the end of a slice of step 1."""
    args = _arguments_of(node, (_ATEN.slice.Tensor,))
    if args is None or not isinstance(args[0].meta.get("val"), Tensor):
        return None
    given: Any = (*args, *(0, None, None, 1)[len(args) - 1 :])
    x, dim, begin, end, step = given
    if step != 1:
        return None
    return x, dim % x.meta["val"].ndim, *slice(begin, end).indices(x.meta["val"].shape[dim])[:2]


def _is_rotation(node: Node, x: Node, cos: Node, sin: Node) -> bool:
    X, out, tables = x.meta["val"], node.meta["val"], [n.meta.get("val") for n in (cos, sin)]
    if X.ndim != 4 or out.shape != X.shape or not _is_transposed(X) or not _is_transposed(out):
        return False
    if not out.numel() or _is_returned(node):  # the strides of dims of a single element are torch's
        return False
    batch, heads, time, k = X.shape
    if any(not isinstance(t, Tensor) or t.shape != (batch, 1, time, k) or not t.is_contiguous() for t in tables):
        return False
    rows, table = X.new_empty(batch * time, heads, k), X.new_empty(batch * time, k)
    return _is_kernel(_KERNELS.rotate.default, (rows, table, table), rows, [X, out, *tables])


def _write_rotation(node: Node, x: Node, cos: Node, sin: Node) -> Node:
    graph, out = node.graph, node.meta["val"]
    batch, heads, time, k = out.shape
    with graph.inserting_before(node):
        base = x.all_input_nodes[0] if _is_transpose(x) else call(graph, _ATEN.transpose.int, (x, 1, 2), like=node)
        given = [call(graph, _ATEN.view.default, (base, [batch * time, heads, k]), like=node)]
        given += [call(graph, _ATEN.view.default, (t, [batch * time, k]), like=node) for t in (cos, sin)]
        made = call(graph, _KERNELS.rotate.default, tuple(given), like=node)
        # Views of the result share memory with the abstract value of the capture.
        made.meta["val"] = out.transpose(1, 2).view(batch * time, heads, k)
        rows = call(graph, _ATEN.view.default, (made, [batch, time, heads, k]), like=node)
        for user in filter(_is_transpose, list(node.users)):
            user.replace_all_uses_with(rows)
        turned = call(graph, _ATEN.transpose.int, (rows, 1, 2), like=node)
    node.replace_all_uses_with(turned)
    return turned


def _is_returned(node: Node) -> bool:
    """Returns whether a value, or a view of the value, is a result of the program."""
    return any(user.op == "output" or (is_view(user) and _is_returned(user)) for user in node.users)


def _is_transpose(node: Node) -> bool:
    """Returns whether a node exchanges heads and time."""
    args = _arguments_of(node, (_ATEN.transpose.int,))
    return args is not None and args[1:] in ((1, 2), (2, 1))


# silu(gate) * ones * up, where silu(gate) * ones is a single kernel.


def _find_gated(node: Node) -> _Fusion | None:
    pair: Any = node.args
    one, other = pair
    for silu, up in ((one, other), (other, one)):
        given: Any = _arguments_of(silu, (_KERNELS.gated_silu.default,)) or (None, None)
        gate, ones = given
        if _arguments_of(ones, (_ATEN.ones_like.default,)) is None or not isinstance(up, Node) or up is silu:
            continue
        x, y, out = values = [n.meta["val"] for n in (gate, up, node)]
        alike = all(isinstance(one, Tensor) and one.shape == out.shape for one in values)
        if alike and _is_kernel(_KERNELS.gated_silu.default, (x, y), out, values):
            return _Fusion((silu, ones), (gate, up), _write_gated)
    return None


def _write_gated(node: Node, gate: Node, up: Node) -> Node:
    with node.graph.inserting_before(node):
        made = call(node.graph, _KERNELS.gated_silu.default, (gate, up), like=node)
    made.meta["val"] = node.meta["val"]
    node.replace_all_uses_with(made)
    return made


def _arguments_of(node: Any, targets: tuple[object, ...]) -> Any:
    """Returns the arguments by position of a call of a given operation, a tuple. None for other nodes."""
    return node.args if isinstance(node, Node) and node.op == "call_function" and node.target in targets else None


def _is_transposed(x: Tensor) -> bool:
    return x.transpose(1, 2).is_contiguous()


def _is_kernel(op: object, arguments: tuple[Any, ...], result: Tensor, values: list[Any]) -> bool:
    """Returns whether an op has a kernel in C++ here, for values of float32 on a CPU."""
    if any(x.dtype != torch.float32 or x.device.type != "cpu" or x.is_neg() for x in values):
        return False
    made = call_of(op, arguments, result)
    return made is not None and are_built([made])
