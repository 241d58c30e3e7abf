"""The messages by which a leaf goes from one mesh to another: the overlaps of its present blocks with the wanted ones.

The distinct blocks of a leaf lie side by side. A rank with a new block needs the overlap of the new block with each old
block, and may itself have some overlap already. The rank receives every other overlap once. So the bytes sent are the
fewest possible:

    bytes to a rank = bytes of its new block - bytes of the overlap of its new block with its old one
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from shardfn.core import Mesh, P, all_coords, block_slices

# Start and stop along each dim, in the coordinates of the leaf.
Box = tuple[tuple[int, int], ...]


class Overlap(NamedTuple):
    """Box that a rank has and another rank wants.

    Attributes:
        sender: the rank of the program that has the box, perhaps the receiver itself.
        receiver: the rank that wants the box.
        box: place in the leaf.
    """

    sender: int
    receiver: int
    box: Box


def overlaps(shape: tuple[int, ...], src: tuple[P, Mesh], dst: tuple[P, Mesh], rank: int) -> list[Overlap]:
    """Returns the parts of a leaf that a rank sends, receives and has already, in an order equal on all ranks.

    Where several ranks hold a block, the receivers are shared out among the holders in turn, for example 2 of 4 to each
    of 2.

    Args:
        shape: the leaf's global shape.
        src: present spec and mesh.
        dst: new spec and mesh.
        rank: rank of the program, in at least one mesh.

    Example:
        >>> import torch
        >>> pair, rest = (Mesh({"dp": 2}, torch.device("cpu"), ranks=r) for r in ([0, 1], [1, 2]))
        >>> [(x.sender, x.receiver, x.box) for x in overlaps((6,), (P("dp"), pair), (P(), rest), 1)]
        [(0, 1, ((0, 3),)), (1, 1, ((3, 6),)), (1, 2, ((3, 6),))]
    """
    wanted = np.array(blocks_of(shape, *dst), dtype=np.int64).reshape(dst[1].size, len(shape), 2)
    holders: dict[Box, list[int]] = {}
    for holder, box in zip(src[1].ranks, blocks_of(shape, *src), strict=True):
        holders.setdefault(box, []).append(holder)
    out: list[Overlap] = []
    for box, ranks in holders.items():
        held = np.array(box, dtype=np.int64).reshape(len(shape), 2)
        starts, stops = np.maximum(wanted[..., 0], held[:, 0]), np.minimum(wanted[..., 1], held[:, 1])
        turn = 0
        for i in np.flatnonzero((starts < stops).all(1)).tolist():
            receiver = dst[1].ranks[i]
            sender = receiver if receiver in ranks else ranks[turn % len(ranks)]
            turn += receiver not in ranks
            if rank in (sender, receiver):
                out.append(Overlap(sender, receiver, tuple(zip(starts[i].tolist(), stops[i].tolist(), strict=True))))
    return out


def blocks_of(shape: tuple[int, ...], spec: P, mesh: Mesh) -> list[Box]:
    """Returns the blocks of a leaf, in the order of the mesh's ranks."""
    cuts = (block_slices(shape, spec, mesh.shape, coords) for coords in all_coords(mesh.shape))
    return [tuple((s.start, s.stop) for s in slices) for slices in cuts]


def pieces(box: Box, most: int) -> Iterator[Box]:
    """Yields a box as boxes of at most `most` elements, in row-major order.

    Example:
        >>> list(pieces(((0, 2), (0, 5)), 4))
        [((0, 1), (0, 4)), ((0, 1), (4, 5)), ((1, 2), (0, 4)), ((1, 2), (4, 5))]
    """
    sizes = [stop - start for start, stop in box]
    dim = next((d for d, n in enumerate(sizes) if n > 1), None)
    if dim is None or np.prod(sizes) <= most:
        yield box
        return
    rows = max(1, int(most // np.prod(sizes[dim + 1 :])))
    start, stop = box[dim]
    for lo in range(start, stop, rows):
        yield from pieces((*box[:dim], (lo, min(lo + rows, stop)), *box[dim + 1 :]), most)
