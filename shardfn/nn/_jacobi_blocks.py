"""Mask of noisy and clean blocks in one row, for Jacobi Forcing."""

import dataclasses

import torch
from jaxtyping import Bool, Int64
from torch import Tensor

from shardfn.core import raise_all

from ._masks import Cover, Mask, Span


@dataclasses.dataclass(frozen=True)
class JacobiBlocks(Mask):
    """Pairs of a row [prompt][k_0][l_0][k_1][l_1].. of noisy blocks k and clean blocks l of the same places of a text.

    A token of l_j attends to the prompt and to l_0 .. l_j. A token of k_j attends to the prompt, to the clean blocks
    before its window of blocks, and to the noisy blocks of the window up to k_j: with 2 blocks a window, k_3 attends
    to l_0, l_1, k_2 and k_3. All attend to earlier places and to themselves.

    Attributes:
        prompt: tokens of the prompt.
        block: tokens n of a block.
        window: blocks w of a window.

    Raises:
        ValueError: lists all numbers below 1.

    Example:
        >>> JacobiBlocks(prompt=1, block=1, window=2).pairs((0, 5), (0, 5)).int().tolist()
        [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 0, 1, 0, 0], [1, 1, 0, 1, 0], [1, 0, 1, 0, 1]]
    """

    prompt: int
    block: int
    window: int

    def __post_init__(self) -> None:
        sizes = dataclasses.asdict(self)
        problems = [f"{name} must be at least 1, got {value}" for name, value in sizes.items() if value < 1]
        raise_all(ValueError, "JacobiBlocks:", problems)

    @property
    def looks_back(self) -> bool:
        """Returns True: the blocks of a row are in the order of the text."""
        return True

    def cover(self, queries: Span, keys: Span) -> Cover:
        """Returns "none" for later keys and "all" for keys of the prompt, or else "some"."""
        (a, b), (c, d) = queries, keys
        if a >= b or c >= d or c >= b:
            return "none"
        return "all" if d <= min(a + 1, self.prompt) else "some"

    def pairs(self, queries: Span, keys: Span, device: torch.device | None = None) -> Bool[Tensor, "q k"]:
        """Returns the pairs of a rectangle."""
        (block_Q1, noisy_Q1), (block_K, noisy_K) = (self._find_blocks(x, device) for x in (queries, keys))
        block_Q1, noisy_Q1 = block_Q1[:, None], noisy_Q1[:, None]
        causal_QK = torch.arange(*queries, device=device)[:, None] >= torch.arange(*keys, device=device)
        begin_Q1 = block_Q1.div(self.window, rounding_mode="floor") * self.window
        noisy_QK = torch.where(noisy_K, block_K >= begin_Q1, block_K < begin_Q1)
        return causal_QK & ((block_K < 0) | torch.where(noisy_Q1, noisy_QK, ~noisy_K))

    def find_positions(self, num: int, device: torch.device | None = None) -> Int64[Tensor, " t"]:
        """Returns the position in the text of each of the row's first tokens.

        Args:
            num: number of tokens.
            device: device of the result.

        Example:
            >>> JacobiBlocks(prompt=2, block=2, window=1).find_positions(8).tolist()
            [0, 1, 2, 3, 2, 3, 4, 5]
        """
        at_T = torch.arange(num, device=device)
        behind_T, n = at_T - self.prompt, self.block
        place_T = behind_T.div(2 * n, rounding_mode="floor") * n + behind_T % n
        return torch.where(behind_T < 0, at_T, self.prompt + place_T)

    def _find_blocks(self, span: Span, device: torch.device | None) -> tuple[Int64[Tensor, " t"], Bool[Tensor, " t"]]:
        """Returns the block of each token, below 0 in the prompt, and whether it is noisy."""
        half_T = (torch.arange(*span, device=device) - self.prompt).div(self.block, rounding_mode="floor")
        return half_T.div(2, rounding_mode="floor"), (half_T % 2 == 0) & (half_T >= 0)
