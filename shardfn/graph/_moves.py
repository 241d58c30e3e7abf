"""Moves of a captured step between device, host and disk, and the memory that each value is in."""

import dataclasses
from typing import Any, cast

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from shardfn.core import MemoryKind, is_disk

from ._op import Crossing
from ._ops import op_of
from ._values import num_bytes, phases_of, tensors_of, where_of


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
