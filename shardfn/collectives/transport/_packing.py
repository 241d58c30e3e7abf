"""How the pieces of leaves that travel together lie in a single message.

    a: 4 rows, cut along dim 0;  b: 3 columns, cut along dim 1;  2 ranks

    rank 0 sends       [ a[:2]  b[:, :2] ]
    rank 1 sends       [ a[2:]  b[:, 2:] ]
    the message        [ a[:2]  b[:, :2]  a[2:]  b[:, 2:] ]        rank by rank, and in it leaf by leaf

A gather sends pieces and takes wholes out of the message. A reduction lays wholes out as a message, and each rank gets
its pieces. Both layouts are defined only here; callers send the message.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from shardfn.core import chunk_bounds


@dataclasses.dataclass(frozen=True)
class Cuts:
    """Cut of a tensor into a piece for each rank: along one dim, or not at all.

    Attributes:
        whole: the shape of the tensor.
        dim: the dim that is cut, or None for an uncut tensor.
        bounds: along `dim`, start and stop of each rank's rows, without gaps, for example (0, 3), (3, 6), (6, 7) for 7
            rows.
    """

    whole: torch.Size
    dim: int | None = None
    bounds: tuple[tuple[int, int], ...] = ()

    def of(self, x: Tensor, rank: int) -> Tensor:
        """Returns a rank's piece of the tensor, as a view, or an uncut tensor itself."""
        if self.dim is None:
            return x
        lo, hi = self.bounds[rank]
        return x.narrow(self.dim, lo, hi - lo)

    @functools.cached_property
    def shapes(self) -> list[torch.Size]:
        """Returns the shape of each rank's piece, or only the shape of an uncut whole."""
        return [self.whole] if self.dim is None else _piece_shapes(self.whole, self.dim, self.bounds)

    @functools.cached_property
    def sizes(self) -> list[int]:
        """Returns the number of elements of each rank's piece."""
        return [s.numel() for s in self.shapes]

    @functools.cached_property
    def rows(self) -> list[int]:
        """Returns the number of rows, along `dim`, of each rank's piece, or 1 for an uncut tensor."""
        return [1] if self.dim is None else [hi - lo for lo, hi in self.bounds]

    def by_rank(self, x: Tensor, run: "Stretch") -> Tensor:
        """Returns a run of ranks' part of the tensor, rank by rank: a view [ranks, *shape of a piece]."""
        grid, order, first, num = self._cached_grids.get(run[:2]) or self._make_grid(*run[:2])
        part = x if num == self.whole[order[0]] else x.narrow(order[0], first, num)
        # Views of a single dim as two: no copy is needed, for any strides.
        return part.view(grid) if order[0] == 0 else part.view(grid).permute(order)

    @functools.cached_property
    def _cached_grids(self) -> dict[tuple[int, ...], tuple[tuple[int, ...], tuple[int, ...], int, int]]:
        """Returns the results of `_make_grid`, by argument."""
        return {}

    def _make_grid(self, first: int, num: int) -> tuple[tuple[int, ...], tuple[int, ...], int, int]:
        """Returns, for `by_rank`, the dims with the cut dim as two, their order, and first and number of rows."""
        assert self.dim is not None
        lo, hi = self.bounds[first]
        whole, dim = self.whole, self.dim
        grid = (*whole[:dim], num, hi - lo, *whole[dim + 1 :])
        order = (dim, *(d for d in range(len(grid)) if d != dim))
        self._cached_grids[first, num] = found = grid, order, lo, num * (hi - lo)
        return found

    def from_ranks(self, pieces: Tensor) -> Tensor:
        """Returns the rows of the tensor, from `pieces` [ranks, *shape of a piece]."""
        assert self.dim is not None
        return pieces.movedim(0, self.dim).flatten(self.dim, self.dim + 1)


class Stretch(NamedTuple):
    """Run of neighbouring ranks with pieces of the same shapes. For any number of ranks there are few runs.

    Attributes:
        first: the first rank.
        num: the number of ranks.
        sizes: the number of elements of a rank's piece for each leaf.
    """

    first: int
    num: int
    sizes: tuple[int, ...]


class Spot(NamedTuple):
    """Place of a piece in a rank's part of a message: shape, strides and first element."""

    shape: torch.Size
    strides: tuple[int, ...]
    start: int


class Packing:
    """Packing of leaves into a single message. A value, without tensors.

    Args:
        leaves: the cuts of each leaf, all among the same ranks, or all uncut.

    Example:
        >>> a = Cuts(torch.Size([3, 2]), 0, ((0, 2), (2, 3)))
        >>> packing = Packing([a, Cuts(torch.Size([2]), 0, ((0, 1), (1, 2)))])
        >>> packing.sizes
        [5, 3]
        >>> wholes = [torch.arange(6).view(3, 2), torch.arange(2)]
        >>> packing.lay(wholes)
        tensor([0, 1, 2, 3, 0, 4, 5, 1])
        >>> [x.shape for x in packing.unpack(packing.lay(wholes))]
        [torch.Size([3, 2]), torch.Size([2])]
    """

    def __init__(self, leaves: Sequence[Cuts]) -> None:
        self.leaves = list(leaves)

    @property
    def cut(self) -> bool:
        """Returns whether each rank has pieces, not wholes."""
        return self.leaves[0].dim is not None

    @functools.cached_property
    def sizes(self) -> list[int]:
        """Returns the number of elements of the message in each rank's pieces."""
        columns = [leaf.sizes for leaf in self.leaves]
        return columns[0] if len(columns) == 1 else [sum(column) for column in zip(*columns, strict=True)]

    @functools.cached_property
    def runs(self) -> list[Stretch]:
        """Returns the ranks, as runs, without ranks that hold nothing."""
        runs, first = [], 0
        # Not by sizes: the pieces of a leaf without elements have equal sizes, and may yet differ in shape.
        for _, same in itertools.groupby(zip(*(leaf.rows for leaf in self.leaves), strict=True)):
            count = len(list(same))
            sizes = tuple(leaf.sizes[first] for leaf in self.leaves)
            if sum(sizes):
                runs.append(Stretch(first, count, sizes))
            first += count
        return runs

    def shapes(self, rank: int) -> list[torch.Size]:
        """Returns the shapes of a rank's pieces."""
        return [leaf.shapes[rank] if leaf.dim is not None else leaf.whole for leaf in self.leaves]

    def pack(self, pieces: Sequence[Tensor]) -> Tensor:
        """Returns this rank's part of the message, contiguous. A single piece keeps the shape, without a copy."""
        return pieces[0].contiguous() if len(pieces) == 1 else torch.cat([piece.reshape(-1) for piece in pieces])

    def unpack(self, message: Tensor) -> list[Tensor]:
        """Returns the wholes, made of the pieces of all ranks.

        For a single leaf cut along dim 0 the result is the message itself.
        """
        first = self.leaves[0]
        if len(self.leaves) == 1 and first.dim in (None, 0):
            return [message.view(first.whole)]
        arrived, wholes = list(self._split_by_run(message)), []
        for k, leaf in enumerate(self.leaves):
            assert leaf.dim is not None
            rows = [leaf.from_ranks(pieces[k]) for run, pieces in arrived if run.sizes[k]]
            if len(rows) == 1:
                wholes.append(rows[0].contiguous())
            else:
                wholes.append(torch.cat(rows, leaf.dim) if rows else message.new_empty(leaf.whole))
        return wholes

    def unpack_into(self, message: Tensor, wholes: Sequence[Tensor]) -> None:
        """Writes the pieces of all ranks to their places in the wholes."""
        for run, pieces in self._split_by_run(message):
            for leaf, whole, piece in zip(self.leaves, wholes, pieces, strict=True):
                leaf.by_rank(whole, run).copy_(piece)

    def put(self, message: Tensor, wholes: Sequence[Tensor]) -> None:
        """Runs `unpack_into`, in few ops: for tensors that neither autograd nor a capture sees."""
        if not self._is_grid or not all([x.is_contiguous() for x in wholes]):
            self.unpack_into(message, wholes)
            return
        num = len(self.sizes)
        columns = message.view(num, -1).split_with_sizes([*self.runs[0].sizes], dim=1)
        torch._foreach_copy_([x.view(num, -1) for x in wholes], list(columns))

    def split(self, own: Tensor, rank: int) -> list[Tensor]:
        """Returns a rank's pieces, as views of the rank's contiguous part of a message: by one op each."""
        start = own.storage_offset()
        return [own.as_strided(shape, strides, start + at) for shape, strides, at in self._find_places(rank)]

    def _find_places(self, rank: int) -> "list[Spot]":
        if rank not in self._place_cache:
            shapes = self.shapes(rank)
            starts = itertools.accumulate((s.numel() for s in shapes), initial=0)
            self._place_cache[rank] = [
                Spot(shape, torch.empty(shape, device="meta").stride(), at)
                for shape, at in zip(shapes, starts, strict=False)
            ]
        return self._place_cache[rank]

    @functools.cached_property
    def _place_cache(self) -> "dict[int, list[Spot]]":
        """Returns the results of `_find_places`, by argument."""
        return {}

    @functools.cached_property
    def _is_grid(self) -> bool:
        """Returns whether all leaves are cut along dim 0, into pieces of equal size."""
        alike = len(self.runs) == 1 and self.runs[0].num == len(self.sizes)
        return alike and all(leaf.dim == 0 and leaf.sizes[0] for leaf in self.leaves)

    def lay(self, wholes: Sequence[Tensor]) -> Tensor:
        """Returns wholes as a message, 1-D. A single contiguous whole, cut along dim 0 or uncut, is not copied.

        The result is a separate view in any case, as `is_sole_owner` requires.
        """
        first = self.leaves[0]
        if len(wholes) == 1 and first.dim in (None, 0):
            return wholes[0].contiguous().view(-1)
        if not self.cut:
            return torch.cat([x.reshape(-1) for x in wholes])
        pairs = list(zip(self.leaves, wholes, strict=True))
        grids = [torch.cat([leaf.by_rank(x, run).flatten(1) for leaf, x in pairs], dim=1).view(-1) for run in self.runs]
        return grids[0] if len(grids) == 1 else torch.cat(grids or [wholes[0].new_empty(0)])

    def laid(self, wholes: Sequence[Tensor]) -> Tensor:
        """Lays wholes out with one write an element: for tensors that neither autograd nor a capture sees."""
        if len(wholes) == 1 and self.leaves[0].dim in (None, 0):
            return self.lay(wholes)
        # By `cat`, which makes no view of a place. Tensors that `cat` would copy first are copied to the places
        # instead.
        as_they_are = all([x.is_contiguous() for x in wholes])
        if not self.cut:
            if as_they_are:
                return torch.cat([x.view(-1) for x in wholes])
            out = wholes[0].new_empty(sum(x.numel() for x in wholes))
            places = out.split_with_sizes([x.numel() for x in wholes])
            torch._foreach_copy_([p.view(x.shape) for p, x in zip(places, wholes, strict=True)], list(wholes))
            return out
        if as_they_are and self._is_grid:
            return torch.cat([x.view(len(self.sizes), -1) for x in wholes], dim=1).view(-1)
        out = wholes[0].new_empty(sum(self.sizes))
        for run, pieces in self._split_by_run(out):
            torch._foreach_copy_(pieces, [leaf.by_rank(x, run) for leaf, x in zip(self.leaves, wholes, strict=True)])
        return out

    def _split_by_run(self, message: Tensor) -> Iterator[tuple[Stretch, list[Tensor]]]:
        """Yields, for neighbouring ranks with pieces of equal sizes, the pieces of each leaf [ranks, *shape]."""
        begin = 0
        for run in self.runs:
            width = sum(run.sizes)
            grid = message[begin : begin + run.num * width].view(run.num, width)
            columns = grid.split_with_sizes(list(run.sizes), dim=1)
            shapes = [(run.num, *leaf.shapes[run.first]) for leaf in self.leaves]
            yield run, [c.view(shape) for c, shape in zip(columns, shapes, strict=True)]
            begin += run.num * width


class EvenPacking(Packing):
    """Packing with the pieces of all ranks padded to the first rank's pieces, which are the largest.

    Messages have the shape for the differentiable collectives, [ranks, elements of a rank]. Nothing is written in
    place, and no size depends on the rank, so a packing passes through `vmap`.
    """

    def pack(self, pieces: Sequence[Tensor]) -> Tensor:
        """Returns this rank's part of the message, 1-D."""
        return torch.cat([_pad_piece(leaf, x).reshape(-1) for leaf, x in zip(self.leaves, pieces, strict=True)])

    def unpack(self, message: Tensor) -> list[Tensor]:
        """Returns the whole leaves, from a message of all ranks' pieces [ranks * elements of a rank]."""
        grid = message.reshape(len(self.leaves[0].bounds), -1)
        columns = grid.split([_padded_size(leaf) for leaf in self.leaves], 1)
        pairs = zip(self.leaves, columns, strict=True)
        return [
            torch.cat([_trim_piece(leaf, x, rank) for rank, x in enumerate(column.unbind(0))], leaf.dim or 0)
            for leaf, column in pairs
        ]

    def lay(self, wholes: Sequence[Tensor]) -> Tensor:
        """Returns wholes as a message, [ranks, elements of a rank]."""

        def rows(leaf: Cuts, whole: Tensor) -> Tensor:
            return torch.stack([_pad_piece(leaf, x).reshape(-1) for x in whole.split(leaf.rows, leaf.dim or 0)])

        return torch.cat([rows(leaf, x) for leaf, x in zip(self.leaves, wholes, strict=True)], 1)

    def split(self, own: Tensor, rank: int) -> list[Tensor]:
        """Returns a rank's pieces from the rank's part of a message."""
        columns = own.reshape(-1).split([_padded_size(leaf) for leaf in self.leaves])
        return [_trim_piece(leaf, x, rank) for leaf, x in zip(self.leaves, columns, strict=True)]


def dealt(total: int, size: int) -> list[int]:
    """Returns how many elements each of `size` ranks sums of a message that is wanted whole."""
    return [stop - start for start, stop in (chunk_bounds(total, size, r) for r in range(size))]


@functools.lru_cache(maxsize=1024)
def _piece_shapes(whole: torch.Size, dim: int, bounds: tuple[tuple[int, int], ...]) -> list[torch.Size]:
    return [torch.Size((*whole[:dim], hi - lo, *whole[dim + 1 :])) for lo, hi in bounds]


# Rows of a leaf with the cut dim first, padded to the first rank's rows.


def _row_shape(leaf: Cuts) -> tuple[int, ...]:
    return tuple(n for d, n in enumerate(leaf.whole) if d != leaf.dim)


def _padded_size(leaf: Cuts) -> int:
    return leaf.rows[0] * math.prod(_row_shape(leaf))


def _pad_piece(leaf: Cuts, piece: Tensor) -> Tensor:
    rows = piece.movedim(leaf.dim or 0, 0)
    missing = leaf.rows[0] - rows.shape[0]
    return torch.cat([rows, rows.new_zeros((missing, *rows.shape[1:]))]) if missing else rows


def _trim_piece(leaf: Cuts, flat: Tensor, rank: int) -> Tensor:
    rows = flat.reshape(leaf.rows[0], *_row_shape(leaf))[: leaf.rows[rank]]
    return rows.movedim(0, leaf.dim or 0)
