"""Value numbers: nodes with equal numbers hold equal bits."""

from collections.abc import Hashable
from typing import Any

from torch.fx import Node

from shardfn.collectives import Sizes

from ._hazards import Memory, is_random
from ._moves import is_fetch
from ._ops import ALL_GATHER
from ._transfers import is_start, is_wait


def value_numbers(memory: Memory) -> dict[Node, int]:
    """Returns a number for each node. Equal ops on equal placeholders, not written in between, have equal numbers.

    For example, two gathers of the same block are the same value, and so are two fetches. Values that are overwritten
    later, drawn at random or summed over ranks equal no other values.

    Example:
        >>> import torch
        >>> from torch.fx.experimental.proxy_tensor import make_fx
        >>> gm = make_fx(lambda x: (x.exp(), x.exp(), x.sin()), tracing_mode="fake")(torch.ones(2))
        >>> list(value_numbers(Memory(gm)).values())
        [0, 1, 1, 2, 3]
    """
    return _Numbering(memory).out


class _Numbering:
    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._version: dict[int, int] = {}
        self._seen: dict[Hashable, int] = {}
        self.out: dict[Node, int] = {}
        for node in memory.order:
            self.out[node] = self._seen.setdefault(self._node_key(node), len(self._seen))
            for m in memory.writes(node):
                self._version[m] = self._version.get(m, 0) + 1

    def _node_key(self, node: Node) -> Hashable:
        memory = self._memory
        moving = is_start(node) and node.target is not ALL_GATHER and not is_fetch(node)
        if node.op != "call_function" or moving or memory.mutates(node) or is_random(node):
            return node
        if any(m in memory.mutated and m not in memory.given for m in memory.shown(node)):
            return node
        if is_wait(node):
            return (node.target, self._freeze_value(node.args))
        reads = tuple(self._version.get(m, 0) if m in memory.mutated else 0 for m in memory.reads(node))
        return (node.target, reads, self._freeze_value(node.args), self._freeze_value(tuple(node.kwargs.items())))

    def _freeze_value(self, x: Any) -> Hashable:
        if isinstance(x, Node):
            return (Node, self.out[x])
        if isinstance(x, list | tuple):
            return (tuple, *map(self._freeze_value, x))
        if isinstance(x, slice):
            return (slice, *map(self._freeze_value, (x.start, x.stop, x.step)))
        # 1, 1.0 and True are equal keys, and so are 0.0 and -0.0.
        return (type(x), x if isinstance(x, int | str | Sizes) else repr(x))
