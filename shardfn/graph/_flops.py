"""Floating-point operations and bytes of one node of a captured graph."""

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_arg

from ._transfers import is_start, is_wait
from ._values import is_view, num_bytes, tensors_of, written_by


def node_flops(node: Node) -> int:
    """Floating-point operations of `node`: 2 m n k for a product of [m, k] and [k, n], and so on.

    torch's table (`torch.utils.flop_counter`) and attention on CPU. Pointwise work counts 0: its time is in its bytes.
    Attention counts every pair of tokens, causal or not, as is the custom.

    Example:
        >>> from torch.fx.experimental.proxy_tensor import make_fx
        >>> gm = make_fx(lambda a: a @ a.t(), tracing_mode="fake")(torch.ones(4, 3))
        >>> sum(node_flops(n) for n in gm.graph.nodes)
        96
    """
    packet = getattr(node.target, "overloadpacket", None)
    formula = _OWN.get(packet) or _table().flop_registry.get(packet)
    if node.op != "call_function" or formula is None:
        return 0
    args, kwargs = map_arg((node.args, node.kwargs), lambda n: n.meta.get("val"))
    return int(formula(*args, **kwargs, out_val=node.meta.get("val")))


@functools.cache
def _table() -> Any:
    """Torch's own formulas; not before they are asked for, since with them comes triton, of 80 MB."""
    return importlib.import_module("torch.utils.flop_counter")


def node_bytes(node: Node) -> int:
    """Bytes that `node` reads and writes: its operands and its results once; views and transfers none.

    Lookups (`embedding`, `gather`, ...) read what they return.

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
    if getattr(node.target, "overloadpacket", None) in _LOOKUPS:
        return 2 * wrote
    return wrote + sum(num_bytes(t) for n in node.all_input_nodes for t in tensors_of(n))


def arithmetic(node: Node) -> torch.dtype:
    """The dtype in which `node` multiplies: that of its first floating-point operand."""
    operands = [t for n in node.all_input_nodes for t in tensors_of(n)] or tensors_of(node)
    return next((t.dtype for t in operands if t.is_floating_point()), torch.float32)


def _cpu_attention(q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> int:
    return _table().sdpa_flop_count(q.shape, k.shape, v.shape)


def _cpu_attention_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> int:
    return _table().sdpa_backward_flop_count(grad.shape, q.shape, k.shape, v.shape)


def _product(a: Tensor, b: Tensor, *_: Any, **__: Any) -> int:
    """As in torch's table, which takes several times as long to say so; products are most of a large graph."""
    return 2 * a.numel() * b.shape[-1]


def _added_product(bias: Tensor, a: Tensor, b: Tensor, *_: Any, **__: Any) -> int:
    del bias
    return _product(a, b)


def _matrix_vector(a: Tensor, *_: Any, **__: Any) -> int:
    return 2 * a.numel()


def _added_matrix_vector(bias: Tensor, a: Tensor, *_: Any, **__: Any) -> int:
    del bias
    return 2 * a.numel()


_aten = torch.ops.aten
_OWN: dict[Any, Callable[..., int]] = {
    _aten._scaled_dot_product_flash_attention_for_cpu: _cpu_attention,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: _cpu_attention_backward,
    _aten._scaled_dot_product_fused_attention_overrideable: _cpu_attention,
    _aten._scaled_dot_product_fused_attention_overrideable_backward: _cpu_attention_backward,
    _aten.mm: _product,
    _aten.bmm: _product,
    _aten.addmm: _added_product,
    _aten.baddbmm: _added_product,
    _aten.mv: _matrix_vector,
    _aten.dot: _matrix_vector,
    _aten.addmv: _added_matrix_vector,
}
_LOOKUPS = {
    _aten.embedding,
    _aten.index_select,
    _aten.gather,
    _aten.index,
    _aten.nll_loss_forward,
    _aten.nll_loss2d_forward,
}
