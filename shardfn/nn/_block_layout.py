"""Layouts of blocks as masks: each block of queries attends to some blocks of keys.

H query heads, N blocks.
"""

import dataclasses
import functools
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ._masks import ALL, SOME, Array, Cover, Mask, Span, alike, size_of


@dataclasses.dataclass(frozen=True, eq=False)
class BlockLayout(Mask):
    """Blocks of `block` queries and `block` keys with attention, a layout for all heads or a layout for each head.

    Inside a counted block every pair counts: for a causal model, `Causal() & BlockLayout(...)`.

    Attributes:
        blocks: counted blocks, bool, [N, N], or [H, N, N] with 1 head for all. Rows are blocks of queries. Kept as a
            read-only NumPy array.
        block: tokens of a block.
        padded: the last block may be shorter.
        allow_empty: whether rows may have no block. Queries of such rows attend to nothing and give 0.

    Raises:
        ValueError: another shape, or a row without a block.

    Example:
        >>> BlockLayout([[1, 0], [1, 1]], block=2).count((0, 4), (0, 4))
        12
    """

    blocks: Any
    block: int
    padded: bool = False
    allow_empty: bool = False

    def __post_init__(self) -> None:
        given = self.blocks.numpy(force=True) if isinstance(self.blocks, Tensor) else self.blocks
        blocks = np.array(given, dtype=bool)  # a copy
        blocks.flags.writeable = False
        object.__setattr__(self, "blocks", blocks)
        if blocks.ndim not in (2, 3) or blocks.shape[-1] != blocks.shape[-2] or self.block < 1:
            raise ValueError(
                f"BlockLayout must have the shape [N, N] or [H, N, N] and a block >= 1, got {blocks.shape} and"
                f" block={self.block}."
            )
        if blocks.shape[0] == 1 and blocks.ndim == 3:
            object.__setattr__(self, "blocks", blocks[0])
        empty = np.argwhere(~blocks.any(-1))
        if len(empty) and not self.allow_empty:
            raise ValueError(
                "BlockLayout: each row of blocks needs at least one block, for example the block on the diagonal, but"
                f" {len(empty)} rows are without one, the first at {tuple(map(int, empty[0]))}. Or pass"
                " allow_empty=True."
            )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BlockLayout) and self._identity_key == other._identity_key

    def __hash__(self) -> int:
        return hash(self._identity_key)

    @functools.cached_property
    def _identity_key(self) -> tuple[Any, ...]:
        return self.blocks.shape, np.packbits(self.blocks).tobytes(), self.block, self.padded, self.allow_empty

    @property
    def lead(self) -> tuple[int, int]:
        return 1, self.blocks.shape[0] if self.blocks.ndim == 3 else 1

    def of_heads(self, start: int, stop: int) -> Mask:
        return self if self.blocks.ndim == 2 else dataclasses.replace(self, blocks=self.blocks[start:stop])

    def cover(self, queries: Span, keys: Span) -> Cover:
        if not size_of(queries) * size_of(keys):
            return "none"
        (a, b), (c, d) = ((start // self.block, -(-stop // self.block)) for start, stop in (queries, keys))
        part = self.blocks[..., a:b, c:d]
        return "all" if part.all() else "some" if part.any() else "none"

    @property
    def tile(self) -> int:
        return self.block

    def grid(self, queries: Array, keys: Array) -> Array:
        blocks = self.blocks.reshape(-1, *self.blocks.shape[-2:])
        sums = np.pad(blocks.astype(np.int32), ((0, 0), (1, 0), (1, 0))).cumsum(-1).cumsum(-2)
        (a, b), (c, d) = ((x[:-1] // self.block, -(-x[1:] // self.block)) for x in (queries, keys))
        a, b = a[:, None], b[:, None]
        found = sums[:, b, d] - sums[:, a, d] - sums[:, b, c] + sums[:, a, c]
        return np.where(found == (b - a) * (d - c), ALL, np.minimum(found, SOME)).astype(np.int8)

    def pairs(self, queries: Span, keys: Span, device: torch.device | None = None) -> Tensor:
        rows, columns = (np.arange(*span) // self.block for span in (queries, keys))
        return torch.from_numpy(self.blocks[..., rows[:, None], columns]).to(device)

    def problems(self, queries: int, keys: int, heads: int) -> list[str]:
        num, out = self.blocks.shape[-1], alike(self, queries, keys)
        if queries == keys and (-(-queries // self.block) != num or (queries % self.block and not self.padded)):
            out.append(
                f"BlockLayout of {num} blocks of {self.block} for {queries} tokens: make a layout for"
                f" {-(-queries // self.block)} blocks"
                + (", and pass padded=True, as the last is shorter" if queries % self.block else "")
            )
        if self.lead[1] not in (1, heads):
            out.append(f"BlockLayout for {self.lead[1]} heads, but there are {heads}")
        return out

    def __repr__(self) -> str:
        return f"BlockLayout(shape={self.blocks.shape}, block={self.block})"
