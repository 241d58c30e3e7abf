"""Formulas of the op table: costs of some ops, and collective, axes, bytes and sizes of each transfer between ranks.

Costs are floating-point operations, and scratch memory on CPU, as measured. Bytes follow the counter
(`shardfn.collectives.count_traffic`), so that the prediction is the count. The op table (`_ops.py`) gives each op its
formula.
"""

import dataclasses
import functools
import importlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from shardfn.collectives import HEAD
from shardfn.core import tree_map
from shardfn.kernels import scratch_bytes

from ._values import axes_size, num_bytes, tensors_in, tensors_of


@dataclasses.dataclass(frozen=True)
class Sent:
    """Message of a start. The fields are fields of `Transfer`."""

    op: str
    axes: str
    num_ranks: int
    sent: int
    dtype: torch.dtype
    sizes: tuple[int, ...]
    channel: str


def _tensor_of(argument: Any) -> Tensor:
    return tensors_in(argument.meta["val"])[0]


def _drop_ones(axes: str, meta: Mapping[str, Any]) -> str:
    shape = meta.get("mesh_shape", {})
    return ",".join(a for a in axes.split(",") if shape.get(a, 2) > 1)


def _gather_traffic(own: Any, sizes: Any, axes: str, meta: Mapping[str, Any]) -> Sent:
    x, n = _tensor_of(own), len(sizes)
    axes = _drop_ones(axes, meta)
    return Sent("all_gather", axes, n, num_bytes(x) * (n - 1), x.dtype, tuple(sizes), f"gather {axes}")


def all_gather(node: Node, meta: Mapping[str, Any]) -> Sent:
    own, sizes, axes = node.args[:3]
    return _gather_traffic(own, sizes, str(axes), meta)


def all_gather_into(node: Node, meta: Mapping[str, Any]) -> Sent:
    _, own, sizes, axes = node.args[:4]
    return _gather_traffic(own, sizes, str(axes), meta)


def psum_scatter(node: Node, meta: Mapping[str, Any]) -> Sent:
    flat, sizes, index, axes = node.args[:4]
    x, lengths = _tensor_of(flat), tuple(sizes)  # pyright: ignore[reportArgumentType]  # an fx argument
    axes = _drop_ones(str(axes), meta)
    own: int = lengths[index]  # pyright: ignore[reportArgumentType, reportCallIssue]  # an fx argument
    sent = (x.numel() - own) * x.element_size()
    return Sent("psum_scatter", axes, len(lengths), sent, x.dtype, lengths, f"reduce {axes}")


def all_to_all(node: Node, meta: Mapping[str, Any]) -> Sent:
    move = psum_scatter(node, meta)
    return dataclasses.replace(move, op="all_to_all")


def psum(node: Node, meta: Mapping[str, Any]) -> Sent:
    parts, axes = node.args[:2]
    values = [_tensor_of(p) for p in parts]  # pyright: ignore[reportOptionalIterable, reportGeneralTypeIssues]
    n, total = axes_size(meta.get("mesh_shape", {}), str(axes)), sum(num_bytes(v) for v in values)
    axes, sizes = _drop_ones(str(axes), meta), (sum(v.numel() for v in values),)
    return Sent("all_reduce", axes, n, 2 * total * (n - 1) // n, values[0].dtype, sizes, f"reduce {axes}")


def send(node: Node, meta: Mapping[str, Any]) -> Sent:
    x, axes = _tensor_of(node.args[0]), _drop_ones(str(node.args[-1]), meta)
    return Sent("send", axes, 2, num_bytes(x), x.dtype, (x.numel(),), f"between {axes}")


def receive(node: Node, meta: Mapping[str, Any]) -> Sent:
    x, axes = _tensor_of(node), _drop_ones(str(node.args[-1]), meta)
    return Sent("receive", axes, 2, 0, x.dtype, (x.numel(),), f"between {axes}")


def _loss_arguments(node: Node, meta: Mapping[str, Any]) -> tuple[Tensor, str, int]:
    """Returns the operand, the axes and the number of ranks of a collective that a loss calls."""
    axes = _drop_ones(str(node.args[-1]), meta)
    return _tensor_of(node.args[0]), axes, axes_size(meta.get("mesh_shape", {}), axes)


def loss_psum(node: Node, meta: Mapping[str, Any]) -> Sent:
    x, axes, n = _loss_arguments(node, meta)
    return Sent("psum", axes, n, 2 * num_bytes(x) * (n - 1) // n, x.dtype, (x.numel(),), f"loss {axes}")


def loss_pmax(node: Node, meta: Mapping[str, Any]) -> Sent:
    return dataclasses.replace(loss_psum(node, meta), op="pmax")


def loss_all_gather(node: Node, meta: Mapping[str, Any]) -> Sent:
    x, axes, n = _loss_arguments(node, meta)
    return Sent("all_gather", axes, n, num_bytes(x) * (n - 1), x.dtype, (x.numel(),) * n, f"loss {axes}")


def loss_psum_scatter(node: Node, meta: Mapping[str, Any]) -> Sent:
    x, axes, n = _loss_arguments(node, meta)
    own = x.numel() // n
    return Sent("psum_scatter", axes, n, own * x.element_size() * (n - 1), x.dtype, (own,) * n, f"loss {axes}")


def loss_exchange(node: Node, meta: Mapping[str, Any]) -> Sent:
    x, axes, n = _loss_arguments(node, meta)
    send: tuple[int, ...] = tuple(node.args[1])  # pyright: ignore[reportArgumentType, reportAssignmentType]
    sent = (x.numel() - send[find_rank_index(meta, axes)]) * x.element_size()
    return Sent(str(node.args[3]), axes, n, sent, x.dtype, send, f"loss {axes}")


def foreign(node: Node, meta: Mapping[str, Any]) -> Sent:
    """Returns a collective of torch: neither counted nor compared, as a graph does not hold the axes."""
    x = tensors_in(node.meta["val"])[0]
    return Sent(str(node.target), "", 1, 0, x.dtype, (x.numel(),), "loss ")


def ragged_places(node: Node, meta: Mapping[str, Any]) -> Sent:
    axes = _drop_ones(str(node.args[-1]), meta)
    n, own = axes_size(meta.get("mesh_shape", {}), axes), HEAD + 4 * _tensor_of(node).numel()
    return Sent("all_gather", axes, n, 8 * own * (n - 1), torch.int64, (own,) * n, f"loss {axes}")


def ragged_all_to_all(node: Node, meta: Mapping[str, Any]) -> Sent:
    """Returns the message of a ragged all-to-all.

    Bytes are data, and count as if every row of the operand left once.
    """
    x, axes = _tensor_of(node.args[0]), _drop_ones(str(node.args[-1]), meta)
    n, row = axes_size(meta.get("mesh_shape", {}), axes), x.shape[1:].numel()
    return Sent("ragged_all_to_all", axes, n, num_bytes(x) * (n > 1), x.dtype, (row,), f"loss {axes}")


def find_rank_index(meta: Mapping[str, Any], axes: str) -> int:
    """Returns this rank's index along `axes`, or 0 if the graph has no coordinates."""
    shape, coords, index = meta.get("mesh_shape", {}), meta.get("coords", {}), 0
    for name in axes.split(","):
        index = index * shape.get(name, 1) + coords.get(name, 0)
    return index


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
