"""Transfers of a captured step, with the bytes, axes and leaves of each."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch.fx import GraphModule, Node

from ._leaves import Updates, leaves_behind
from ._moves import is_move
from ._ops import ALL_GATHER_INTO, op_of
from ._values import phases_of, where_of


@dataclasses.dataclass(frozen=True)
class Transfer:
    """Collective of a captured step.

    Attributes:
        node: node that starts the transfer.
        wait: node that waits for the transfer, or None.
        op: name in the traffic counter, for example "all_gather".
        axes: mesh axes larger than 1, as in "dp,tp".
        num_ranks: number of ranks along `axes`.
        sent: bytes that this rank puts on the wire.
        dtype: dtype of the elements on the wire.
        sizes: numbers of elements: of each rank's block, of the whole (sums), or of this rank's part for each rank.
        phase: "forward", "backward" or "update".
        where: user's line.
        channel: name of the channel. Transfers on a channel run in the order of the starts.
        leaves: paths of the leaves that the transfer moves, as far as known.
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


def transfers(gm: GraphModule) -> list[Transfer]:
    """Returns the transfers of a captured step in the order of the starts.

    For blocks of m bytes over n ranks: `all_gather` sends m (n - 1), and `psum_scatter` all blocks but this rank's. A
    sum of m bytes sends 2 m (n - 1) / n. A message of m bytes sends m, on the sending rank. For example, a sum of 8 MB
    over 4 ranks sends 12 MB.

    Args:
        gm: captured step. `gm.meta["mesh_shape"]` has the sizes of axes. `gm.meta["coords"]` has the rank's index,
            where the index matters (default: the first rank).

    Returns:
        A `Transfer` per start.

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
    return [_transfer_of(n, gm.meta, phases[n], updates) for n in starts]


def is_start(node: Node) -> bool:
    """Returns whether `node` starts a transfer, between ranks or between memories."""
    op = op_of(node)
    return op.channel != "" or op.move is not None


def is_wait(node: Node) -> bool:
    """Returns whether `node` waits for a transfer."""
    return op_of(node).waits


def is_gather(node: Node) -> bool:
    """Returns whether `node` starts a gather of the step."""
    return op_of(node).channel == "gather"


def is_reduction(node: Node) -> bool:
    """Returns whether `node` starts a sum of the step over ranks, or the exchange that serves a sum."""
    return op_of(node).channel == "reduce"


def is_message(node: Node) -> bool:
    """Returns whether `node` starts a send to a single rank, or a receive from a single rank."""
    return op_of(node).channel == "between"


def start_of(wait: Node) -> Node:
    """Returns the start that `wait` waits for, or `wait` if the argument is no transfer."""
    node = wait.args[0]
    while isinstance(node, Node) and not is_start(node) and node.op == "call_function" and node.args:
        node = node.args[0]
    return node if isinstance(node, Node) and is_start(node) else wait


def wait_of(start: Node) -> Node | None:
    """Returns the wait of a start, or None."""
    return next((u for u in start.users if is_wait(u)), None)


def channel_axes(gm: GraphModule) -> list[tuple[tuple[str, ...], str]]:
    """Returns the channels of a step's transfers: (axes, kind), each once, in an order of names.

    A kind is "gather", "reduce", "between" or "loss".

    The order of uses would differ: a rank without a part of a leaf may gather the leaf before the rank reduces another
    leaf.

    Example:
        >>> channel_axes(torch.fx.symbolic_trace(lambda x: x + 1))
        []
    """
    starts = [n for n in gm.graph.nodes if op_of(n).channel and op_of(n).types != "foreign" and n.args[-1]]
    return sorted({(tuple(str(n.args[-1]).split(",")), op_of(n).channel) for n in starts})


def _transfer_of(node: Node, meta: Mapping[str, Any], phase: str, updates: Updates) -> Transfer:
    read = op_of(node).transfer
    assert read is not None
    wait = wait_of(node)
    if is_message(node):  # activations travel, so there are no leaves
        return Transfer(node=node, wait=wait, phase=phase, where=where_of(node), **vars(read(node, meta)))
    leaves = leaves_behind(node.args[1 if node.target is ALL_GATHER_INTO else 0])
    if not leaves and wait is not None and phase != "forward":
        leaves = updates.leaves_after(wait)
    return Transfer(node=node, wait=wait, phase=phase, where=where_of(node), leaves=leaves, **vars(read(node, meta)))
