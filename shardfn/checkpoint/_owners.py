"""Divides the writing among ranks: each element is written once, and ranks write about equally much.

The division is a function of only shapes, specs and the mesh, so all ranks compute the division without communication.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from shardfn.collectives import Box, blocks_of, pieces
from shardfn.core import Mesh, P

# From this size on, replicated blocks are split among the holding ranks. Smaller blocks are not split.
_CUT_BYTES = 1 << 20


class Owned(NamedTuple):
    """A box of a leaf, and the rank of the mesh that writes it."""

    leaf: int
    box: Box
    owner: int


def owned(leaves: Sequence[tuple[tuple[int, ...], int, P]], mesh: Mesh) -> list[Owned]:
    """Returns all boxes, in the order of the leaves.

    Args:
        leaves: shape, bytes of an element, and spec of each leaf.
        mesh: mesh of all leaves.

    Example:
        >>> import torch
        >>> mesh = Mesh({"dp": 2}, torch.device("cpu"))
        >>> [(x.box, x.owner) for x in owned([((4,), 4, P("dp")), ((1,), 4, P())], mesh)]
        [(((0, 2),), 0), (((2, 4),), 1), (((0, 1),), 0)]
    """
    found = [_find_holders(shape, spec, mesh) for shape, _, spec in leaves]
    total = sum(math.prod(shape) * itemsize for shape, itemsize, _ in leaves)
    cut = max(_CUT_BYTES, total // (4 * mesh.size))
    load = [0] * mesh.size
    out: list[Owned] = []
    shared: list[tuple[int, int, Box, list[int]]] = []
    for i, ((_, itemsize, _), holders) in enumerate(zip(leaves, found, strict=True)):
        for box, ranks in holders.items():
            size = _box_numel(box) * itemsize
            if len(ranks) == 1:
                out.append(Owned(i, box, ranks[0]))
                load[ranks[0]] += size
                continue
            most = -(-_box_numel(box) // len(ranks)) if size > cut else _box_numel(box)
            shared += [(_box_numel(b) * itemsize, i, b, ranks) for b in pieces(box, most)]
    # The largest first, each to the rank with the least load: at most 4/3 of the optimum (Graham 1969).
    for size, i, box, ranks in sorted(shared, key=lambda x: -x[0]):
        owner = min(ranks, key=lambda r: (load[r], r))
        load[owner] += size
        out.append(Owned(i, box, owner))
    return sorted(out)


def _find_holders(shape: tuple[int, ...], spec: P, mesh: Mesh) -> dict[Box, list[int]]:
    """Returns the blocks that have elements, each with the ranks that hold it."""
    out: dict[Box, list[int]] = {}
    for rank, box in enumerate(blocks_of(shape, spec, mesh)):
        if _box_numel(box):
            out.setdefault(box, []).append(rank)
    return out


def _box_numel(box: Box) -> int:
    return math.prod(hi - lo for lo, hi in box)
