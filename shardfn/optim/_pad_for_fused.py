"""Fused kernels with results that do not depend on an element's position in the leaf.

torch's fused kernels for CPUs work on vectors and finish a leaf's last elements one by one, with another rounding (for
example, a product and a sum are a single fused operation only in the vector form). So the same element would step
differently at the end of a chunk and in the middle of a leaf. Here the ends of all leaves are joined into a padded leaf
of whole vectors.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from ._kernels import foreach_copy_
from ._leaves import Columns, split_columns

_CAST = 1 << 18  # elements a thread: a megabyte of cast gradient; smaller pieces pay more for their launches
_LANES = 64  # elements: a multiple of every vector width, and of the cache line that divides the work among threads
_SMALL = 1 << 10  # elements: a smaller leaf with an end is joined whole, as a view costs more than its copy


def pad_for_fused(columns: Columns) -> Iterator[Columns]:
    """Yields the columns in one or several forms for a fused kernel, and writes ends back after each.

    Args:
        columns: a list for each role, gradients last. Leaves are contiguous, and on one device. All have the same
            dtype, except gradients: those are cast in pieces that fit a core's cache.

    Yields:
        Columns of one dtype, each for one call of a kernel. All columns but the last are written through.
    """
    if not columns[0]:
        return
    dtype = columns[0][0].dtype
    if columns[-1][0].dtype == dtype:
        yield from _align_columns(columns)
        return
    pieces = list(split_columns(columns, _CAST * torch.get_num_threads()))
    # One buffer for all: memory that is freed and taken again for each piece may be fresh, zeroed pages each time.
    scratch = torch.empty(max(_total_numel(grads) for *_, grads in pieces), dtype=dtype, device=columns[0][0].device)
    for *piece, grads in pieces:
        cast = [x.view_as(g) for x, g in zip(_split_ends(scratch, grads), grads, strict=True)]
        foreach_copy_(cast, grads)
        yield from _align_columns([*piece, cast])


def _align_columns(columns: Columns) -> Iterator[Columns]:
    first = columns[0]
    if first[0].device.type != "cpu" or not any(x.numel() % _LANES for x in first):
        yield columns
        return
    sizes = [x.numel() for x in first]
    starts = [_start_of_end(n) for n in sizes]
    bodies = [[_leaf_body(x, n, k) for x, n, k in zip(column, sizes, starts, strict=True) if k] for column in columns]
    ends = [[_leaf_end(x, n, k) for x, n, k in zip(column, sizes, starts, strict=True) if k < n] for column in columns]
    joined = [_join_ends(column) for column in ends]
    yield [[*body, end] for body, end in zip(bodies, joined, strict=True)]
    # The bodies are views, written in place. Ends were copied into one leaf, and are copied back.
    for end, join in zip(ends[:-1], joined, strict=False):
        foreach_copy_(end, _split_ends(join, end))


def _start_of_end(n: int) -> int:
    """Returns the index at which the end of a leaf of `n` elements begins: the rest after whole vectors."""
    return n if n % _LANES == 0 else 0 if n < _SMALL else n // _LANES * _LANES


def _leaf_body(x: Tensor, n: int, start: int) -> Tensor:
    """Returns a leaf without the end, or `x` unchanged if only whole vectors are left."""
    return x if start == n else x.view(-1).narrow(0, 0, start)


def _leaf_end(x: Tensor, n: int, start: int) -> Tensor:
    return x.view(-1).narrow(0, start, n - start) if start else x.view(-1)


def _join_ends(ends: list[Tensor]) -> Tensor:
    return torch.cat([*ends, ends[0].new_zeros(-_total_numel(ends) % _LANES)])


def _split_ends(flat: Tensor, like: list[Tensor]) -> tuple[Tensor, ...]:
    return flat[: _total_numel(like)].split([x.numel() for x in like])


def _total_numel(leaves: list[Tensor]) -> int:
    return sum(x.numel() for x in leaves)
