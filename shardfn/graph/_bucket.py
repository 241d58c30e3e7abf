"""Merges small transfers into larger messages."""

import dataclasses
from collections.abc import Callable, Sequence

from torch.fx import GraphModule, Node

from ._edit import reorder_graph, revalue
from ._hazards import Memory, dependences, dependents, legal_order, ready_after
from ._merge import merge_gathers, merge_scatters
from ._ops import ALL_GATHER, PSUM_SCATTER
from ._overlap import reduced_bytes
from ._prefetch import gathered_bytes
from ._sink import waits_and_views
from ._transfers import is_wait, start_of, wait_of


def bucket(gm: GraphModule, *, limit: int) -> GraphModule:
    """Merges neighbouring gathers, and neighbouring psum_scatters, into messages of up to `limit` bytes.

    Members run over the same axes, in the same dtype and phase. Rank r's part of the merged message is this rank's
    parts of the members in order: [a_r, b_r, ...]. Sums are elementwise and in rank order as before, so the bits are
    the same. A gather moves up to the first member of the bucket, a psum_scatter down to the last, unless a member
    needs another member's value before. Messages of `limit` bytes or more travel separately.

        a = wait(all_gather_start(a_r, [2, 2]))        o = cat([a_r, b_r])
        b = wait(all_gather_start(b_r, [1, 1]))        w = wait(all_gather_start(o, [3, 3]))
                                                =>     v = w.view(2, 3)
                                                       a = v[:, :2].clone().view(-1)
                                                       b = v[:, 2:].clone().view(-1)

    Args:
        gm: captured step.
        limit: bytes of the gathered values, or of the whole summed values.

    Returns:
        A new graph with the same bits.

    Raises:
        ValueError: `limit` is negative.

    Example:
        >>> import torch
        >>> from torch.fx.experimental.proxy_tensor import make_fx
        >>> def gathered(own):
        ...     return torch.ops.shardfn.wait(torch.ops.shardfn.all_gather_start(own, [1, 1], "dp"))
        >>> gm = make_fx(lambda a, b: (gathered(a), gathered(b)), tracing_mode="fake")(torch.ones(1), torch.ones(1))
        >>> [n.name for n in bucket(gm, limit=1024).graph.nodes if "start" in n.name]
        ['all_gather_start_2']
    """
    if limit < 0:
        raise ValueError(f"bucket(limit={limit}): a limit of bytes must not be negative.")
    memory = Memory(gm)
    if memory.far:  # separately, as gathers that feed other gathers do not move up past these
        gm = _bucket_gathers(memory, gm, limit, memory.far)
        memory = Memory(gm)
    gm = _bucket_gathers(memory, gm, limit, {n for n in memory.order if n.target is ALL_GATHER} - memory.far)
    return _bucket_scatters(gm, limit)


# all_gather: up to the first member


def _bucket_gathers(memory: Memory, gm: GraphModule, limit: int, which: set[Node]) -> GraphModule:
    before = dependences(memory, channels=False)
    ready = ready_after(memory.order, before, memory)

    def can_join(start: Node, members: Sequence[Node]) -> bool:
        # The message leaves where the first member did, so every other member must be there by then.
        return ready[start] < memory.position[members[0]]

    groups = _group_starts(memory, which, gathered_bytes, can_join, limit)
    head = {g[0]: g for g in groups}
    moved = {n for g in groups for n in g[1:]}
    wish = [m for n in memory.order if n not in moved for m in head.get(n, (n,))]
    out, new = reorder_graph(gm, legal_order(wish, before))
    values = {v for g in groups for v in merge_gathers([new[n] for n in g])}
    return _revalue_views(out, new, memory, values)


# psum_scatter: down to the last member


def _bucket_scatters(gm: GraphModule, limit: int) -> GraphModule:
    memory = Memory(gm)
    before = dependences(memory, channels=False)
    needed = _needed_at(memory, before)

    def can_join(start: Node, members: Sequence[Node]) -> bool:
        # The message leaves with the last member, so no node may need another member's sum before.
        return memory.position[start] < min(needed[m] for m in members)

    groups = _group_starts(
        memory, {n for n in memory.order if n.target is PSUM_SCATTER}, reduced_bytes, can_join, limit
    )
    tail = {g[-1]: g for g in groups}
    moved = {n for g in groups for n in g[:-1]}
    lazy = waits_and_views(memory, lambda n: is_wait(n) and (start_of(n) in moved or start_of(n) in tail))
    busy = [m for n in memory.order[:-1] if n not in moved and n not in lazy for m in tail.get(n, (n,))]
    wish = [*busy, *(n for n in memory.order if n in lazy), memory.order[-1]]
    out, new = reorder_graph(gm, legal_order(wish, before))
    leaves = _has_results(memory)
    values = {v for g in groups for v in merge_scatters([new[n] for n in g], [leaves(n) for n in g])}
    return _revalue_views(out, new, memory, values)


def _needed_at(memory: Memory, before: dict[Node, list[Node]]) -> dict[Node, int]:
    """Returns the position of the first node that needs each psum_scatter's result. Waits and views do not count."""
    lazy = waits_and_views(memory, lambda n: is_wait(n) and start_of(n).target is PSUM_SCATTER)
    after, out, end = dependents(before), dict[Node, int](), len(memory.order) - 1
    for node in reversed(memory.order):
        if node in lazy or node.target is PSUM_SCATTER:
            out[node] = min((out[n] if n in lazy else memory.position[n] for n in after[node]), default=end)
    return out


def _has_results(memory: Memory) -> Callable[[Node], bool]:
    """Returns whether the step returns a value. A returned value must not share memory with other values."""
    returned = set(memory.reads(memory.order[-1]))
    return lambda node: not returned.isdisjoint(memory.shown(node))


# Which, and the exchange


@dataclasses.dataclass
class _Open:
    """Bucket that is being filled: members, bytes of members, and bytes of other transfers since the first member."""

    members: list[Node]
    nbytes: int
    passed: int


def _group_starts(
    memory: Memory,
    which: set[Node],
    size: Callable[[Node], int],
    joins: Callable[[Node, Sequence[Node]], bool],
    limit: int,
) -> list[list[Node]]:
    filled: list[_Open] = []
    filling: dict[object, _Open] = {}
    total = 0
    for node in memory.order:
        if node not in which or wait_of(node) is None:
            continue
        key, nbytes = _bucket_key(node), size(node)
        total += nbytes
        # The key is the same on all ranks, and nodes come in the order of the graph. So all ranks merge the same
        # transfers.
        group = filling.get(key)
        fits = group is not None and group.nbytes + nbytes <= limit and total - group.passed <= 4 * limit
        if group is not None and fits and joins(node, group.members):
            group.members.append(node)
            group.nbytes += nbytes
        # The previous bucket of this key is closed: a later member would jump over this node.
        elif nbytes < limit:
            filling[key] = _Open([node], nbytes, total)
            filled.append(filling[key])
        else:
            filling.pop(key, None)
    return [g.members for g in filled if len(g.members) > 1]


def _bucket_key(start: Node) -> tuple[object, ...]:
    value = start.meta["val"]
    sizes, *rest = start.args[1:]
    return (len(sizes), *rest, value.dtype, value.device, start.meta.get("phase"))  # pyright: ignore[reportArgumentType]


def _revalue_views(out: GraphModule, new: dict[Node, Node], memory: Memory, changed: set[Node]) -> GraphModule:
    """Computes the abstract values of views of merged values again."""
    gone = {n for n, copy in new.items() if copy._erased}
    for old in memory.order:
        if old not in gone:
            revalue(new[old], old, changed, memory)
    return out
