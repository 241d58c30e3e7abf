"""`compressed_psum_scatter`: a sum with compressed traffic, whose blocks the ranks keep.

One phase: rank i compresses the block of every rank j separately and sends the block to rank j. Rank j adds the blocks
in the order of ranks, and keeps the sum in full. With `outer` there are two phases: the blocks of all outer ranks cross
the inner axes first, and the sums cross the outer axes. So a slow link carries each block once, not once an inner rank.
"""

import dataclasses
import math
from collections.abc import Iterator

import torch
from jaxtyping import Float, Float32, Shaped
from torch import Tensor

from shardfn import core

from ._axis_group import axis_group_along, axis_index, block_lengths, count_ranks, current_mesh
from ._compressor import (
    BUCKET,
    Codes,
    Compressor,
    Memory,
    buckets,
    check_leaves,
    identity,
    matched,
    misfit,
    staggered,
    sum_of_rows,
)
from ._message import exchange_rows
from ._residual import Residual, check_compressor, check_dims, check_memory, split_axes


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


def grid_of(op: str, x: Shaped[Tensor, "..."], axis: core.Axes, outer: core.Axes, dim: int) -> Grid:
    """Returns the blocks of `x` along `axis`. `dim` must be in range."""
    mesh = current_mesh()
    named = mesh.axes(axis)
    between, inside = (mesh.axes(a) for a in split_axes(op, axis, outer))
    sizes = tuple(mesh.shape[a] for a in named)
    order = tuple(named.index(a) for a in (*inside, *between))
    num_inner, num_outer = (math.prod(mesh.shape[a] for a in axes) for axes in (inside, between))
    return Grid(x.shape, dim % x.ndim, sizes, order, num_inner, num_outer, int(axis_index(axis)))


def compressed_psum_scatter(
    tree: core.PyTree,
    axis: core.Axes,
    compressor: Compressor,
    state: core.PyTree,
    *,
    dim: int = 0,
    outer: core.Axes = None,
    inner: Compressor | None = None,
    donate: bool = False,
    bucket: int = BUCKET,
) -> tuple[core.PyTree, core.PyTree]:
    """Returns this rank's block, along `dim`, of the sum over the ranks along `axis`, approximately: `V -> V`.

        NCCL: all_to_all.  Slow spec: `sum(rounded blocks).chunk(n, dim)`.  Layout: `A[I]{U_axis} -> A[I_axis]`.

        [A, B] [C, D]  =>  [A' + C'] [B' + D']

    Each block has separate scales. The sum is taken in float32 in the order of ranks, and not compressed again. Through
    `identity()` the result is `psum_scatter`, summed in the order of ranks.

    Not differentiable. See `compressed_pmean`.

    When: gradients cross a slow link to the ranks that update them (ZeRO++'s qgZ: `int4()` on both hops).

    Args:
        tree: floating point tensors of the same shape on all ranks, each with a dim `dim`, computed in float32.
        axis: mesh axes, major to minor, as in `psum_scatter`.
        compressor: compressor of the blocks on the wire. With `outer`, on the wire between the outer ranks.
        state: the result of `compressed_scatter_init` for a tree of these shapes, or the state that the last call
            returned.
        dim: the dim that is cut, as `psum_scatter` cuts it.
        outer: the slow axes among several. Sums are taken along the other axes first.
        inner: with `outer`, the compressor along the other axes, without memory. Default: blocks are sent exactly.
        donate: whether the tensors of `tree` and `state` may be overwritten.
        bucket: elements of a single message, the same on all ranks. The value changes no bits.

    Returns:
        This rank's blocks of the sums, a tree like `tree`, and the new state.

    Raises:
        ValueError: an unknown axis, a leaf without a dim `dim`, a state that does not fit, or an inner compressor with
            a memory.
        TypeError: a compressor is not a `Compressor`, or a leaf is not a floating point tensor.
        NotImplementedError: a leaf is being differentiated or mapped over by torch.func.

    References:
        Wang et al., ZeRO++: Extremely Efficient Collective Communication for Giant Model Training,
        https://arxiv.org/abs/2306.10209, 2023.

    Example:
        >>> from shardfn.collectives import int4
        >>> x = torch.tensor([-1.0, 0.5, 0.25])
        >>> compressed_psum_scatter(x, "dp", int4(), compressed_scatter_init(x, "dp", int4()))[0]
        tensor([-1.0000,  0.5000,  0.2500])
    """
    scatter = _Scatter("compressed_psum_scatter", axis, outer, compressor, inner or identity(), donate)
    leaves, treedef = core.tree_flatten(tree)
    jobs = scatter.make_jobs(leaves, core.tree_paths(tree, "x"), matched(scatter.op, treedef, state), dim)
    with torch.no_grad():
        staggered([scatter.stages(some) for some in buckets(jobs, bucket)])
    return core.tree_unflatten(treedef, [j.out for j in jobs]), core.tree_unflatten(treedef, [j.residual for j in jobs])


def compressed_scatter_init(
    tree: core.PyTree, axis: core.Axes, compressor: Compressor, *, dim: int = 0, outer: core.Axes = None
) -> core.PyTree:
    """Returns the errors before the first call of `compressed_psum_scatter`: zeros.

    Args:
        tree: tensors of the shapes that will be summed. No communication.
        axis: axis of the collective.
        compressor: compressor of the collective.
        dim: dim of the collective.
        outer: outer axes of the collective.

    Returns:
        A tree like `tree` with a `Residual` for each leaf: the worker's error `[1, P c]`, c elements for each rank
        along the compressed axes. There is no server's error, since the sum is kept in full.

    Raises:
        ValueError: an unknown axis, or a leaf without a dim `dim`.
        TypeError: `compressor` is not a `Compressor`.

    Example:
        >>> from shardfn.collectives import error_feedback, sign
        >>> compressed_scatter_init(torch.ones(9), "dp", error_feedback(sign())).worker.shape
        torch.Size([1, 16])
    """
    op = "compressed_scatter_init"
    check_compressor(op, compressor)
    leaves, treedef = core.tree_flatten(tree)
    check_dims(op, leaves, core.tree_paths(tree, "x"), dim)

    def init_leaf(x: Tensor) -> Residual:
        grid = grid_of(op, x, axis, outer, dim)
        like = x.new_empty((grid.outer, grid.columns(compressor.quantum)), dtype=torch.float32)
        memory = compressor.init(like)
        return Residual(memory.view(1, -1) if isinstance(memory, Tensor) else memory, ())

    return core.tree_unflatten(treedef, [init_leaf(x) for x in leaves])


@dataclasses.dataclass
class _ScatteredLeaf:
    """Leaf on its way."""

    x: Tensor
    residual: Residual
    cut: Grid
    out: Tensor


class _Scatter:
    def __init__(
        self, op: str, axis: core.Axes, outer: core.Axes, compressor: Compressor, inner: Compressor, donate: bool
    ) -> None:
        check_compressor(op, compressor)
        check_compressor(op, inner)
        if inner.remembers:
            raise ValueError(f"{op}: inner must have no memory, for which the state has no place, got {inner.name}.")
        axis_group_along(axis)  # raises if it is wrong
        self.op, self.axis, self.outer, self.donate = op, axis, outer, donate
        self.compressor, self.inner = compressor, inner
        between, inside = split_axes(op, axis, outer)
        self.between, self.inside = axis_group_along(between), axis_group_along(inside)

    def make_jobs(
        self, leaves: list[Tensor], paths: list[str], residuals: list[Residual], dim: int
    ) -> list[_ScatteredLeaf]:
        check_leaves(self.op, leaves, paths)
        check_dims(self.op, leaves, paths, dim)
        grids = [grid_of(self.op, x, self.axis, self.outer, dim) for x in leaves]
        problems = [p for path, x, residual, grid in zip(paths, leaves, residuals, grids, strict=True)
                    for p in check_memory(path, x, residual, self._expected_shapes(grid), None)]  # fmt: skip
        core.raise_all(ValueError, misfit(self.op, count_ranks(self.between)), problems)
        rows = zip(leaves, residuals, grids, strict=True)
        return [_ScatteredLeaf(x, residual, grid, x.new_zeros(grid.own_shape)) for x, residual, grid in rows]

    def _expected_shapes(self, grid: Grid) -> tuple[int, int] | None:
        return (1, grid.outer * grid.columns(self.compressor.quantum)) if self.compressor.remembers else None

    def stages(self, jobs: list[_ScatteredLeaf]) -> Iterator[None]:
        """Yields after each hop of a bucket, while a transfer is in flight."""
        # Collective at each stop, as in `_compressed.py`: the same buckets on all ranks, one message of a bucket at a
        # time.
        blocks = [job.cut.blocks(job.x) for job in jobs]
        if self.inside is not None:
            sent = [_compress_rows(self.inner, block.flatten(1), (), donate=self.donate)[0] for block in blocks]
            arrived = exchange_rows(sent, self.inside, name="all_to_all")
            yield
            rows = zip(arrived(), blocks, strict=True)
            blocks = [
                _sum_codes(self.inner, codes, block[0].numel()).view(1, *block.shape[1:]) for codes, block in rows
            ]
        sent = [self._send_rows(job, block[0]) for job, block in zip(jobs, blocks, strict=True)]
        blocks.clear()
        arrived = exchange_rows(sent, self.between, name="all_to_all")
        yield
        for job, codes in zip(jobs, arrived(), strict=True):
            job.out = job.cut.own(_sum_codes(self.compressor, codes, job.cut.m), job.x.dtype)

    def _send_rows(self, job: _ScatteredLeaf, rows: Tensor) -> Codes:
        codes, memory = _compress_rows(self.compressor, rows, job.residual.worker, donate=self.donate)
        job.residual = Residual(memory.view(1, -1) if isinstance(memory, Tensor) else memory, ())
        return codes


def _compress_rows(compressor: Compressor, rows: Tensor, memory: Memory, donate: bool) -> tuple[Codes, Memory]:
    r, c = len(rows), _whole_columns(rows.shape[1], compressor)
    memory = memory.view(r, c) if isinstance(memory, Tensor) else memory
    full = torch.nn.functional.pad(rows, (0, c - rows.shape[1])) if c != rows.shape[1] else rows
    return compressor.compress(full, memory, whole=False, donate=donate)


def _sum_codes(compressor: Compressor, codes: Codes, m: int) -> Tensor:
    return sum_of_rows(compressor, codes, _whole_columns(m, compressor))[0, :m]


def _whole_columns(m: int, compressor: Compressor) -> int:
    return -(-m // compressor.quantum) * compressor.quantum
