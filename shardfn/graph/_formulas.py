"""Costs of some ops: floating-point operations, and scratch memory on CPU, as measured.

Only formulas. The op table (`_ops.py`) says which op has which formula.
"""

import functools
import importlib
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from shardfn.core import tree_map
from shardfn.kernels import scratch_bytes

from ._values import num_bytes, tensors_in, tensors_of

# Floating-point operations, of operands and results without data.


@functools.cache
def torch_flops() -> Any:
    """Returns torch's formulas, imported at the first use: the import of triton takes 80 MB."""
    return importlib.import_module("torch.utils.flop_counter")


def attention(q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> int:
    return torch_flops().sdpa_flop_count(q.shape, k.shape, v.shape)


def attention_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> int:
    return torch_flops().sdpa_backward_flop_count(grad.shape, q.shape, k.shape, v.shape)


def product(a: Tensor, b: Tensor, *_: Any, **__: Any) -> int:
    """Returns the operations of a product, as torch's table does, in a fraction of the time.

    Large graphs have many products.
    """
    return 2 * a.numel() * b.shape[-1]


def added_product(bias: Tensor, a: Tensor, b: Tensor, *_: Any, **__: Any) -> int:
    del bias
    return product(a, b)


def matrix_vector(a: Tensor, *_: Any, **__: Any) -> int:
    return 2 * a.numel()


def added_matrix_vector(bias: Tensor, a: Tensor, *_: Any, **__: Any) -> int:
    del bias
    return 2 * a.numel()


def grouped_mm(a: Tensor, b: Tensor, *_: Any, **__: Any) -> int:
    """Returns the operations of a product of groups, as if no row was past the last group."""
    return 2 * a.shape[-2] * a.shape[-1] * b.shape[-1] * (a.shape[0] if a.ndim == b.ndim == 3 else 1)


# Bytes held while a node runs.


def _tensor_argument(node: Node, i: int) -> Tensor:
    value: Any = node.args[i]
    return tensors_in(value.meta["val"])[0]


def cast_bytes(node: Node) -> int:
    x = _tensor_argument(node, 0)
    return 4 * x.numel() if x.is_floating_point() and x.element_size() == 2 else 0


def copy_bytes(node: Node) -> int:
    return num_bytes(_tensor_argument(node, 0))


def copy_bytes_if_strided(node: Node) -> int:
    return 0 if _tensor_argument(node, 0).is_contiguous() else copy_bytes(node)


def flash_forward(node: Node) -> int:
    """Returns the bytes per thread of fused attention: a tile of scores, two running statistics and an accumulator."""
    q, k = _tensor_argument(node, 0), _tensor_argument(node, 1)
    rows, columns = _tile_shape(q.shape[2], k.shape[2])
    return torch.get_num_threads() * 4 * rows * (columns + 2 + q.shape[3])


def flash_backward(node: Node) -> int:
    """Returns the bytes per thread of the backward of fused attention: two tiles of scores."""
    q, k = _tensor_argument(node, 1), _tensor_argument(node, 2)
    rows, columns = _tile_shape(q.shape[2], k.shape[2])
    return torch.get_num_threads() * 4 * rows * 2 * columns


def kernel_bytes(node: Node) -> int:
    """Returns the bytes that a kernel of `shardfn.kernels` gives for its arguments."""
    args = tree_map(lambda x: x.meta["val"] if isinstance(x, Node) else x, tuple(node.args))
    return scratch_bytes(node.target, args)


def _tile_shape(queries: int, keys: int) -> tuple[int, int]:
    rows = 256 if queries >= 768 else 64 if queries >= 192 else 32
    return min(rows, queries), min(512, keys)


def code_bytes(node: Node) -> int:
    """Returns the bytes of codes and scales outside of messages, and, where sums are encoded, of the sums."""
    return copy_bytes(node) + sum(num_bytes(t) for t in tensors_of(node) if t.dtype == torch.uint8)


def encoded_bytes(node: Node) -> int:
    """Returns the bytes of codes and scales outside of the messages."""
    return sum(num_bytes(t) for t in tensors_of(node))
