"""Attention over the tiles left by a mask, by `kernels.block_sparse_attention`.

B samples, T queries, S keys, H query heads, G key heads, K head dim. Child et al., Generating Long Sequences with
Sparse Transformers, 2019, https://arxiv.org/abs/1904.10509
"""

import dataclasses
import functools
import operator

from torch import Tensor

from ._local import Local
from ._masks import Full
from ._online import OnlineScores
from ._rectangles import KERNEL_TILE, TORCH_TILE
from ._ring import online


@dataclasses.dataclass(frozen=True)
class BlockSparse(Local):
    """Kernel over the tiles in which the mask has a pair, for each head. Only such tiles cost time and memory.

    The body takes any mask of positions, and of data `Segments`, `Keys`, `Added`, `Relative` and a single
    `PairDropout`.

    Attributes:
        block: number of queries, and of keys, of a tile. None means the block of the mask's layout, or 64 without a
            layout.
    """

    block: int | None = None

    def __post_init__(self) -> None:
        if self.block is not None and self.block < 1:
            raise ValueError(f"BlockSparse(block={self.block}): a tile has 1 or more tokens.")

    def attend(self, q_BTHK: Tensor, k_BSGK: Tensor, v_BSGK: Tensor, how: OnlineScores, length: int) -> Tensor:
        """Returns the attention of the rank's queries over all keys."""
        del length
        known = functools.reduce(operator.and_, [m for m in how.mask.parts if m.of_positions], Full())
        tile, rows = self.block or known.tile or KERNEL_TILE, (((0, k_BSGK.shape[1]),),)
        return online(None, rows, (q_BTHK, k_BSGK, v_BSGK), how, TORCH_TILE, tile)
