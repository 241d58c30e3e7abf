"""Memory that an op takes and gives back while it runs: measured on CPU, for the ops where it is not small."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from ._values import num_bytes, tensors_in, tensors_of, written_by


def scratch_bytes(node: Node) -> int:
    """Bytes that `node` holds while it runs beyond its arguments and results.

    Operands of a pointwise op in another dtype than that of its arithmetic are cast whole; other ops as in the table.
    Off the CPU kernels cast element by element, and this is 0.

    Args:
        node: a node of a captured graph.

    Example:
        >>> from torch.fx.experimental.proxy_tensor import make_fx
        >>> gm = make_fx(lambda x: x + torch.ones(4).double(), tracing_mode="fake")(torch.ones(4))
        >>> [scratch_bytes(n) for n in gm.graph.nodes if n.name == "add"]
        [32]
    """
    if node.op != "call_function" or _device(node) != "cpu":
        return 0
    formula = _TABLE.get(getattr(node.target, "overloadpacket", None))
    if formula is not None:
        return formula(node)
    return _casts(node) if torch.Tag.pointwise in getattr(node.target, "tags", ()) else 0


def _device(node: Node) -> str:
    first = next((t for n in node.all_input_nodes for t in tensors_of(n)), None)
    return first.device.type if first is not None else ""


def _casts(node: Node) -> int:
    operands = [t for n in node.all_input_nodes for t in tensors_of(n)]
    if len({t.dtype for t in operands}) < 2:
        return 0
    common = functools.reduce(torch.promote_types, (t.dtype for t in operands))
    written = [t for n in written_by(node) for t in tensors_of(n)]
    # What is written in place is cast to be read, and the result is cast back from another buffer.
    return sum(t.numel() * common.itemsize for t in (*operands, *written) if t.dtype != common and t.dim())


def _argument(node: Node, i: int) -> Tensor:
    value: Any = node.args[i]
    return tensors_in(value.meta["val"])[0]


def _if_16_bit(node: Node) -> int:
    x = _argument(node, 0)
    return 4 * x.numel() if x.is_floating_point() and x.element_size() == 2 else 0


def _a_copy(node: Node) -> int:
    return num_bytes(_argument(node, 0))


def _if_strided(node: Node) -> int:
    return 0 if _argument(node, 0).is_contiguous() else _a_copy(node)


def _flash_forward(node: Node) -> int:
    """A tile of scores, two running statistics and an accumulator a thread."""
    q, k = _argument(node, 0), _argument(node, 1)
    rows, columns = _tile(q.shape[2], k.shape[2])
    return torch.get_num_threads() * 4 * rows * (columns + 2 + q.shape[3])


def _flash_backward(node: Node) -> int:
    """Two tiles of scores a thread."""
    q, k = _argument(node, 1), _argument(node, 2)
    rows, columns = _tile(q.shape[2], k.shape[2])
    return torch.get_num_threads() * 4 * rows * 2 * columns


def _tile(queries: int, keys: int) -> tuple[int, int]:
    rows = 256 if queries >= 768 else 64 if queries >= 192 else 32
    return min(rows, queries), min(512, keys)


def _codes(node: Node) -> int:
    """Codes and scales apart from their messages, and, where sums are encoded, those of the sums."""
    return _a_copy(node) + sum(num_bytes(t) for t in tensors_of(node) if t.dtype == torch.uint8)


_aten, _shardfn = torch.ops.aten, torch.ops.shardfn
_TABLE: dict[Any, Callable[[Node], int]] = {
    _aten._scaled_dot_product_flash_attention_for_cpu: _flash_forward,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: _flash_backward,
    _aten._softmax: _if_strided,
    _aten._log_softmax: _if_strided,
    _aten.logsumexp: _a_copy,
    _aten.mean: _if_16_bit,
    _shardfn.encode: lambda node: sum(num_bytes(t) for t in tensors_of(node)),
    _shardfn.decode: _codes,
    _shardfn.decode_sum: _codes,
    _shardfn.decode_sum_encode: _codes,
}
