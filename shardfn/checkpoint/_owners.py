"""Divides the writing among ranks: one that holds an element writes it, once, and ranks write about equally much.

The division is a function of shapes, specs and the mesh alone, so all ranks compute it without communication.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from shardfn.collectives import Box, blocks_of, pieces
from shardfn.core import Mesh, P

# Blocks that several ranks hold are cut among them from this size on; smaller ones are dealt whole.
_CUT_BYTES = 1 << 20


class Owned(NamedTuple):
    """A box of a leaf, and the rank of the mesh that writes it."""

    leaf: int
    box: Box
    owner: int


def owned(leaves: Sequence[tuple[tuple[int, ...], int, P]], mesh: Mesh) -> list[Owned]:
    """Returns all boxes, in the order of the leaves.

    Args:
        leaves: shape, bytes of an element and spec of each.
        mesh: mesh of all of them.

    Example:
        >>> import torch
        >>> mesh = Mesh({"dp": 2}, torch.device("cpu"))
        >>> [(x.box, x.owner) for x in owned([((4,), 4, P("dp")), ((1,), 4, P())], mesh)]
        [(((0, 2),), 0), (((2, 4),), 1), (((0, 1),), 0)]
    """
    found = [_holders(shape, spec, mesh) for shape, _, spec in leaves]
    total = sum(math.prod(shape) * itemsize for shape, itemsize, _ in leaves)
    cut = max(_CUT_BYTES, total // (4 * mesh.size))
    load = [0] * mesh.size
    out: list[Owned] = []
    shared: list[tuple[int, int, Box, list[int]]] = []
    for i, ((_, itemsize, _), holders) in enumerate(zip(leaves, found, strict=True)):
        for box, ranks in holders.items():
            size = _numel(box) * itemsize
            if len(ranks) == 1:
                out.append(Owned(i, box, ranks[0]))
                load[ranks[0]] += size
                continue
            most = -(-_numel(box) // len(ranks)) if size > cut else _numel(box)
            shared += [(_numel(b) * itemsize, i, b, ranks) for b in pieces(box, most)]
    # The largest first, each to the rank with the least load: at most 4/3 of the optimum (Graham 1969).
    for size, i, box, ranks in sorted(shared, key=lambda x: -x[0]):
        owner = min(ranks, key=lambda r: (load[r], r))
        load[owner] += size
        out.append(Owned(i, box, owner))
    return sorted(out)


def _holders(shape: tuple[int, ...], spec: P, mesh: Mesh) -> dict[Box, list[int]]:
    """Returns the blocks that have elements, each with the ranks that hold it."""
    out: dict[Box, list[int]] = {}
    for rank, box in enumerate(blocks_of(shape, spec, mesh)):
        if _numel(box):
            out.setdefault(box, []).append(rank)
    return out


def _numel(box: Box) -> int:
    return math.prod(hi - lo for lo, hi in box)
