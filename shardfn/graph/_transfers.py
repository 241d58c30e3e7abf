"""Transfers of a captured step between ranks and between memories, with the bytes, axes and leaves of each."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, cast

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from shardfn.core import MemoryKind, is_disk

from ._op import Crossing
from ._ops import ALL_GATHER_INTO, op_of
from ._values import is_view, num_bytes, phases_of, tensors_of, where_of


@dataclasses.dataclass(frozen=True)
class MemoryMove:
    """Transfer between memories.

    Attributes:
        node: node that starts the move.
        wait: node that waits for the move, or None.
        src: memory that the value leaves.
        dst: memory that the value goes to.
        nbytes: bytes that the move carries.
        phase: "forward", "backward" or "update".
        where: user's line.
    """

    node: Node
    wait: Node | None
    src: MemoryKind
    dst: MemoryKind
    nbytes: int
    phase: str
    where: str


def moves(gm: GraphModule) -> list[MemoryMove]:
    """Returns the moves of a captured step, in the order of the starts. Moves of nothing are left out.

    Args:
        gm: captured step.

    Example:
        >>> from torch.fx.experimental.proxy_tensor import make_fx
        >>> from shardfn.memory import to_host
        >>> gm = make_fx(lambda x: to_host(x).result(), tracing_mode="fake")(torch.ones(3))
        >>> [(m.src, m.dst, m.nbytes) for m in moves(gm)]
        [('device', 'host', 12)]
    """
    phases = phases_of(gm)
    found = [_move_of(node, phases[node]) for node in gm.graph.nodes if is_move(node)]
    return [move for move in found if move.nbytes]


def is_move(node: Node) -> bool:
    """Returns whether `node` starts a transfer between memories."""
    return op_of(node).move is not None


def is_fetch(node: Node) -> bool:
    """Returns whether `node` only brings a value nearer to the value's use, or waits for such a move."""
    start = node.args[0] if op_of(node).waits else node
    return isinstance(start, Node) and op_of(start).fetches


def crossing(start: Node) -> Crossing:
    """Returns the two memories between which a node moves a value."""
    found = op_of(start).move
    assert found is not None
    return found


def transferred_bytes(start: Node) -> int:
    """Returns the bytes that a move moves."""
    move = crossing(start)
    source: Any = start if move.carried is None else start.args[move.carried]
    return sum(map(num_bytes, tensors_of(source)))


def memory_of(node: Node) -> MemoryKind:
    """Returns the memory in which `node` makes a value."""
    return op_of(node).makes_in or node.meta.get("memory", "device")


def made_bytes(node: Node, x: Tensor) -> int:
    """Returns the bytes of a tensor that a node makes: of a token, by a placeholder or a writer, the bytes on disk."""
    if not is_disk(memory_of(node)):
        return x.untyped_storage().nbytes()
    shape, dtype = cast(tuple[Any, Any], node.meta["stored"] if node.op == "placeholder" else node.args)
    return torch.Size(shape).numel() * dtype.itemsize


def _move_of(node: Node, phase: str) -> MemoryMove:
    src, dst, _ = crossing(node)
    wait = next((u for u in node.users if op_of(u).waits), None)
    return MemoryMove(node, wait, src, dst, transferred_bytes(node), phase, where_of(node))


def leaves_behind(own: Any) -> tuple[str, ...]:
    """Returns the paths of the leaves that a transfer's operand, a node or a list of nodes, is made of, in order.

    Leaves in `node.meta["gradient_of"]`, where a capture has noted leaves, count too.
    """
    names: dict[str, None] = {}
    for operand in own if isinstance(own, (list, tuple)) else [own]:
        found = [operand, *sources(operand)] if isinstance(operand, Node) else []
        names.update({n.meta["leaf"]: None for n in reversed(found) if n.op == "placeholder" and "leaf" in n.meta})
        names.update({n.meta["gradient_of"]: None for n in reversed(found) if "gradient_of" in n.meta})
    return tuple(names)


class Updates:
    """Follows a reduced gradient to the optimizer's op that takes the gradient. The op names the parameter, too."""

    def __init__(self, gm: GraphModule) -> None:
        self._takers: dict[Node, dict[Node, int]] = {}
        for node in gm.graph.nodes:
            if node.op == "call_function" and getattr(node.target, "__name__", "").startswith("_fused_"):
                self._takers[node] = {g: i for i, g in enumerate(node.args[1])}

    def leaves_after(self, wait: Node, limit: int = 4096) -> tuple[str, ...]:
        """Returns the paths of the parameters that the value of `wait` updates."""
        stack, seen, names = [wait], {wait}, dict[str, None]()
        while stack and len(seen) < limit:
            node = stack.pop()
            for user in node.users:
                if user in self._takers:
                    names.update(dict.fromkeys(self._find_leaf(user, node)))
                elif user not in seen and _keeps_identity(user) and user.args[0] is node:
                    seen.add(user)
                    stack.append(user)
        return tuple(names)

    def _find_leaf(self, taker: Node, grad: Node) -> tuple[str, ...]:
        at = self._takers[taker].get(grad)
        if at is None:
            return ()
        param = taker.args[0][at]  # pyright: ignore[reportOptionalSubscript, reportArgumentType, reportIndexIssue]
        found = [param, *sources(param)] if isinstance(param, Node) else []
        return tuple(n.meta["leaf"] for n in found if n.op == "placeholder" and "leaf" in n.meta)


def sources(node: Node) -> Iterator[Node]:
    """Yields the nodes that a value's elements come from by cuts, joins, casts, codes, transfers or copies."""
    stack, seen = list(node.all_input_nodes) if _is_moving(node) else [], {node}
    while stack:
        n = stack.pop()
        if n in seen:
            continue
        seen.add(n)
        yield n
        if _is_moving(n):
            stack.extend(n.all_input_nodes)


def _is_moving(node: Node) -> bool:
    """Returns whether `node` moves elements and computes nothing with them."""
    return node.op == "call_function" and (op_of(node).carries or is_view(node))


def _keeps_identity(node: Node) -> bool:
    """Returns whether the result is still a gradient of the same leaves: cut, cast, scaled, or summed while encoded."""
    op = op_of(node)
    return op.scales or op.views == 0


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
    """Returns the start that `wait` waits for, or `wait` if the argument is not a transfer."""
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
