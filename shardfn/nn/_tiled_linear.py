"""Linear maps with a grid of tiles as the weight, each tile a separate leaf: memory-centric tiling.

Where leaves are fetched at use (ZeRO's stage 3, host, disk), only the tile at work and tiles read ahead are in memory,
in the forward and in the backward, and the same holds for the weight's gradient. Rajbhandari et al., ZeRO-Infinity,
2021, https://arxiv.org/abs/2104.07857

D features in, F features out. A grid is a list of rows of tiles: rows along F, and the tiles of a row along D.
"""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64
from torch import Tensor

from shardfn.core import fold_in, normal

Grid = Sequence[Sequence[Float[Tensor, "_ _"]]]


def tiled_linear(
    x_D: Float[Tensor, "*batch d"], w_FD: Grid, b_F: Float[Tensor, " f"] | None = None
) -> Float[Tensor, "*batch f"]:
    """Returns y = x w^T + b with w in tiles: y_i = b_i + sum_j x_j w_ij^T.

    Equals `linear(x, untile(w), b)` up to the order in which the products along D are added. With a single column of
    tiles also bit for bit, where a matrix product's bits do not depend on the number of outputs F.

    Args:
        x_D: any leading dims.
        w_FD: grid of tiles w_ij of [F_i, D_j], from `tiles` or `init_tiles`. Sizes need not be equal.
        b_F: bias, added once, or None.

    Returns:
        The leading dims of `x_D` and F.

    Raises:
        ValueError: the tiles are not a grid, or the columns do not add up to D, or the rows to F of the bias.

    Example:
        >>> import torch
        >>> w = torch.arange(12.0).view(3, 4)
        >>> x = torch.ones(2, 4)
        >>> torch.equal(tiled_linear(x, tiles(w, in_splits=2, out_splits=2)), x @ w.t())
        True
    """
    rows, columns = _grid_sizes(w_FD)
    if x_D.shape[-1] != sum(columns):
        raise ValueError(f"tiled_linear: x has {x_D.shape[-1]} features, the tiles' columns are {columns}.")
    if b_F is not None and b_F.shape[0] != sum(rows):
        raise ValueError(f"tiled_linear: the bias has {b_F.shape[0]} features, the tiles' rows are {rows}.")
    # Contiguous here, once: the products of all rows of tiles then save the same parts of x.
    parts = [x_D] if len(columns) == 1 else [part.contiguous() for part in x_D.split(columns, -1)]
    biases = [None] * len(rows) if b_F is None else b_F.split(rows)
    outs = [_multiply_row(parts, row, b) for row, b in zip(w_FD, biases, strict=True)]
    return outs[0] if len(outs) == 1 else torch.cat(outs, -1)


def tiles(
    w_FD: Float[Tensor, "f d"], *, in_splits: int = 1, out_splits: int = 1, tile_bytes: int | None = None
) -> list[list[Tensor]]:
    """Cuts a weight into a grid of tiles of the shapes from `tile_shapes`.

    Args:
        w_FD: the weight.
        in_splits: tiles along D.
        out_splits: tiles along F.
        tile_bytes: tile bytes in place of both: the largest tile.

    Returns:
        Tiles in new memory, together as large as the weight.

    Raises:
        ValueError: as `tile_shapes`.

    Example:
        >>> import torch
        >>> [[t.tolist() for t in row] for row in tiles(torch.arange(6.0).view(2, 3), in_splits=2)]
        [[[[0.0, 1.0], [3.0, 4.0]], [[2.0], [5.0]]]]
    """
    shape, itemsize = (w_FD.shape[0], w_FD.shape[1]), w_FD.itemsize
    grid = tile_shapes(shape, in_splits=in_splits, out_splits=out_splits, tile_bytes=tile_bytes, itemsize=itemsize)
    rows = w_FD.split([row[0][0] for row in grid])
    return [[t.contiguous().clone() for t in row.split([d for _, d in grid[0]], 1)] for row in rows]


def untile(w_FD: Grid) -> Float[Tensor, "f d"]:
    """Returns the weight made of a grid of tiles.

    Example:
        >>> import torch
        >>> untile(tiles(torch.arange(6.0).view(2, 3), in_splits=2, out_splits=2)).tolist()
        [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
    """
    _grid_sizes(w_FD)
    return torch.cat([torch.cat(list(row), 1) for row in w_FD])


def init_tiles(
    key: Int64[Tensor, "2"],
    shape: tuple[int, int],
    *,
    in_splits: int = 1,
    out_splits: int = 1,
    tile_bytes: int | None = None,
    stddev: float = 1.0,
    dtype: torch.dtype = torch.float32,
) -> list[list[Tensor]]:
    """Draws the tiles of a weight, normal(0, stddev), each with a separate key. Deferred inside of `core.deferred()`.

    Args:
        key: random key. Tile k, counted row by row, is drawn with `fold_in(key, k)`.
        shape: [F, D] of the weight.
        in_splits: tiles along D.
        out_splits: tiles along F.
        tile_bytes: tile bytes in place of both: the largest tile.
        stddev: standard deviation.
        dtype: a floating dtype.

    Returns:
        The grid. Specs need no grid: `P()` for all tiles is a prefix of the grid.

    Raises:
        ValueError: as `tile_shapes`.

    Example:
        >>> from shardfn.core import key
        >>> [[tuple(t.shape) for t in row] for row in init_tiles(key(0), (5, 4), out_splits=2)]
        [[(3, 4)], [(2, 4)]]
    """
    grid = tile_shapes(
        shape, in_splits=in_splits, out_splits=out_splits, tile_bytes=tile_bytes, itemsize=dtype.itemsize
    )
    numbered = enumerate(size for row in grid for size in row)
    drawn = iter([normal(fold_in(key, k), size, stddev=stddev, dtype=dtype) for k, size in numbered])
    return [[next(drawn) for _ in row] for row in grid]


def tile_shapes(
    shape: tuple[int, int],
    *,
    in_splits: int = 1,
    out_splits: int = 1,
    tile_bytes: int | None = None,
    itemsize: int = 4,
) -> list[list[tuple[int, int]]]:
    """Returns the shapes of the tiles of a weight. Sizes along a dim differ by at most 1, such as 3, 2, 2 for 7 rows.

    Args:
        shape: [F, D] of the weight.
        in_splits: tiles along D.
        out_splits: tiles along F.
        tile_bytes: size of a tile in bytes, in place of both numbers: the fewest tiles of at most the size. Whole rows
            where a row fits.
        itemsize: bytes of an element.

    Raises:
        ValueError: more tiles than features, no tiles, `tile_bytes` below an element, or both options at once.

    Example:
        >>> tile_shapes((5, 4), in_splits=2, out_splits=2)
        [[(3, 2), (3, 2)], [(2, 2), (2, 2)]]
        >>> tile_shapes((5, 4), tile_bytes=32)
        [[(2, 4)], [(2, 4)], [(1, 4)]]
    """
    if tile_bytes is not None:
        if (in_splits, out_splits) != (1, 1):
            raise ValueError("tiles: give tile_bytes, or in_splits and out_splits, not both.")
        in_splits, out_splits = _choose_splits(shape, tile_bytes // itemsize)
    for name, n, size in (("in_splits", in_splits, shape[1]), ("out_splits", out_splits, shape[0])):
        if not 1 <= n <= max(size, 1):
            raise ValueError(f"tiles: {name} must be between 1 and {size}, the number of features, got {n}.")
    columns = _split_evenly(shape[1], in_splits)
    return [[(f, d) for d in columns] for f in _split_evenly(shape[0], out_splits)]


def _multiply_row(parts: Sequence[Tensor], row: Sequence[Tensor], bias: Tensor | None) -> Tensor:
    """Multiplies a row of tiles: the products along D, added in order."""
    out = F.linear(parts[0], row[0], bias)
    for part, tile in zip(parts[1:], row[1:], strict=True):
        out = out + F.linear(part, tile)
    return out


def _grid_sizes(grid: Grid) -> tuple[list[int], list[int]]:
    """Returns the numbers of rows and columns of the tiles."""
    shapes = [[tuple(t.shape) for t in row] for row in grid]
    if not shapes or not shapes[0]:
        raise ValueError("tiled_linear: there are no tiles.")
    rows, columns = [row[0][0] if row else 0 for row in shapes], [d for _, d in shapes[0]]
    wrong = [
        f"tile [{i}][{j}] is {size}, expected {(f, d)}"
        for i, (f, row) in enumerate(zip(rows, shapes, strict=True))
        for j, (size, d) in enumerate(zip(row, columns, strict=False))
        if size != (f, d)
    ]
    wrong += [
        f"row {i} has {len(r)} tiles, row 0 {len(columns)}" for i, r in enumerate(shapes) if len(r) != len(columns)
    ]
    if wrong:
        raise ValueError(f"tiled_linear: the tiles must form a grid: {'; '.join(wrong)}.")
    return rows, columns


def _choose_splits(shape: tuple[int, int], numel: int) -> tuple[int, int]:
    """Returns the fewest tiles of at most `numel` elements, along D and along F."""
    if numel < 1:
        raise ValueError("tiles: tile_bytes is less than one element.")
    rows = numel // max(shape[1], 1)
    return (1, math.ceil(shape[0] / rows) or 1) if rows else (math.ceil(shape[1] / numel), shape[0])


def _split_evenly(size: int, n: int) -> list[int]:
    return [size // n + (i < size % n) for i in range(n)]
