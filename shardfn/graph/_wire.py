"""The collective, axes, bytes and sizes of each transfer between ranks.

Formulas alone; which op has which is in the op table (`_ops.py`). Bytes follow those of the counter
(`shardfn.collectives.count_traffic`), so that the prediction is the count.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from shardfn.collectives import HEAD

from ._values import axes_size, num_bytes, tensors_in


@dataclasses.dataclass(frozen=True)
class Sent:
    """The message of a start; the fields are those of `Transfer`."""

    op: str
    axes: str
    num_ranks: int
    sent: int
    dtype: torch.dtype
    sizes: tuple[int, ...]
    channel: str


def _value(argument: Any) -> Tensor:
    return tensors_in(argument.meta["val"])[0]


def _drop_ones(axes: str, meta: Mapping[str, Any]) -> str:
    shape = meta.get("mesh_shape", {})
    return ",".join(a for a in axes.split(",") if shape.get(a, 2) > 1)


def _gathered(own: Any, sizes: Any, axes: str, meta: Mapping[str, Any]) -> Sent:
    x, n = _value(own), len(sizes)
    axes = _drop_ones(axes, meta)
    return Sent("all_gather", axes, n, num_bytes(x) * (n - 1), x.dtype, tuple(sizes), f"gather {axes}")


def all_gather(node: Node, meta: Mapping[str, Any]) -> Sent:
    own, sizes, axes = node.args[:3]
    return _gathered(own, sizes, str(axes), meta)


def all_gather_into(node: Node, meta: Mapping[str, Any]) -> Sent:
    _, own, sizes, axes = node.args[:4]
    return _gathered(own, sizes, str(axes), meta)


def psum_scatter(node: Node, meta: Mapping[str, Any]) -> Sent:
    flat, sizes, index, axes = node.args[:4]
    x, lengths = _value(flat), tuple(sizes)  # pyright: ignore[reportArgumentType]  # an fx argument
    axes = _drop_ones(str(axes), meta)
    own: int = lengths[index]  # pyright: ignore[reportArgumentType, reportCallIssue]  # an fx argument
    sent = (x.numel() - own) * x.element_size()
    return Sent("psum_scatter", axes, len(lengths), sent, x.dtype, lengths, f"reduce {axes}")


def all_to_all(node: Node, meta: Mapping[str, Any]) -> Sent:
    move = psum_scatter(node, meta)
    return dataclasses.replace(move, op="all_to_all")


def psum(node: Node, meta: Mapping[str, Any]) -> Sent:
    parts, axes = node.args[:2]
    values = [_value(p) for p in parts]  # pyright: ignore[reportOptionalIterable, reportGeneralTypeIssues]
    n, total = axes_size(meta.get("mesh_shape", {}), str(axes)), sum(num_bytes(v) for v in values)
    axes, sizes = _drop_ones(str(axes), meta), (sum(v.numel() for v in values),)
    return Sent("all_reduce", axes, n, 2 * total * (n - 1) // n, values[0].dtype, sizes, f"reduce {axes}")


def send(node: Node, meta: Mapping[str, Any]) -> Sent:
    x, axes = _value(node.args[0]), _drop_ones(str(node.args[-1]), meta)
    return Sent("send", axes, 2, num_bytes(x), x.dtype, (x.numel(),), f"between {axes}")


def receive(node: Node, meta: Mapping[str, Any]) -> Sent:
    x, axes = _value(node), _drop_ones(str(node.args[-1]), meta)
    return Sent("receive", axes, 2, 0, x.dtype, (x.numel(),), f"between {axes}")


def _group(name: Any, meta: Mapping[str, Any]) -> tuple[str, int]:
    groups = meta.get("groups", {})
    if name not in groups:
        raise ValueError(f"a collective runs on group {name!r}; gm.meta['groups'] lists {list(groups)}: add it there.")
    axes = groups[name]
    return axes, axes_size(meta.get("mesh_shape", {}), axes)


def all_reduce(node: Node, meta: Mapping[str, Any]) -> Sent:
    x, op, name = node.args[:3]
    value, (axes, n) = _value(x), _group(name, meta)
    kind = {"sum": "psum", "max": "pmax", "min": "pmin", "avg": "pmean"}.get(str(op).lower(), "psum")
    sent = 2 * num_bytes(value) * (n - 1) // n
    return Sent(kind, axes, n, sent, value.dtype, (value.numel(),), f"loss {axes}")


def functional_all_gather(node: Node, meta: Mapping[str, Any]) -> Sent:
    x, n, name = node.args[:3]
    value, count = _value(x), int(n)  # pyright: ignore[reportArgumentType]  # an fx argument
    axes, _ = _group(name, meta)
    sizes = (value.numel(),) * count
    return Sent("all_gather", axes, count, num_bytes(value) * (count - 1), value.dtype, sizes, f"loss {axes}")


def functional_reduce_scatter(node: Node, meta: Mapping[str, Any]) -> Sent:
    x, _, n, name = node.args[:4]
    value, count = _value(x), int(n)  # pyright: ignore[reportArgumentType]  # an fx argument
    axes, _ = _group(name, meta)
    own = value.numel() // count
    sent = own * value.element_size() * (count - 1)
    return Sent("psum_scatter", axes, count, sent, value.dtype, (own,) * count, f"loss {axes}")


def functional_all_to_all(node: Node, meta: Mapping[str, Any]) -> Sent:
    x, arriving, leaving, name = node.args[:4]
    value, (axes, n) = _value(x), _group(name, meta)
    send = tuple(leaving)  # pyright: ignore[reportArgumentType]  # an fx argument
    recv = tuple(arriving)  # pyright: ignore[reportArgumentType]  # an fx argument
    stays = int(send[own_index(meta, axes)])
    sent = (value.numel() - stays) * value.element_size()
    return Sent(_kind_of_exchange(node, send, recv), axes, n, sent, value.dtype, send, f"loss {axes}")


def ragged_places(node: Node, meta: Mapping[str, Any]) -> Sent:
    axes = _drop_ones(str(node.args[-1]), meta)
    n, own = axes_size(meta.get("mesh_shape", {}), axes), HEAD + 4 * _value(node).numel()
    return Sent("all_gather", axes, n, 8 * own * (n - 1), torch.int64, (own,) * n, f"loss {axes}")


def ragged_all_to_all(node: Node, meta: Mapping[str, Any]) -> Sent:
    """The bytes are data: as many as if every row of the operand left, each once."""
    x, axes = _value(node.args[0]), _drop_ones(str(node.args[-1]), meta)
    n, row = axes_size(meta.get("mesh_shape", {}), axes), x.shape[1:].numel()
    return Sent("ragged_all_to_all", axes, n, num_bytes(x) * (n > 1), x.dtype, (row,), f"loss {axes}")


def own_index(meta: Mapping[str, Any], axes: str) -> int:
    """This rank's index along `axes`; 0 if the graph has no coordinates."""
    shape, coords, index = meta.get("mesh_shape", {}), meta.get("coords", {}), 0
    for name in axes.split(","):
        index = index * shape.get(name, 1) + coords.get(name, 0)
    return index


def _kind_of_exchange(node: Node, send: tuple[int, ...], recv: tuple[int, ...]) -> str:
    """The primitive of an exchange, as the capture notes it; else a guess, as one rank's rows do not determine it."""
    if (applied := node.meta.get("collective")) is not None:
        return applied.name
    if len(send) > 2 and sum(map(bool, send)) <= 1 and sum(map(bool, recv)) <= 1:
        return "ppermute"
    wait = next((u for u in node.users if _is(u, "wait_tensor")), None)
    rows = [u for v in (wait.users if wait else ()) if _is(v, "view") for u in v.users if _is(u, "select")]
    equal = len(set(send) | set(recv)) == 1
    return "psum_scatter" if equal and len(rows) >= 2 else "all_to_all"


def _is(node: Node, name: str) -> bool:
    return getattr(node.target, "__name__", "").split(".")[0] == name
