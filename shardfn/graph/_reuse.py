"""Drops a second gather, or a second fetch, of a leaf if the gathered value still exists. Numbers equal values."""

import collections
from collections.abc import Callable, Hashable, Mapping
from typing import Any

from torch.fx import GraphModule, Node

from shardfn.collectives import Sizes

from ._edit import reorder_graph, revalue
from ._hazards import Memory, is_random
from ._ops import ALL_GATHER, TO_DEVICE
from ._prefetch import gathered_bytes
from ._transfers import is_fetch, is_gather, is_start, is_wait, wait_of


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


def reuse_gathers(gm: GraphModule, *, budget: int) -> GraphModule:
    """Drops the second gather of a leaf where the first value is still alive, or is worth keeping.

    A value is worth keeping if the other gathered values that are used between the last use of the first value and the
    first use of the second hold at most `budget` bytes. So at the turn from forward to backward the last layers stay.
    Values fetched from the host for use count as gathered. A value that is written to, or returned, is not shared.
    Neither are gathers with a write to the block in between.

        w = wait(all_gather_start(a))           w = wait(all_gather_start(a))
        y = x @ w                               y = x @ w
        dy = loss'(y)                    =>     dy = loss'(y)
        v = wait(all_gather_start(a))           dx = dy @ w.t()
        dx = dy @ v.t()

    Args:
        gm: captured step.
        budget: bytes.

    Returns:
        A new graph with the same bits, and with fewer transfers.

    Raises:
        ValueError: `budget` is negative.

    Example:
        >>> import torch
        >>> from torch.fx.experimental.proxy_tensor import make_fx
        >>> def gathered(own):
        ...     return torch.ops.shardfn.wait(torch.ops.shardfn.all_gather_start(own, [1, 1], "dp"))
        >>> gm = make_fx(lambda a, x: (x * gathered(a) - gathered(a),), tracing_mode="fake")(
        ...     torch.ones(1), torch.ones(2))
        >>> [n.name for n in reuse_gathers(gm, budget=0).graph.nodes]
        ['a_1', 'x_1', 'all_gather_start', 'wait', 'mul', 'sub', 'output']
    """
    if budget < 0:
        raise ValueError(f"reuse_gathers(budget={budget}): a budget of bytes must not be negative.")
    memory = Memory(gm)
    # Separately: values that are not gathered may have other sizes on other ranks, while all ranks must issue equal
    # gathers.
    lone, number = _lone_fetches(memory), value_numbers(memory)
    stands = _Recent(memory, number, budget, lambda n: n.target is ALL_GATHER).stands
    stands |= _Recent(memory, number, budget, lone.__contains__).stands
    dropped = {n for w in stands for n in (w, *w.all_input_nodes)}
    out, new = reorder_graph(gm, memory.order)
    for again, first in stands.items():
        new[again].replace_all_uses_with(new[first])
    # Waits before starts: a node that has users cannot be erased.
    for node in reversed(memory.order):
        if node in dropped:
            out.graph.erase_node(new.pop(node))
    changed = {new[first] for first in stands.values()}
    for old, node in new.items():
        revalue(node, old, changed, memory)
    return out


class _Recent:
    """Gathered values in the order of the last use. Values beyond the budget are dropped.

    Attributes:
        stands: dropped wait -> the wait that replaces the dropped wait.
    """

    def __init__(self, memory: Memory, number: Mapping[Node, int], budget: int, which: Callable[[Node], bool]) -> None:
        self._memory, self._number, self._budget = memory, number, budget
        self._recent: collections.OrderedDict[int, int] = collections.OrderedDict()
        self._total = 0
        self._first: dict[int, Node] = {}
        self._last_use, private = _last_uses(memory)
        self._leaf: dict[int, int] = {}
        self.stands: dict[Node, Node] = {}
        for node in memory.order:
            wait = wait_of(node) if which(node) else None
            if wait is not None and not private.intersection(memory.shown(wait)):
                self._reuse_gather(node, wait)
            for m in memory.reads(node):
                if m in self._leaf:
                    self._touch_leaf(self._leaf[m], memory.sizes[m])

    def _reuse_gather(self, start: Node, wait: Node) -> None:
        leaf, m = self._number[start], self._memory.shown(wait)[0]
        first = self._first.get(leaf)
        # The dropped value's uses are the first value's from now on.
        if first is not None and (leaf in self._recent or self._is_alive(first, start)):
            self.stands[wait] = first
            kept = self._memory.shown(first)[0]
            self._last_use[kept] = max(self._last_use.get(kept, 0), self._last_use.get(m, 0))
        else:
            self._first[leaf] = wait
        self._leaf[m] = leaf
        self._touch_leaf(leaf, gathered_bytes(start))

    def _is_alive(self, wait: Node, start: Node) -> bool:
        return self._last_use.get(self._memory.shown(wait)[0], 0) > self._memory.position[start]

    def _touch_leaf(self, leaf: int, nbytes: int) -> None:
        self._total += nbytes - self._recent.pop(leaf, 0)
        self._recent[leaf] = nbytes
        # All other values were used after the oldest value. The oldest value stays only while all fit the budget.
        while self._recent and self._total - next(iter(self._recent.values())) > self._budget:
            self._total -= self._recent.popitem(last=False)[1]


def _lone_fetches(memory: Memory) -> set[Node]:
    """Returns the moves to the device of values that are used directly, and not gathered there."""
    gathered = {m for n in memory.order if is_gather(n) for m in memory.reads(n)}
    waits = {n: wait_of(n) for n in memory.order if n.target is TO_DEVICE}
    return {n for n, wait in waits.items() if wait is not None and gathered.isdisjoint(memory.shown(wait))}


def _last_uses(memory: Memory) -> tuple[dict[int, int], set[int]]:
    """Returns the last position at which each memory is read, and the memories that are overwritten or returned."""
    last = {m: i for i, n in enumerate(memory.order) for m in memory.reads(n)}
    return last, memory.mutated.union(memory.reads(memory.order[-1]))
