"""Merges several transfers: how blocks are interleaved, and separated again.

The nodes make the layout that `Packing` makes of tensors. Ranks whose blocks have the same sizes are handled together,
as rows of a matrix, so that the number of nodes does not grow with the number of ranks.
"""

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Graph, Node

from shardfn.collectives import Cuts, Packing, Sizes, Stretch, as_runs

from ._edit import call
from ._ops import ALL_GATHER, PSUM_SCATTER
from ._transfers import wait_of

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


def _member_sizes(starts: Sequence[Node]) -> tuple[Sizes, ...]:
    """Returns the number of elements of each rank's block for each member."""
    rows: list[Any] = [s.args[1] for s in starts]
    return tuple(row if isinstance(row, Sizes) else Sizes(as_runs(row)) for row in rows)


@functools.lru_cache(maxsize=256)  # layers are equal
def _pack_blocks(sizes: tuple[Sizes, ...]) -> tuple[Sizes, list[Stretch]]:
    """Returns the layout of the merged message: elements by rank, and runs of ranks with equal blocks."""
    leaves: list[Cuts] = []
    for row in sizes:
        ends = [0, *itertools.accumulate(row)]
        leaves.append(Cuts(torch.Size([ends[-1]]), 0, tuple(itertools.pairwise(ends))))
    packing = Packing(leaves)
    return Sizes(as_runs(packing.sizes)), packing.runs


def _split_segments(graph: Graph, whole: Node, sizes: tuple[Sizes, ...]) -> list[tuple[Node, int, tuple[int, ...]]]:
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


def _interleave_blocks(graph: Graph, flats: Sequence[Any], sizes: tuple[Sizes, ...], like: Node) -> Node:
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
