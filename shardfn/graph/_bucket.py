"""Merges small transfers into larger messages."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from shardfn import collectives

from ._edit import call, reorder_graph, revalue
from ._hazards import Memory, dependences, dependents, legal_order, ready_after
from ._ops import ALL_GATHER, PSUM_SCATTER
from ._overlap import reduced_bytes
from ._prefetch import gathered_bytes
from ._reorder import waits_and_views
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


# Merges several transfers: how blocks are interleaved, and separated again.
#
# The nodes make the layout that `Packing` makes of tensors. Ranks whose blocks have the same sizes are handled
# together, as rows of a matrix, so that the number of nodes does not grow with the number of ranks.


_aten = torch.ops.aten
_wait = torch.ops.shardfn.wait.default


def merge_gathers(starts: Sequence[Node]) -> list[Node]:
    """Replaces several all_gathers by a single all_gather. Starts must be neighbours, and waits come later.

    Args:
        starts: `all_gather_start` nodes, in order. Starts and waits are erased.

    Returns:
        The value of each member.
    """
    graph, last, waits = starts[0].graph, starts[-1], [_wait_of(s) for s in starts]
    sizes = _member_sizes(starts)
    with graph.inserting_before(last):
        own = call(graph, _aten.cat.default, ([s.args[0] for s in starts],), like=last)
        args = (own, _pack_blocks(sizes)[0], *last.args[2:])
        start = call(graph, ALL_GATHER, args, like=starts[0])
    with graph.inserting_before(min(waits)):
        whole = call(graph, _wait, (start,), like=waits[0])
        grids = [
            (call(graph, _aten.view.default, (part, [count, sum(row)]), like=waits[0]), row)
            for part, count, row in _split_segments(graph, whole, sizes)
        ]
    values = [_member_columns(graph, grids, m, whole, w) for m, w in enumerate(waits)]
    return _replace_members(starts, waits, values)


def merge_scatters(starts: Sequence[Node], alone: Sequence[bool]) -> list[Node]:
    """Replaces several psum_scatters by a single psum_scatter. Starts must be neighbours, and waits come later.

    Args:
        starts: `psum_scatter_start` nodes, in order. Starts and waits are erased.
        alone: whether each member's value must have separate memory.

    Returns:
        The value of each member.
    """
    graph, last, waits = starts[0].graph, starts[-1], [_wait_of(s) for s in starts]
    sizes = _member_sizes(starts)
    with graph.inserting_before(last):
        flat = _interleave_blocks(graph, [s.args[0] for s in starts], sizes, last)
        args = (flat, _pack_blocks(sizes)[0], *last.args[2:])
        start = call(graph, PSUM_SCATTER, args, like=last)
    with graph.inserting_before(min(waits)):
        whole = call(graph, _wait, (start,), like=waits[0])
    index: Any = last.args[2]
    ends = [0, *itertools.accumulate(s[index] for s in sizes)]
    values: list[Node] = []
    for i, wait in enumerate(waits):
        with graph.inserting_before(wait):
            # Views of a common message. The message lives as long as any view. A result of the step must not keep the
            # other views.
            value = call(graph, _aten.slice.Tensor, (whole, 0, ends[i], ends[i + 1]), like=wait)
            values.append(call(graph, _aten.clone.default, (value,), like=wait) if alone[i] else value)
    return _replace_members(starts, waits, values)


def _wait_of(start: Node) -> Node:
    wait = wait_of(start)
    assert wait is not None
    return wait


def _replace_members(starts: Sequence[Node], waits: Sequence[Node], values: list[Node]) -> list[Node]:
    for start, wait, value in zip(starts, waits, values, strict=True):
        wait.replace_all_uses_with(value)
        wait.graph.erase_node(wait)
        start.graph.erase_node(start)
    return values


def _member_sizes(starts: Sequence[Node]) -> tuple[collectives.Sizes, ...]:
    """Returns the number of elements of each rank's block for each member."""
    rows: list[Any] = [s.args[1] for s in starts]
    return tuple(
        row if isinstance(row, collectives.Sizes) else collectives.Sizes(collectives.as_runs(row)) for row in rows
    )


@functools.lru_cache(maxsize=256)  # layers are equal
def _pack_blocks(sizes: tuple[collectives.Sizes, ...]) -> tuple[collectives.Sizes, list[collectives.Stretch]]:
    """Returns the layout of the merged message: elements by rank, and runs of ranks with equal blocks."""
    leaves: list[collectives.Cuts] = []
    for row in sizes:
        ends = [0, *itertools.accumulate(row)]
        leaves.append(collectives.Cuts(torch.Size([ends[-1]]), 0, tuple(itertools.pairwise(ends))))
    packing = collectives.Packing(leaves)
    return collectives.Sizes(collectives.as_runs(packing.sizes)), packing.runs


def _split_segments(
    graph: Graph, whole: Node, sizes: tuple[collectives.Sizes, ...]
) -> list[tuple[Node, int, tuple[int, ...]]]:
    """Returns the part of the merged value that comes from each run of ranks."""
    out: list[tuple[Node, int, tuple[int, ...]]] = []
    begin = 0
    for _, count, row in _pack_blocks(sizes)[1]:
        end = begin + count * sum(row)
        out.append((call(graph, _aten.slice.Tensor, (whole, 0, begin, end), like=whole), count, row))
        begin = end
    return out


def _member_columns(
    graph: Graph, grids: Sequence[tuple[Node, tuple[int, ...]]], m: int, whole: Node, wait: Node
) -> Node:
    """Returns the m-th member's value: the member's columns of each run, copied."""
    parts: list[Node] = []
    with graph.inserting_before(wait):
        for grid, row in grids:
            if row[m]:
                begin = sum(row[:m])
                part = call(graph, _aten.slice.Tensor, (grid, 1, begin, begin + row[m]), like=wait)
                part = call(graph, _aten.clone.default, (part,), {"memory_format": torch.contiguous_format}, like=wait)
                parts.append(call(graph, _aten.view.default, (part, [-1]), like=wait))
        if not parts:
            return call(graph, _aten.slice.Tensor, (whole, 0, 0, 0), like=wait)
        return parts[0] if len(parts) == 1 else call(graph, _aten.cat.default, (parts,), like=wait)


def _interleave_blocks(graph: Graph, flats: Sequence[Any], sizes: tuple[collectives.Sizes, ...], like: Node) -> Node:
    """Returns the members' blocks for each rank side by side."""
    begins, parts = [0] * len(flats), list[Node]()
    for _, count, row in _pack_blocks(sizes)[1]:
        blocks: list[Node] = []
        for m, (flat, n) in enumerate(zip(flats, row, strict=True)):
            begin, begins[m] = begins[m], begins[m] + count * n
            block = call(graph, _aten.slice.Tensor, (flat, 0, begin, begins[m]), like=like)
            blocks.append(call(graph, _aten.view.default, (block, [count, n]), like=like))
        grid = call(graph, _aten.cat.default, (blocks, 1), like=like)
        parts.append(call(graph, _aten.view.default, (grid, [-1]), like=like))
    if not parts:  # no rank has an element
        return flats[0]
    return parts[0] if len(parts) == 1 else call(graph, _aten.cat.default, (parts,), like=like)
