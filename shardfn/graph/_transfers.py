"""The transfers of a captured step: what each sends, over which axes, for which leaves.

Bytes follow the formulas of the counter (`shardfn.collectives.count_traffic`), so that the prediction is the count.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

import shardfn.collectives  # noqa: F401  # defines torch.ops.shardfn

from ._leaves import Updates, leaves_behind
from ._moves import MOVE_WAIT, is_move
from ._values import axes_size, num_bytes, phases_of, tensors_in, where_of


@dataclasses.dataclass(frozen=True)
class Transfer:
    """One collective of a captured step.

    Attributes:
        node: the node that starts it.
        wait: the node that waits for it, or None.
        op: the name under which the counter knows it.
        axes: mesh axes larger than 1, as in "dp,tp".
        num_ranks: ranks along `axes`.
        sent: bytes that this rank puts on the wire.
        dtype: what travels.
        sizes: number of elements: of each rank's block, of the whole (sums), or of what this rank sends each other one.
        phase: "forward", "backward" or "update".
        where: the user's line.
        channel: whose turn it takes: transfers on one channel run in the order of their starts.
        leaves: paths of the leaves that it moves, as far as they can be followed.
    """

    node: Node
    wait: Node | None
    op: str
    axes: str
    num_ranks: int
    sent: int
    dtype: torch.dtype
    sizes: tuple[int, ...]
    phase: str
    where: str
    channel: str
    leaves: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class _Move:
    """What an op says of itself."""

    op: str
    axes: str
    num_ranks: int
    sent: int
    dtype: torch.dtype
    sizes: tuple[int, ...]
    channel: str


def transfers(gm: GraphModule) -> list[Transfer]:
    """The transfers of a captured step in the order of their starts.

    For blocks of m bytes over n ranks: `all_gather` sends m (n - 1), `psum_scatter` what does not stay, a sum of m
    bytes 2 m (n - 1) / n.

    Args:
        gm: the step. `gm.meta["mesh_shape"]` and `gm.meta["groups"]` say what axes and groups mean; where the rank's
            own index matters, `gm.meta["coords"]` (default: the first rank).

    Returns:
        One `Transfer` per start.

    Raises:
        ValueError: a collective runs on a group that `gm.meta["groups"]` does not list.

    Example:
        >>> from torch.fx.experimental.proxy_tensor import make_fx
        >>> import shardfn.collectives
        >>> def f(own):
        ...     return torch.ops.shardfn.wait(torch.ops.shardfn.all_gather_start(own, [3, 3], "dp"))
        >>> gm = make_fx(f, tracing_mode="fake")(torch.ones(3))
        >>> [(t.op, t.axes, t.sent) for t in transfers(gm)]
        [('all_gather', 'dp', 12)]
    """
    phases = phases_of(gm)
    starts = [n for n in gm.graph.nodes if is_start(n) and not is_move(n)]
    updates = Updates(gm)
    return [_transfer(n, gm.meta, phases[n], updates) for n in starts]


def is_start(node: Node) -> bool:
    """Whether `node` starts a transfer, between ranks or between memories."""
    return node.op == "call_function" and (node.target in _READERS or is_move(node))


def is_wait(node: Node) -> bool:
    """Whether `node` waits for one."""
    return node.op == "call_function" and node.target in _WAITS


def start_of(wait: Node) -> Node:
    """The start that `wait` waits for; `wait` itself if its argument is no transfer."""
    node = wait.args[0]
    while isinstance(node, Node) and not is_start(node) and node.op == "call_function" and node.args:
        node = node.args[0]
    return node if isinstance(node, Node) and is_start(node) else wait


def wait_of(start: Node) -> Node | None:
    """The wait of a start, or None."""
    return next((u for u in start.users if is_wait(u)), None)


def _transfer(node: Node, meta: Mapping[str, Any], phase: str, updates: Updates) -> Transfer:
    move = _READERS[node.target](node, meta)
    wait = wait_of(node)
    leaves = leaves_behind(node.args[1 if node.target is _OPS.all_gather_into_start.default else 0])
    if not leaves and wait is not None and phase != "forward":
        leaves = updates.leaves_after(wait)
    return Transfer(node=node, wait=wait, phase=phase, where=where_of(node), leaves=leaves, **vars(move))


# What each op says of itself.

_OPS = torch.ops.shardfn
_C10D = torch.ops._c10d_functional


def _value(argument: Any) -> Tensor:
    return tensors_in(argument.meta["val"])[0]


def _drop_ones(axes: str, meta: Mapping[str, Any]) -> str:
    shape = meta.get("mesh_shape", {})
    return ",".join(a for a in axes.split(",") if shape.get(a, 2) > 1)


def _all_gather(own: Any, sizes: Any, axes: str, meta: Mapping[str, Any]) -> _Move:
    x, n = _value(own), len(sizes)
    axes = _drop_ones(axes, meta)
    return _Move("all_gather", axes, n, num_bytes(x) * (n - 1), x.dtype, tuple(sizes), f"gather {axes}")


def _all_gather_start(node: Node, meta: Mapping[str, Any]) -> _Move:
    own, sizes, axes = node.args[:3]
    return _all_gather(own, sizes, str(axes), meta)


def _all_gather_into_start(node: Node, meta: Mapping[str, Any]) -> _Move:
    _, own, sizes, axes = node.args[:4]
    return _all_gather(own, sizes, str(axes), meta)


def _psum_scatter_start(node: Node, meta: Mapping[str, Any]) -> _Move:
    flat, sizes, index, axes = node.args[:4]
    x, lengths = _value(flat), tuple(sizes)  # pyright: ignore[reportArgumentType]  # an fx argument
    axes = _drop_ones(str(axes), meta)
    own: int = lengths[index]  # pyright: ignore[reportArgumentType, reportCallIssue]  # an fx argument
    sent = (x.numel() - own) * x.element_size()
    return _Move("psum_scatter", axes, len(lengths), sent, x.dtype, lengths, f"reduce {axes}")


def _all_to_all_start(node: Node, meta: Mapping[str, Any]) -> _Move:
    move = _psum_scatter_start(node, meta)
    return dataclasses.replace(move, op="all_to_all")


def _psum_start(node: Node, meta: Mapping[str, Any]) -> _Move:
    parts, axes = node.args[:2]
    values = [_value(p) for p in parts]  # pyright: ignore[reportOptionalIterable, reportGeneralTypeIssues]
    n, total = axes_size(meta.get("mesh_shape", {}), str(axes)), sum(num_bytes(v) for v in values)
    axes, sizes = _drop_ones(str(axes), meta), (sum(v.numel() for v in values),)
    return _Move("all_reduce", axes, n, 2 * total * (n - 1) // n, values[0].dtype, sizes, f"reduce {axes}")


def _group(name: Any, meta: Mapping[str, Any]) -> tuple[str, int]:
    groups = meta.get("groups", {})
    if name not in groups:
        raise ValueError(f"a collective runs on group {name!r}; gm.meta['groups'] lists {list(groups)}: add it there.")
    axes = groups[name]
    return axes, axes_size(meta.get("mesh_shape", {}), axes)


def _functional_all_reduce(node: Node, meta: Mapping[str, Any]) -> _Move:
    x, op, name = node.args[:3]
    value, (axes, n) = _value(x), _group(name, meta)
    kind = {"sum": "psum", "max": "pmax", "min": "pmin", "avg": "pmean"}.get(str(op).lower(), "psum")
    sent = 2 * num_bytes(value) * (n - 1) // n
    return _Move(kind, axes, n, sent, value.dtype, (value.numel(),), f"loss {axes}")


def _functional_all_gather(node: Node, meta: Mapping[str, Any]) -> _Move:
    x, n, name = node.args[:3]
    value, count = _value(x), int(n)  # pyright: ignore[reportArgumentType]  # an fx argument
    axes, _ = _group(name, meta)
    sizes = (value.numel(),) * count
    return _Move("all_gather", axes, count, num_bytes(value) * (count - 1), value.dtype, sizes, f"loss {axes}")


def _functional_reduce_scatter(node: Node, meta: Mapping[str, Any]) -> _Move:
    x, _, n, name = node.args[:4]
    value, count = _value(x), int(n)  # pyright: ignore[reportArgumentType]  # an fx argument
    axes, _ = _group(name, meta)
    own = value.numel() // count
    sent = own * value.element_size() * (count - 1)
    return _Move("psum_scatter", axes, count, sent, value.dtype, (own,) * count, f"loss {axes}")


def _functional_all_to_all(node: Node, meta: Mapping[str, Any]) -> _Move:
    x, arriving, leaving, name = node.args[:4]
    value, (axes, n) = _value(x), _group(name, meta)
    send = tuple(leaving)  # pyright: ignore[reportArgumentType]  # an fx argument
    recv = tuple(arriving)  # pyright: ignore[reportArgumentType]  # an fx argument
    stays = int(send[own_index(meta, axes)])
    sent = (value.numel() - stays) * value.element_size()
    return _Move(_kind_of_exchange(node, send, recv), axes, n, sent, value.dtype, send, f"loss {axes}")


def own_index(meta: Mapping[str, Any], axes: str) -> int:
    """This rank's index along `axes`; 0 where the graph does not say."""
    shape, coords, index = meta.get("mesh_shape", {}), meta.get("coords", {}), 0
    for name in axes.split(","):
        index = index * shape.get(name, 1) + coords.get(name, 0)
    return index


def _kind_of_exchange(node: Node, send: tuple[int, ...], recv: tuple[int, ...]) -> str:
    """An exchange serves three primitives: all to few is a permutation, rows added at home are a psum_scatter."""
    if len(send) > 2 and sum(map(bool, send)) <= 1 and sum(map(bool, recv)) <= 1:
        return "ppermute"
    wait = wait_of(node)
    rows = [u for v in (wait.users if wait else ()) if _is(v, "view") for u in v.users if _is(u, "select")]
    equal = len(set(send) | set(recv)) == 1
    return "psum_scatter" if equal and len(rows) >= 2 else "all_to_all"


def _is(node: Node, name: str) -> bool:
    return getattr(node.target, "__name__", "").split(".")[0] == name


_READERS: dict[Any, Callable[[Node, Mapping[str, Any]], _Move]] = {
    _OPS.all_gather_start.default: _all_gather_start,
    _OPS.all_gather_into_start.default: _all_gather_into_start,
    _OPS.psum_scatter_start.default: _psum_scatter_start,
    _OPS.all_to_all_start.default: _all_to_all_start,
    _OPS.psum_start.default: _psum_start,
    _C10D.all_reduce.default: _functional_all_reduce,
    _C10D.all_gather_into_tensor.default: _functional_all_gather,
    _C10D.reduce_scatter_tensor.default: _functional_reduce_scatter,
    _C10D.all_to_all_single.default: _functional_all_to_all,
}
_WAITS = {_OPS.wait.default, _C10D.wait_tensor.default, MOVE_WAIT}
