"""Starts gathers before their use, within a budget, and fetches the gathered blocks still earlier."""

import collections
from collections.abc import Callable

from torch.fx import GraphModule, Node

from ._edit import reorder_graph
from ._hazards import Memory, dependences, legal_order, put_off, ready_after
from ._ops import READ, ROWS_TO_DEVICE, ROWS_TO_HOST, TO_DEVICE
from ._reorder import waits_and_views
from ._transfers import is_fetch, is_gather, is_start, is_wait, start_of
from ._values import phases_of

# How much further ahead than the gather of a leaf the first of two hops starts, and the read from disk.
FAR_AHEAD, READ_AHEAD = 2, 3


def prefetch(gm: GraphModule, *, budget: int) -> GraphModule:
    """Issues gathers ahead of the first use, up to `budget` bytes, but at least one gather.

    The gathers keep their order, so all ranks still issue the same transfers in the same order. A block is not read
    before the block is written. Waits go down to the first use, as in `sink_waits`. A gather that was ahead by more
    than the budget is held back. Where leaves come in two hops the first hop runs twice as far ahead. Blocks on the
    host begin the way to the device `budget` bytes before the gather, or the use. Blocks on disk are read three times
    as far ahead. Rows of a value on the host are brought in the same way, and waits for rows on the way there go down
    to the end.

        w1 = wait(all_gather_start(a))          h1 = all_gather_start(a)
        y = x @ w1                              h2 = all_gather_start(b)
        w2 = wait(all_gather_start(b))    =>    w1 = wait(h1)
        z = y @ w2                              y = x @ w1
                                                w2 = wait(h2)
                                                z = y @ w2

    Args:
        gm: captured step.
        budget: bytes.

    Returns:
        A new graph with the same nodes and the same bits.

    Raises:
        ValueError: `budget` is negative.

    Example:
        >>> import torch
        >>> from torch.fx.experimental.proxy_tensor import make_fx
        >>> from shardfn.graph._values import tensors_of
        >>> def gathered(own):
        ...     return torch.ops.shardfn.wait(torch.ops.shardfn.all_gather_start(own, [1, 1], "dp"))
        >>> gm = make_fx(lambda a, b, x: (x * gathered(a) * gathered(b),), tracing_mode="fake")(
        ...     torch.ones(1), torch.ones(1), torch.ones(2))
        >>> [n.name for n in gm.graph.nodes][3:-1]
        ['all_gather_start', 'wait', 'mul', 'all_gather_start_1', 'wait_1', 'mul_1']
        >>> [n.name for n in prefetch(gm, budget=16).graph.nodes][3:-1]
        ['all_gather_start', 'all_gather_start_1', 'wait', 'mul', 'wait_1', 'mul_1']
    """
    if budget < 0:
        raise ValueError(f"prefetch(budget={budget}): a budget of bytes must not be negative.")
    memory, phases = Memory(gm), phases_of(gm)
    before = dependences(memory)
    # The time when a gather could run depends only on the inputs. `before` and the queue keep the gathers' order.
    free = dependences(memory, channels=False)

    def is_used(node: Node) -> bool:  # the update limits the moves in flight by the order of ops
        return phases[node] != "update"

    def is_late(node: Node) -> bool:
        return (_is_landing(node) and (is_used(node) or _is_gathering(node))) or _is_return(node)

    order = put_off(memory.order, before, waits_and_views(memory, is_late))
    far = memory.far
    stages: list[tuple[Callable[[Node], bool], int]] = [(lambda n: _is_gathering(n) and n not in far, budget)]
    if far:
        stages.append((far.__contains__, FAR_AHEAD * budget))
    if any(map(is_fetch, memory.order)):
        stages += [(lambda n: n.target is TO_DEVICE and is_used(n), budget)]
        stages += [(lambda n: n.target is ROWS_TO_DEVICE and is_used(n), budget)]
        stages += [(lambda n: n.target is READ and is_used(n), READ_AHEAD * budget)]
    # One stage after another, the nearest first: moves that feed a gather are placed by the gather's new position.
    for which, limit in stages:
        ready = ready_after(order, free, memory)
        order = legal_order(_Starter(order, ready, limit, which).wish(), before)
    return reorder_graph(gm, order)[0]


def _is_landing(node: Node) -> bool:
    return is_wait(node) and (is_gather(start_of(node)) or is_fetch(node))


def _is_return(node: Node) -> bool:
    return is_wait(node) and start_of(node).target is ROWS_TO_HOST


def _is_gathering(node: Node) -> bool:
    return is_gather(start_of(node) if is_wait(node) else node)


def gathered_bytes(start: Node) -> int:
    """Returns the bytes of the value that a gather makes, the same on all ranks.

    A gather into existing memory makes no bytes.
    """
    value = start.meta["val"]
    return value.numel() * value.element_size()


class _Starter:
    """Walks through the order, and starts the nodes that `which` accepts as long as the budget allows."""

    def __init__(self, order: list[Node], ready: dict[Node, int], budget: int, which: Callable[[Node], bool]) -> None:
        self._order, self._ready, self._budget = order, ready, budget
        self._starts = collections.deque(n for n in order if is_start(n) and which(n))
        self._chosen = set(self._starts)
        self._flying: dict[Node, int] = {}
        self._bytes = 0

    def wish(self) -> list[Node]:
        out: list[Node] = []
        for i, node in enumerate(self._order):
            if node in self._chosen:
                continue
            if is_wait(node) and start_of(node) in self._chosen:
                out += self._land_gather(start_of(node))
            # No transfer starts among the placeholders, the first nodes of a graph.
            if node.op != "placeholder":
                out += self._admit_starts(i)
            out.append(node)
        return out

    def _land_gather(self, start: Node) -> list[Node]:
        """Starts the gather and all earlier gathers, if not yet started, and takes the bytes off the budget."""
        late: list[Node] = []
        while self._starts and start not in self._flying:
            late.append(self._take_start())
        self._bytes -= self._flying.pop(start, 0)
        return late

    def _admit_starts(self, i: int) -> list[Node]:
        out: list[Node] = []
        while self._starts and self._ready[self._starts[0]] < i and self._has_room(gathered_bytes(self._starts[0])):
            out.append(self._take_start())
        return out

    def _has_room(self, nbytes: int) -> bool:
        # At least one gather, of any size. Else a leaf above the budget would never be gathered ahead.
        return self._bytes == 0 or self._bytes + nbytes <= self._budget

    def _take_start(self) -> Node:
        start = self._starts.popleft()
        self._flying[start] = gathered_bytes(start)
        self._bytes += self._flying[start]
        return start
