"""The moves of a captured step between device, host and disk, and the memory that each value is in."""

import dataclasses
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch.fx import GraphModule, Node

import shardfn.memory  # noqa: F401  # defines torch.ops.shardfn_memory
from shardfn.core import MemoryKind

from ._values import num_bytes, phases_of, tensors_of, where_of

_OPS = torch.ops.shardfn_memory
TO_DEVICE, READ, TO_HOST = _OPS.to_device_start.default, _OPS.read_start.default, _OPS.to_host_start.default
MOVE_WAIT = _OPS.wait.default
# What bytes cross, from where to where, and which argument says how many; reads say so by their value.
MOVES: Mapping[Any, tuple[MemoryKind, MemoryKind, int | None]] = {
    TO_HOST: ("device", "host", 0),
    _OPS.to_host_into_start.default: ("device", "host", 1),
    TO_DEVICE: ("host", "device", 0),
    _OPS.to_device_into_start.default: ("host", "device", 1),
    READ: ("disk", "host", None),
    _OPS.read_into_start.default: ("disk", "host", 0),
    _OPS.write_start.default: ("host", "disk", 2),
}
_MADE: Mapping[Any, MemoryKind] = {
    TO_HOST: "host",
    TO_DEVICE: "device",
    READ: "host",
    _OPS.host_empty.default: "host",
    _OPS.writer.default: "disk",
}


@dataclasses.dataclass(frozen=True)
class Move:
    """One transfer between memories.

    Attributes:
        node: the node that starts it.
        wait: the node that waits for it, or None.
        src: the memory that it leaves.
        dst: the memory that it reaches.
        nbytes: what crosses.
        phase: "forward", "backward" or "update".
        where: the user's line.
    """

    node: Node
    wait: Node | None
    src: MemoryKind
    dst: MemoryKind
    nbytes: int
    phase: str
    where: str


def moves(gm: GraphModule) -> list[Move]:
    """The moves of a captured step, in the order of their starts; moves of nothing are left out.

    Args:
        gm: the step.

    Example:
        >>> from torch.fx.experimental.proxy_tensor import make_fx
        >>> from shardfn.memory import to_host
        >>> gm = make_fx(lambda x: to_host(x).result(), tracing_mode="fake")(torch.ones(3))
        >>> [(m.src, m.dst, m.nbytes) for m in moves(gm)]
        [('device', 'host', 12)]
    """
    phases = phases_of(gm)
    found = [_move(node, phases[node]) for node in gm.graph.nodes if is_move(node)]
    return [move for move in found if move.nbytes]


def is_move(node: Node) -> bool:
    """Whether `node` starts a transfer between memories."""
    return node.op == "call_function" and node.target in MOVES


def is_fetch(node: Node) -> bool:
    """Whether `node` brings a value nearer to where it is used, and does nothing else; its wait included."""
    start = node.args[0] if node.target is MOVE_WAIT else node
    return isinstance(start, Node) and start.target in (TO_DEVICE, READ)


def moved_bytes(start: Node) -> int:
    """The bytes that a move carries."""
    argument = MOVES[start.target][2]
    source: Any = start if argument is None else start.args[argument]
    return sum(map(num_bytes, tensors_of(source)))


def memory_of(node: Node) -> MemoryKind:
    """The memory in which `node` makes its value."""
    return _MADE.get(node.target) or node.meta.get("memory", "device")


def stored_bytes(node: Node) -> int:
    """The bytes on disk for which a token stands, that of a placeholder or of a writer."""
    shape, dtype = cast(tuple[Any, Any], node.meta["stored"] if node.op == "placeholder" else node.args)
    return torch.Size(shape).numel() * dtype.itemsize


def _move(node: Node, phase: str) -> Move:
    src, dst, _ = MOVES[node.target]
    wait = next((u for u in node.users if u.target is MOVE_WAIT), None)
    return Move(node, wait, src, dst, moved_bytes(node), phase, where_of(node))
