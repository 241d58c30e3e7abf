"""Applies a function of whole matrices to leaves that are cut: one rank, the owner, computes each matrix.

    blocks of matrices --all_to_all--> whole matrices --f--> whole matrices --all_to_all--> blocks

A rank sends each block once and receives each block once. Dims that count matrices may be cut over other axes. Ranks
along these axes have different matrices, and send each other nothing.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from shardfn.collectives import all_to_all, current_mesh
from shardfn.core import P, block_slices

from ._leaves import wide

OnMatrix = Callable[[Tensor], Tensor]


class Matrices(NamedTuple):
    """Division of a leaf into matrices.

    Attributes:
        shape: shape of the whole leaf.
        rows: dims that form the rows of a matrix.
        columns: dims that form the columns. All other dims count matrices. For example, a leaf [8, 64, 32] with rows
            (1,) and columns (2,) has 8 matrices.
    """

    shape: tuple[int, ...]
    rows: tuple[int, ...]
    columns: tuple[int, ...]

    @property
    def inner(self) -> tuple[int, ...]:
        """Returns the dims of one matrix."""
        return (*self.rows, *self.columns)

    @property
    def order(self) -> tuple[int, ...]:
        """Returns all dims, beginning with the dims that count matrices."""
        return (*(d for d in range(len(self.shape)) if d not in self.inner), *self.inner)

    @property
    def size(self) -> tuple[int, int]:
        """Returns the numbers of rows and columns of a matrix."""
        return math.prod(self.shape[d] for d in self.rows), math.prod(self.shape[d] for d in self.columns)


def on_whole_matrices(
    f: OnMatrix, blocks: Sequence[Tensor], leaves: Sequence[Matrices], specs: Sequence[P]
) -> list[Tensor]:
    """Applies `f` to each matrix of each leaf. Collective over the axes that cut rows or columns.

    Args:
        f: function from a matrix [rows, columns] to a matrix of the same shape.
        blocks: this rank's block of each leaf.
        leaves: division of each leaf into matrices.
        specs: spec of each leaf.

    Returns:
        This rank's block of each result, in the dtype of the leaf.
    """
    mesh = current_mesh()
    cuts = [_MatrixCut(leaf, spec, mesh.shape) for leaf, spec in zip(leaves, specs, strict=True)]
    lines: dict[tuple[tuple[str, ...], torch.dtype], list[int]] = {}
    for i, (cut, x) in enumerate(zip(cuts, blocks, strict=True)):
        if math.prod(cut.leaf.shape):
            lines.setdefault((cut.axes, wide(x).dtype), []).append(i)
    out = list(blocks)
    for (axes, _), index in lines.items():
        units = [(cuts[i], wide(m)) for i in index for m in _split_matrices(blocks[i], cuts[i].leaf)]
        found = iter(_exchange_blocks(f, units, axes) if axes else [cut.apply(f, x) for cut, x in units])
        for i in index:
            out[i] = _join_leaf(found, blocks[i], cuts[i].leaf)
    return out


@dataclass(frozen=True)
class _MatrixCut:
    """Cut of each matrix of a leaf over a line of ranks.

    Attributes:
        leaf: the leaf.
        spec: spec of the whole leaf.
        sizes: sizes of the mesh axes.
    """

    leaf: Matrices
    spec: P
    sizes: Mapping[str, int]

    @property
    def axes(self) -> tuple[str, ...]:
        """Returns the axes that cut rows or columns, in the order of the mesh."""
        own = {a for d in self.leaf.inner for a in self.spec.dim_axes(d)}
        return tuple(a for a, n in self.sizes.items() if a in own and n > 1)

    def coords(self, rank: int) -> dict[str, int]:
        """Returns the place of a rank of the line."""
        out = {}
        for axis in reversed(self.axes):
            rank, out[axis] = divmod(rank, self.sizes[axis])
        return out

    def box(self, rank: int) -> tuple[slice, ...]:
        """Returns the block of a matrix that a rank of the line has."""
        cuts = block_slices(self.leaf.shape, self.spec, self.sizes, self.coords(rank))
        return tuple(cuts[d] for d in self.leaf.inner)

    def block_shape(self, rank: int) -> tuple[int, ...]:
        """Returns the shape of a rank's block. The first rank's block is the largest."""
        return tuple(s.stop - s.start for s in self.box(rank))

    def joined(self, blocks: Sequence[Tensor]) -> Tensor:
        """Joins a matrix from the blocks, in the order of the line."""
        axes = [[a for a in self.spec.dim_axes(d) if self.sizes.get(a, 1) > 1] for d in self.leaf.inner]
        at = [self.coords(k) for k in range(len(blocks))]
        order = sorted(range(len(blocks)), key=lambda k: [[at[k][a] for a in own] for own in axes])
        parts = [blocks[k] for k in order]
        for d in reversed(range(len(axes))):
            num = math.prod(self.sizes[a] for a in axes[d])
            parts = [torch.cat(parts[k : k + num], d) for k in range(0, len(parts), num)]
        return parts[0]

    def apply(self, f: OnMatrix, whole: Tensor) -> Tensor:
        """Applies `f` to a whole matrix with the dims of the leaf."""
        return f(whole.reshape(self.leaf.size)).to(whole.dtype).reshape(whole.shape)


def _split_matrices(block: Tensor, leaf: Matrices) -> Sequence[Tensor]:
    """Returns the matrices of a leaf, or this rank's blocks of matrices, each with the dims of one matrix."""
    x = block.permute(leaf.order)
    num = x.ndim - len(leaf.inner)
    return x.reshape(math.prod(x.shape[:num]), *x.shape[num:]).unbind(0)


def _join_leaf(found: Iterator[Tensor], like: Tensor, leaf: Matrices) -> Tensor:
    """Joins a leaf from the next matrices of `found`."""
    x = like.permute(leaf.order)
    num = math.prod(x.shape[: x.ndim - len(leaf.inner)])
    if not num:
        return like
    back = sorted(range(x.ndim), key=lambda d: leaf.order[d])
    return torch.stack([next(found) for _ in range(num)]).reshape(x.shape).permute(back).to(like.dtype)


def _exchange_blocks(f: OnMatrix, units: Sequence[tuple[_MatrixCut, Tensor]], axes: tuple[str, ...]) -> list[Tensor]:
    """Returns this rank's blocks of the results, from this rank's blocks of the matrices."""
    if not units:
        return []
    mesh = current_mesh()
    n, mine = mesh.axis_size(axes), mesh.axis_index(axes)
    rooms = [math.prod(cut.block_shape(0)) for cut, _ in units]
    owned = _assign_owners([math.prod(cut.leaf.size) * min(cut.leaf.size) for cut, _ in units], n)
    width = max(sum(rooms[k] for k in own) for own in owned)
    like = units[0][1].reshape(-1)
    sent = [_pack_row([units[k][1] for k in own], [rooms[k] for k in own], width, like) for own in owned]
    got = all_to_all(torch.stack(sent), axes, split_dim=0, concat_dim=0)
    here, at = list[tuple[_MatrixCut, Tensor]](), 0
    for k in owned[mine]:
        cut = units[k][0]
        blocks = [_unpack_block(got[j], at, cut.block_shape(j)) for j in range(n)]
        here.append((cut, cut.apply(f, cut.joined(blocks))))
        at += rooms[k]
    mine_rooms = [rooms[k] for k in owned[mine]]
    # Every row depends on the first exchange, so that a rank without matrices takes part in the transpose, too.
    back = [_pack_row([x[cut.box(j)] for cut, x in here], mine_rooms, width, got[j]) for j in range(n)]
    done = all_to_all(torch.stack(back), axes, split_dim=0, concat_dim=0)
    out: dict[int, Tensor] = {}
    for row, own in zip(done, owned, strict=True):
        at = 0
        for k in own:
            out[k] = _unpack_block(row, at, tuple(units[k][1].shape))
            at += rooms[k]
    return [out[k] for k in range(len(units))]


def _assign_owners(costs: Sequence[int], num: int) -> list[list[int]]:
    """Returns the matrices of each owner, assigned from the largest on to the owner with the least cost."""
    owned, load = [list[int]() for _ in range(num)], [0] * num
    for k in sorted(range(len(costs)), key=lambda k: -costs[k]):
        owner = load.index(min(load))
        owned[owner].append(k)
        load[owner] += costs[k]
    return owned


def _pack_row(blocks: Sequence[Tensor], rooms: Sequence[int], width: int, like: Tensor) -> Tensor:
    """Packs flat blocks, each padded to the block's room, into a row padded to a width."""
    parts = [like[:0]]
    for x, room in zip(blocks, rooms, strict=True):
        parts += [x.reshape(-1), like.new_zeros(room - x.numel())]
    return torch.cat([*parts, like.new_zeros(width - sum(rooms))])


def _unpack_block(row: Tensor, at: int, shape: tuple[int, ...]) -> Tensor:
    return row[at : at + math.prod(shape)].reshape(shape)
