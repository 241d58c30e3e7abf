"""Starts reductions as early as possible, and waits for them as late as possible."""

import collections
from collections.abc import Iterator, Mapping

from torch.fx import GraphModule, Node

from ._edit import reorder_graph
from ._hazards import Memory, dependences, dependents, is_copy, legal_order, put_forward
from ._ops import TO_HOST
from ._reorder import waits_and_views
from ._transfers import is_reduction, is_wait, start_of, wait_of


def overlap_reductions(gm: GraphModule, *, limit: int) -> GraphModule:
    """Starts each sum as early as inputs allow and waits as late as possible, so that the backward covers the sum.

    A wait comes before the first use of the value, or, oldest first, before a start that would bring the whole
    gradients in flight above `limit` bytes. A sum that is kept on the host, or continues to other nodes, sets out when
    the next reduction starts, so that the backward covers this way, too. The reductions keep their order.

        f = g.view(-1)                          f = g.view(-1)
        y = dy @ w                              h = psum_scatter_start(f)
        h = psum_scatter_start(f)        =>     y = dy @ w
        s = wait(h)                             z = y.relu()
        z = y.relu()                            s = wait(h)
        p -= s                                  p -= s

    Args:
        gm: captured step.
        limit: bytes.

    Returns:
        A new graph with the same nodes and the same bits.

    Raises:
        ValueError: `limit` is negative.

    Example:
        >>> import torch
        >>> from torch.fx.experimental.proxy_tensor import make_fx
        >>> def f(g, x):
        ...     y = x * 2
        ...     s = torch.ops.shardfn.wait(torch.ops.shardfn.psum_scatter_start(g, [1, 1], 0, "dp"))
        ...     return (y + 1, s)
        >>> gm = make_fx(f, tracing_mode="fake")(torch.ones(2), torch.ones(2))
        >>> [n.name for n in gm.graph.nodes][2:-1]
        ['mul', 'psum_scatter_start', 'wait', 'add']
        >>> [n.name for n in overlap_reductions(gm, limit=64).graph.nodes][2:-1]
        ['psum_scatter_start', 'mul', 'add', 'wait']
    """
    if limit < 0:
        raise ValueError(f"overlap_reductions(limit={limit}): a limit of bytes must not be negative.")
    memory = Memory(gm)
    before = dependences(memory)
    # Starts first go up as far as possible. From there on only waits move.
    order = put_forward(memory.order, before, _find_eager(memory, dependents(before)))
    leaving = _find_leaving(memory)
    lazy = {*waits_and_views(memory, lambda n: is_wait(n) and is_reduction(start_of(n))), *_flatten_chains(leaving)}
    wish = [*_limit_starts([n for n in order if n not in lazy][:-1], limit, leaving)]
    return reorder_graph(gm, legal_order([*wish, *(n for n in order if n in lazy), order[-1]], before))[0]


def reduced_bytes(start: Node) -> int:
    """Returns the bytes of the whole gradients that a reduction sums, the same on all ranks."""
    values = [n.meta["val"] for n in start.all_input_nodes]
    return sum(v.numel() * v.element_size() for v in values)


def _find_eager(memory: Memory, after: dict[Node, list[Node]]) -> set[Node]:
    """Returns the starts of reductions, with the copies and views that only the starts need."""
    eager: set[Node] = set()
    for node in reversed(memory.order):
        # Ops that pack a message go up with the start. An op with other users stays, or the result would live longer.
        packs = (is_copy(node) or memory.is_view(node)) and bool(after[node])
        if is_reduction(node) or (packs and all(n in eager for n in after[node])):
            eager.add(node)
    return eager


def _find_leaving(memory: Memory) -> dict[Node | None, list[Node]]:
    """Returns for each reduction the nodes that send the sum on, with copies and views.

    A sum may go to the host, for example, or over another hop.
    """
    behind: dict[Node, Node] = {}
    chains: dict[Node | None, list[Node]] = {}
    for node in memory.order:
        if is_wait(node) and is_reduction(start_of(node)):
            behind[node] = start_of(node)
            continue
        follows = [behind.get(n) for n in node.all_input_nodes]
        only = is_copy(node) or memory.is_view(node) or _goes_on(node)
        if only and follows and follows[0] is not None and len(set(follows)) == 1:
            chains.setdefault(follows[0], []).append(node)
            if not _goes_on(node):
                behind[node] = follows[0]
    return {start: chain for start, chain in chains.items() if any(map(_goes_on, chain))}


def _goes_on(node: Node) -> bool:
    return node.target is TO_HOST or is_reduction(node)


def _flatten_chains(chains: Mapping[Node | None, list[Node]]) -> list[Node]:
    return [node for chain in chains.values() for node in chain]


def _limit_starts(order: list[Node], limit: int, leaving: Mapping[Node | None, list[Node]]) -> Iterator[Node]:
    """Puts waits before starts that would exceed the limit, and all other waits where the value is needed."""
    flying: collections.deque[tuple[Node, int]] = collections.deque()
    before: Node | None = None  # the reduction before
    total = 0
    for node in order:
        if is_reduction(node):
            yield from leaving.get(before, ())
            before, nbytes = node, reduced_bytes(node)
            # The oldest first: reductions of the same channel end in the order in which the reductions began.
            while flying and total + nbytes > limit:
                oldest, freed = flying.popleft()
                total -= freed
                yield from filter(None, [wait_of(oldest)])
            flying.append((node, nbytes))
            total += nbytes
        yield node
