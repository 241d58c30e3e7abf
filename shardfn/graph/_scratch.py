"""Scratch memory that an op allocates and frees while running: measured on CPU, for ops with much scratch memory."""

import functools

import torch
from torch.fx import Node

from ._ops import op_of
from ._values import tensors_of, written_by


def scratch_bytes(node: Node) -> int:
    """Returns the bytes that `node` holds while running, beyond arguments and results.

    Operands of a pointwise op in another dtype than the dtype of the arithmetic are cast whole. Other ops cast row by
    row. Off the CPU kernels cast element by element, and the result is 0.

    Args:
        node: node of a captured graph.

    Example:
        >>> from torch.fx.experimental.proxy_tensor import make_fx
        >>> gm = make_fx(lambda x: x + torch.ones(4).double(), tracing_mode="fake")(torch.ones(4))
        >>> [scratch_bytes(n) for n in gm.graph.nodes if n.name == "add"]
        [32]
    """
    if node.op != "call_function" or _device_of(node) != "cpu":
        return 0
    op = op_of(node)
    if op.scratch is not None:
        return op.scratch(node)
    return _is_cast(node) if op.pointwise else 0


def _device_of(node: Node) -> str:
    first = next((t for n in node.all_input_nodes for t in tensors_of(n)), None)
    return first.device.type if first is not None else ""


def _is_cast(node: Node) -> int:
    operands = [t for n in node.all_input_nodes for t in tensors_of(n)]
    if len({t.dtype for t in operands}) < 2:
        return 0
    common = functools.reduce(torch.promote_types, (t.dtype for t in operands))
    written = [t for n in written_by(node) for t in tensors_of(n)]
    # An operand written in place is cast to be read, and the result is cast back from another buffer.
    return sum(t.numel() * common.itemsize for t in (*operands, *written) if t.dtype != common and t.dim())
