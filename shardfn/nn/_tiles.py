"""Tiles of a grid left by a mask of positions, as lists for kernels.

The lists are computed once for each mask and length: masks are values, and another layout is another value.
"""

import functools
from typing import NamedTuple

import numpy as np
import torch

from shardfn._torch import DisableFuncTorch, disable_current_modes
from shardfn.kernels import Tiles

from ._masks import NONE, SOME, Array, Mask, Span


class HostTiles(NamedTuple):
    """`kernels.Tiles` as arrays."""

    starts: Array
    columns: Array
    kinds: Array
    patterns: Array

    def on(self, device: torch.device) -> Tiles:
        """Returns the tiles as tensors of a device."""
        return Tiles(*(torch.from_numpy(x).to(device) for x in self))


@functools.lru_cache(maxsize=256)
def tiles_of(mask: Mask, queries: Span, keys: Span, block: int) -> HostTiles:
    """Returns the tiles of `block` queries and keys of a rectangle with a counted pair.

    Args:
        mask: mask of only positions.
        queries: positions.
        keys: positions.
        block: block of a tile.

    Example:
        >>> from shardfn.nn import Causal
        >>> found = tiles_of(Causal(), (0, 4), (0, 4), 2)
        >>> found.columns.tolist(), found.kinds.tolist(), found.patterns.tolist()
        ([0, 0, 1], [0, -1, 0], [[[1, 0], [1, 1]]])
    """
    rows, columns = (np.append(np.arange(*span, block), span[1]) for span in (queries, keys))
    grid = mask.grid(rows, columns)
    kinds, found = np.full(grid.shape, -1, np.int32), dict[bytes, int]()
    own = [mask.of_heads(i, i + 1) for i in range(len(grid))] if len(grid) > 1 else [mask]
    for layout, i, j in np.argwhere(grid == SOME).tolist():
        (a, b), (c, d) = rows[i : i + 2].tolist(), columns[j : j + 2].tolist()
        pattern = np.zeros((block, block), np.uint8)
        with DisableFuncTorch(), disable_current_modes():  # part of a program, and not computed in the program
            pattern[: b - a, : d - c] = own[layout].pairs((a, b), (c, d)).numpy().reshape(b - a, d - c)
        if not pattern.any():
            grid[layout, i, j] = NONE
        elif not pattern[: b - a, : d - c].all():
            kinds[layout, i, j] = found.setdefault(pattern.tobytes(), len(found))
    on = grid != NONE
    ends = on.sum(-1).cumsum().reshape(on.shape[:2])
    starts = np.concatenate([ends[:, :1] - on[:, :1].sum(-1), ends], 1).astype(np.int32)
    patterns = np.frombuffer(b"".join(found), np.uint8).reshape(-1, block, block).copy()
    return HostTiles(starts, np.nonzero(on)[2].astype(np.int32), kinds[on], patterns)
