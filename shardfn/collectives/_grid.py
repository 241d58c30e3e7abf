"""How a dim of a tensor becomes the blocks of ranks, ordered for two hops."""

import dataclasses
import math

import torch
from jaxtyping import Float, Float32, Shaped
from torch import Tensor

from shardfn.core import Axes

from ._axis_group import block_lengths
from ._env import axis_index, current_mesh
from ._residual import split_axes


@dataclasses.dataclass(frozen=True)
class Grid:
    """Tensor as blocks, a block for each rank.

    Attributes:
        shape: shape of the tensor.
        dim: the dim that is cut.
        sizes: sizes of the axes that cut the dim, major to minor.
        order: the places in `sizes` of the inner axes, then of the outer axes.
        inner: ranks along the inner axes.
        outer: ranks along the outer axes.
        index: index of this rank among all.
    """

    shape: torch.Size
    dim: int
    sizes: tuple[int, ...]
    order: tuple[int, ...]
    inner: int
    outer: int
    index: int

    @property
    def n(self) -> int:
        """Returns the number of elements of the tensor."""
        return self.shape.numel()

    @property
    def lengths(self) -> tuple[int, ...]:
        """Returns the number of rows of each rank's block."""
        return block_lengths(self.shape[self.dim], self.sizes)

    @property
    def own_shape(self) -> torch.Size:
        """Returns the shape of this rank's block."""
        return torch.Size([*self.shape[: self.dim], self.lengths[self.index], *self.shape[self.dim + 1 :]])

    @property
    def m(self) -> int:
        """Returns the number of elements of a block, padded to the longest."""
        return self.lengths[0] * (self.n // max(self.shape[self.dim], 1))

    def columns(self, quantum: int) -> int:
        """Returns the number of elements of a block, rounded up to a compressor's quantum."""
        return -(-self.m // quantum) * quantum

    def blocks(self, x: Float[Tensor, "..."]) -> Float32[Tensor, "inner outer m"]:
        """Returns all blocks, by inner rank and then by outer rank."""
        rows = x.movedim(self.dim, 0).float()
        pieces = rows.split(self.lengths)
        longest = self.lengths[0]
        if any(len(piece) != longest for piece in pieces):
            rows = torch.cat([piece if len(piece) == longest else _pad_rows(piece, longest) for piece in pieces])
        grid = rows.reshape(*self.sizes, self.m)
        return grid.permute(*self.order, len(self.sizes)).reshape(self.inner, self.outer, self.m).contiguous()

    def own(self, block: Float32[Tensor, " m"], dtype: torch.dtype) -> Float[Tensor, "..."]:
        """Returns this rank's block as a tensor."""
        rest = [size for i, size in enumerate(self.shape) if i != self.dim]
        rows = block.view(self.lengths[0], *rest)[: self.lengths[self.index]]
        return rows.movedim(0, self.dim).to(dtype).contiguous()


def _pad_rows(piece: Shaped[Tensor, "rows ..."], rows: int) -> Shaped[Tensor, "longer ..."]:
    return torch.cat([piece, piece.new_zeros((rows - len(piece), *piece.shape[1:]))])


def grid_of(op: str, x: Shaped[Tensor, "..."], axis: Axes, outer: Axes, dim: int) -> Grid:
    """Returns the blocks of `x` along `axis`. `dim` must be in range."""
    mesh = current_mesh()
    named = mesh.axes(axis)
    between, inside = (mesh.axes(a) for a in split_axes(op, axis, outer))
    sizes = tuple(mesh.shape[a] for a in named)
    order = tuple(named.index(a) for a in (*inside, *between))
    num_inner, num_outer = (math.prod(mesh.shape[a] for a in axes) for axes in (inside, between))
    return Grid(x.shape, dim % x.ndim, sizes, order, num_inner, num_outer, int(axis_index(axis)))
