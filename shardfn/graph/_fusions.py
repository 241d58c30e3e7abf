"""Groups of torch's operations that one kernel computes with the same bits.

Models of others rotate queries and keys by seven operations, and multiply a gated activation by its own product. Where
operations run one by one, each is a pass over memory and a call. Their kernels are one of each, and join chains
(`_chains.py`).
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from shardfn.kernels import are_built, call_of

from ._edit import call, reordered
from ._exact_rows import has_short_rows
from ._moves import memory_of

_ATEN, _KERNELS = torch.ops.aten, torch.ops.shardfn_kernels
_MUL, _ADD = (_ATEN.mul.Tensor, _ATEN.mul_.Tensor), (_ATEN.add.Tensor, _ATEN.add_.Tensor)


class _Fusion(NamedTuple):
    """A group of operations with one result.

    Attributes:
        inner: the operations that the result alone reads, the last first.
        operands: of the kernel.
        write: adds the kernel before a result and in its place; from the result and the operands.
    """

    inner: tuple[Node, ...]
    operands: tuple[Node, ...]
    write: Callable[..., None]


def with_fusions(gm: GraphModule) -> GraphModule:
    """The graph with a kernel in place of each group of operations on a CPU that were captured under `op_by_op`.

    Returns:
        A new graph with the same bits; the same one if it has no such group.

    Example:
        >>> from torch.fx.experimental.proxy_tensor import make_fx
        >>> gm = make_fx(lambda x: (x + 1,), tracing_mode="fake")(torch.ones(2))
        >>> with_fusions(gm) is gm
        True
    """
    found = {node: fusion for node in gm.graph.nodes for fusion in _fusions(node)}
    if not found:
        return gm
    out, new = reordered(gm, list(gm.graph.nodes))
    for node, fusion in found.items():
        fusion.write(new[node], *(new[n] for n in fusion.operands))
        for inner in (node, *fusion.inner):
            out.graph.erase_node(new[inner])
    return out


def _fusions(node: Node) -> Iterator[_Fusion]:
    if not node.meta.get("op_by_op") or node.kwargs or not isinstance(node.meta.get("val"), Tensor):
        return
    makers = {**dict.fromkeys(_ADD, _rotation), **dict.fromkeys(_MUL, _gated)}
    fusion = makers[node.target](node) if node.target in makers else None
    if fusion is None or not all(len(n.users) == 1 and not n.kwargs.get("dtype") for n in fusion.inner):
        return
    around = {n for inner in (node, *fusion.inner) for n in (inner, *inner.all_input_nodes)}
    if all(memory_of(n) == "device" and not has_short_rows(n) for n in around):
        yield fusion


# x cos + (-b, a) sin of x = (a, b) [batch, heads, time, k], whose memory is [batch, time, heads, k].


def _rotation(node: Node) -> _Fusion | None:
    for plain, turned in (node.args[:2], node.args[1::-1]):
        match = _halves(turned)
        if match is None or not _is_call(plain, _MUL[:1]):
            continue
        x, sin, inner = match
        cos = _other(plain, x)
        if cos is not None and _rotates(node, x, cos, sin):
            return _Fusion((plain, *inner), (x, cos, sin), _write_rotation)
    return None


def _halves(node: object) -> tuple[Node, Node, tuple[Node, ...]] | None:
    """Of `(-b, a) sin`: x = (a, b), the sine, and the operations."""
    if not _is_call(node, _MUL):
        return None
    cat, sin = node.args
    if not _is_call(cat, (_ATEN.cat.default,)) or not isinstance(sin, Node):
        return None
    parts, dim = cat.args[0], cat.args[1] if len(cat.args) > 1 else 0
    if not isinstance(parts, list | tuple) or len(parts) != 2 or not _is_call(parts[0], (_ATEN.neg.default,)):
        return None
    b, a = parts[0].args[0], parts[1]
    if not _is_call(a, (_ATEN.slice.Tensor,)) or not _is_call(b, (_ATEN.slice.Tensor,)):
        return None
    x = a.args[0]
    if not isinstance(x, Node) or b.args[0] is not x or not isinstance(x.meta.get("val"), Tensor):
        return None
    last, size = x.meta["val"].ndim - 1, x.meta["val"].shape[-1]
    first_half, second_half = _range(a), _range(b)
    fits = dim in (-1, last) and size % 2 == 0
    if not fits or first_half != (last, 0, size // 2) or second_half != (last, size // 2, size):
        return None
    return x, sin, (node, cat, parts[0], a, b)


def _range(node: Node) -> tuple[int, int, int] | None:
    """The dim, the begin and the end of a slice of step 1."""
    x = node.all_input_nodes[0].meta["val"]
    _, dim, begin, end, step = (*node.args, *(0, None, None, 1)[len(node.args) - 1 :])
    if step != 1 or not isinstance(dim, int):
        return None
    begin, end, step = slice(begin, end).indices(x.shape[dim])
    return dim % x.ndim, begin, end


def _rotates(node: Node, x: Node, cos: Node, sin: Node) -> bool:
    X, out, tables = x.meta["val"], node.meta["val"], (cos.meta.get("val"), sin.meta.get("val"))
    if X.ndim != 4 or out.shape != X.shape or not _is_transposed(X) or not _is_transposed(out):
        return False
    batch, heads, time, k = X.shape
    if any(not isinstance(t, Tensor) or t.shape != (batch, 1, time, k) or not t.is_contiguous() for t in tables):
        return False
    rows, table = X.new_empty(batch * time, heads, k), X.new_empty(batch * time, k)
    return _is_kernel(_KERNELS.rotate.default, (rows, table, table), rows, (X, out, *tables))


def _write_rotation(node: Node, x: Node, cos: Node, sin: Node) -> None:
    graph, out = node.graph, node.meta["val"]
    batch, heads, time, k = out.shape
    with graph.inserting_before(node):
        if x.target is _ATEN.transpose.int and x.args[1:] in ((1, 2), (2, 1)):
            base = x.all_input_nodes[0]
        else:
            base = call(graph, _ATEN.transpose.int, (x, 1, 2), like=node)
        given = [call(graph, _ATEN.view.default, (base, [batch * time, heads, k]), like=node)]
        given += [call(graph, _ATEN.view.default, (t, [batch * time, k]), like=node) for t in (cos, sin)]
        made = call(graph, _KERNELS.rotate.default, tuple(given), like=node)
        # Views of the result share memory with the abstract value that they were captured with.
        made.meta["val"] = out.transpose(1, 2).view(batch * time, heads, k)
        rows = call(graph, _ATEN.view.default, (made, [batch, time, heads, k]), like=node)
        for user in list(node.users):
            if user.target is _ATEN.transpose.int and user.args[1:] in ((1, 2), (2, 1)):
                user.replace_all_uses_with(rows)
                graph.erase_node(user)
        node.replace_all_uses_with(call(graph, _ATEN.transpose.int, (rows, 1, 2), like=node))


# silu(gate) 1 up.


def _gated(node: Node) -> _Fusion | None:
    for silu, up in (node.args[:2], node.args[1::-1]):
        if not _is_call(silu, (_KERNELS.gated_silu.default,)) or not isinstance(up, Node):
            continue
        gate, ones = silu.args
        if not isinstance(gate, Node) or not _is_call(ones, (_ATEN.ones_like.default,)) or up is silu:
            continue
        values = tuple(n.meta.get("val") for n in (gate, ones, up, node))
        if all(isinstance(x, Tensor) and x.shape == values[0].shape for x in values):
            if _is_kernel(_KERNELS.gated_silu.default, (values[0], values[2]), values[3], values):
                return _Fusion((silu, ones), (gate, up), _write_gated)
    return None


def _write_gated(node: Node, gate: Node, up: Node) -> None:
    with node.graph.inserting_before(node):
        made = call(node.graph, _KERNELS.gated_silu.default, (gate, up), like=node)
    made.meta["val"] = node.meta["val"]
    node.replace_all_uses_with(made)


def _is_call(node: object, targets: tuple[object, ...]) -> bool:
    return isinstance(node, Node) and node.op == "call_function" and node.target in targets


def _other(node: Node, x: Node) -> Node | None:
    """The operand of a product beside x."""
    a, b = node.args[:2]
    other = b if a is x else a if b is x else None
    return other if isinstance(other, Node) else None


def _is_transposed(x: Tensor) -> bool:
    return x.transpose(1, 2).is_contiguous()


def _is_kernel(op: object, arguments: tuple[Tensor, ...], result: Tensor, values: tuple[Tensor, ...]) -> bool:
    """Whether an op has a kernel in C++ here for float32 of a CPU."""
    if any(x.dtype != torch.float32 or x.device.type != "cpu" or x.is_neg() for x in values):
        return False
    made = call_of(op, arguments, result)
    return made is not None and are_built([made])
