"""Floating-point operations and bytes of a node of a captured graph."""

import torch
from torch.fx import Node
from torch.fx.node import map_arg

from ._formulas import torch_flops
from ._ops import op_of
from ._transfers import is_start, is_wait
from ._values import is_view, num_bytes, tensors_of, written_by


def node_flops(node: Node) -> int:
    """Returns the floating-point operations of `node`, for example 2 m n k for a product of [m, k] and [k, n].

    By torch's table (`torch.utils.flop_counter`), and for CPU attention. Pointwise ops count 0: bytes determine the
    time of pointwise ops. Attention counts every pair of tokens, causal or not, as is the custom.

    Example:
        >>> from torch.fx.experimental.proxy_tensor import make_fx
        >>> gm = make_fx(lambda a: a @ a.t(), tracing_mode="fake")(torch.ones(4, 3))
        >>> sum(node_flops(n) for n in gm.graph.nodes)
        96
    """
    if node.op != "call_function":
        return 0
    formula = op_of(node).flops or torch_flops().flop_registry.get(getattr(node.target, "overloadpacket", None))
    if formula is None:
        return 0
    args, kwargs = map_arg((node.args, node.kwargs), lambda n: n.meta.get("val"))
    return int(formula(*args, **kwargs, out_val=node.meta.get("val")))


def node_bytes(node: Node) -> int:
    """Returns the bytes that `node` reads and writes: operands and results once, or 0 for views and transfers.

    Lookups (such as `embedding`, `gather`) read only the elements that are returned.

    Example:
        >>> from torch.fx.experimental.proxy_tensor import make_fx
        >>> gm = make_fx(lambda a: a.t() + 1, tracing_mode="fake")(torch.ones(4, 3))
        >>> [(n.name, node_bytes(n)) for n in gm.graph.nodes][1:3]
        [('t', 0), ('add', 96)]
    """
    if node.op != "call_function" or is_start(node) or is_wait(node) or is_view(node):
        return 0
    written = [t for n in written_by(node) for t in tensors_of(n)]
    made = written or tensors_of(node)
    wrote = sum(map(num_bytes, made))
    if op_of(node).lookup:
        return 2 * wrote
    return wrote + sum(num_bytes(t) for n in node.all_input_nodes for t in tensors_of(n))


def arithmetic(node: Node) -> torch.dtype:
    """Returns the dtype in which `node` multiplies, the dtype of the first floating-point operand."""
    operands = [t for n in node.all_input_nodes for t in tensors_of(n)] or tensors_of(node)
    return next((t.dtype for t in operands if t.is_floating_point()), torch.float32)
