"""Dropout of attention: the mask belongs to a sample, a head, a query and a key, and not to a batch or a rank.

B samples, H query heads, Q queries, S keys. Srivastava et al., Dropout: A Simple Way to Prevent Neural Networks from
Overfitting, 2014, https://jmlr.org/papers/v15/srivastava14a.html
"""

import dataclasses
from collections.abc import Sequence

import torch
from jaxtyping import Int64
from torch import Tensor

from shardfn.core import fold_in
from shardfn.kernels import Dropped, Given

from ._dropout import LEVELS, dropped_levels, quarters
from ._masks import Cover, Full, Mask, Span


@dataclasses.dataclass(frozen=True, eq=False)
class PairDropout(Mask):
    """Zeroes each probability of attention with probability `rate`, and scales the rest by 1 / (1 - rate).

        y = (keep p / (1 - rate)) v,   p = softmax(scores)

    Every pair counts in the softmax, and probabilities are dropped after the softmax. `keep` is a function of (key,
    sample number, query head, query, key), so the bits are the same for any body, block, number of ranks and
    microbatches, and when the backward makes `keep` again. `rate` is rounded to a multiple of 2**-16, and the scale
    follows the rounded rate. Inside of `step.evaluate` nothing is dropped.

    `Dense()` has the probabilities in memory whole, [B, H, T, S]. The kernels of `BlockSparse()` and `Blockwise()` draw
    a tile's numbers during the computation of the tile. With several such masks at once `BlockSparse()` raises, and the
    other bodies use torch's products.

    Attributes:
        key: key for the place and step.
        rate: probability of dropping, in [0, 1).
        index_B: global number of each sample.
        first_head: number of the first query head here among the heads of the whole layer.

    Raises:
        ValueError: `rate` is outside [0, 1).

    Example:
        >>> from shardfn.core import key
        >>> from shardfn import nn
        >>> q = torch.randn(2, 5, 4, 8)
        >>> mask = nn.Causal() & PairDropout(key(0), 0.1, torch.arange(2))
        >>> y = nn.attention(q, q, q, mask=mask)
        >>> torch.allclose(nn.attention(q, q, q, mask=mask, impl=nn.Blockwise(3)), y, atol=1e-6)
        True
    """

    key: Int64[Tensor, "2"]
    rate: float
    index_B: Int64[Tensor, " b"]
    first_head: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.rate < 1:
            raise ValueError(
                f"PairDropout: the rate must be in [0, 1), got rate={self.rate}. At 1 nothing would be left."
            )

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.key, self.index_B

    def with_tensors(self, tensors: Sequence[Tensor]) -> Mask:
        key, index_B = tensors
        return dataclasses.replace(self, key=key, index_B=index_B)

    def of_heads(self, start: int, stop: int) -> Mask:
        del stop
        return dataclasses.replace(self, first_head=self.first_head + start)

    def cover(self, queries: Span, keys: Span) -> Cover:
        return Full().cover(queries, keys)

    def pairs(self, queries: Span, keys: Span, device: torch.device | None = None) -> Tensor:
        return Full().pairs(queries, keys, device)

    def scales(self, queries: Span, keys: Span, heads: int, like: Tensor) -> Tensor | None:
        drop = dropped_levels(self.rate)
        if not drop:
            return None
        # A call of the cipher serves the keys 4 i .. 4 i + 3 of a query, so a tile's first may be inside a call.
        first, last = keys[0] // 4, max(-(-keys[1] // 4), keys[0] // 4)
        head_H = torch.arange(self.first_head, self.first_head + heads, device=like.device)
        key_BH = fold_in(fold_in(self.key.to(like.device), self.index_B.to(like.device))[:, None], head_H)
        query_Q, four_S = (torch.arange(*span, device=like.device) for span in (queries, (first, last)))
        lanes = torch.stack(quarters(key_BH[:, :, None, None], (query_Q[:, None] << 32) + four_S), -1).flatten(-2)
        keep = lanes[..., keys[0] - 4 * first : keys[1] - 4 * first] >= drop
        return keep.to(like.dtype) * (LEVELS / (LEVELS - drop))

    def make_data(self, queries: Span, keys: Span) -> Given:
        level, first = dropped_levels(self.rate), (self.first_head, queries[0], keys[0])
        numbers = fold_in(self.key.to(self.index_B.device), self.index_B)
        return Given(dropped=Dropped(numbers, level, *first) if level else None)
