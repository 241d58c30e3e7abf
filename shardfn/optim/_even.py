"""Fused kernels whose bits do not depend on where in its leaf an element stands.

torch's fused kernels for CPUs work on vectors and finish a leaf's last elements one by one, with another rounding (a
product and a sum that are one operation in the one form are two in the other). So the same element would step
differently as the last of a chunk and in the middle of a leaf. Here the ends of all leaves are joined into one padded
leaf, which has none.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from ._kernels import foreach_copy_
from ._leaves import Columns, blocks

_CAST = 1 << 18  # elements: one piece of a gradient, cast, is a megabyte
_LANES = 64  # elements: a multiple of every vector width, and of the cache line that divides the work among threads


def even(columns: Columns) -> Iterator[Columns]:
    """The columns as a fused kernel may take them, in one go or in several; writes ends back after each.

    Args:
        columns: one list a role, gradients last; contiguous leaves of one device; of one dtype but for gradients, which
            are cast in pieces that stay in a core's cache.

    Yields:
        Columns of one dtype, each to be given to one kernel. All but the last are written through.
    """
    if not columns[0]:
        return
    dtype = columns[0][0].dtype
    if columns[-1][0].dtype == dtype:
        yield from _even(columns)
        return
    for *piece, grads in blocks(columns, _CAST):
        yield from _even([*piece, [g.to(dtype) for g in grads]])


def _even(columns: Columns) -> Iterator[Columns]:
    first = columns[0]
    if first[0].device.type != "cpu" or not any(x.numel() % _LANES for x in first):
        yield columns
        return
    cuts = [x.numel() // _LANES * _LANES for x in first]
    pairs = [[(x.view(-1)[:c], x.view(-1)[c:]) for x, c in zip(column, cuts, strict=True)] for column in columns]
    bodies = [[body for body, _ in column if body.numel()] for column in pairs]
    ends = [[end for _, end in column if end.numel()] for column in pairs]
    joined = [_join(column) for column in ends]
    yield [[*body, end] for body, end in zip(bodies, joined, strict=True)]
    sizes = [x.numel() for x in ends[0]]
    for end, join in zip(ends[:-1], joined, strict=False):
        foreach_copy_(end, join[: sum(sizes)].split(sizes))


def _join(ends: list[Tensor]) -> Tensor:
    size = sum(x.numel() for x in ends)
    return torch.cat([*ends, ends[0].new_zeros(-size % _LANES)])
