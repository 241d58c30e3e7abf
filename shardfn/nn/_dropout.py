"""Dropout whose mask belongs to the sample, not to the batch or the rank: of values, and of pairs in attention.

Srivastava et al., Dropout: A Simple Way to Prevent Neural Networks from Overfitting, 2014,
https://jmlr.org/papers/v15/srivastava14a.html

B samples, H query heads, Q queries, S keys.
"""

import dataclasses
from collections.abc import Sequence

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from shardfn import core
from shardfn.kernels import Dropped, Given

from ._masks import Cover, Full, Mask, Span

# A number of 16 bits decides on an element.
LEVELS = 1 << 16


def dropout(
    key: Int64[Tensor, "2"],
    x: Float[Tensor, "b *rest"],
    rate: float,
    index_B: Int64[Tensor, " b"],
    *,
    rows: tuple[int, int] | None = None,
) -> Float[Tensor, "b *rest"]:
    """Zeroes each element with probability `rate`, and scales the rest by 1 / (1 - rate).

    The mask is a function of (key, sample number, position): the same bits however the samples are dealt to ranks and
    microbatches (for example 7 samples on 3 ranks), and again under remat. A call of the cipher serves four elements
    with 16 bits each: `rate` is rounded to a multiple of 2**-16, and the scale follows the rounded rate, so the mean is
    exact. Inside of `step.evaluate` the function returns `x`.

    Args:
        key: key for the place and step.
        x: input with a sample in each row.
        rate: probability of dropping, in [0, 1).
        index_B: global number of each sample.
        rows: (start, size) where `x` is rows from `start` on of a dim 1 of `size`, such as a rank's tokens of the
            sequence: the mask is the part of the whole mask for these rows. None: `x` is whole.

    Raises:
        ValueError: `rate` is outside [0, 1), or `rows` do not hold `x`.

    Example:
        >>> from shardfn.core import key
        >>> x, index_B = torch.ones(4, 3), torch.arange(4)
        >>> whole = dropout(key(0), x, 0.5, index_B)
        >>> torch.equal(whole[2:], dropout(key(0), x[2:], 0.5, index_B[2:]))
        True
        >>> torch.equal(whole[:, 1:], dropout(key(0), x[:, 1:], 0.5, index_B, rows=(1, 3)))
        True
    """
    if not 0 <= rate < 1:
        raise ValueError(f"dropout: the rate must be in [0, 1), got rate={rate}. At 1 nothing would be left to scale.")
    drop = dropped_levels(rate)
    if drop == 0 or x.numel() == 0:
        return x
    start, size = (0, x.shape[1] if x.ndim > 1 else 1) if rows is None else rows
    if rows is not None and (x.ndim < 2 or not 0 <= start <= start + x.shape[1] <= size):
        raise ValueError(f"dropout: rows={rows} as (start, size) do not hold x of shape {tuple(x.shape)} along dim 1.")
    row = x[0].numel() // max(x.shape[1], 1) if x.ndim > 1 else 1
    lanes = _draw_lanes(key.to(x.device), index_B.to(x.device), size * row, start * row, x[0].numel())
    return torch.where(lanes.reshape(x.shape) >= drop, x * (LEVELS / (LEVELS - drop)), 0.0)


def dropout_of_rows(
    key: Int64[Tensor, "2"],
    x: Float[Tensor, "b t *rest"],
    rate: float,
    index_B: Int64[Tensor, " b"],
    own: Sequence[tuple[int, int]],
    length: int,
) -> Float[Tensor, "b t *rest"]:
    """Applies `dropout` to a rank's tokens, in several stretches of the sequence: the mask is a part of the whole mask.

    Args:
        key: key for the place and step.
        x: input with a sample in each row, and in dim 1 the rank's tokens.
        rate: probability of dropping, in [0, 1).
        index_B: global number of each sample.
        own: range (start, stop) of each stretch, in order, from `shard_rows`.
        length: tokens of the whole sequence.

    Raises:
        ValueError: as `dropout`, or the stretches have another number of tokens than x.

    Example:
        >>> from shardfn.core import key
        >>> x, index_B = torch.ones(1, 4), torch.arange(1)
        >>> whole = dropout(key(0), x, 0.5, index_B)
        >>> ends = dropout_of_rows(key(0), x[:, :2], 0.5, index_B, ((0, 1), (3, 4)), 4)
        >>> torch.equal(ends, whole[:, [0, 3]])
        True
    """
    sizes = [stop - start for start, stop in own]
    if sum(sizes) != x.shape[1]:
        raise ValueError(f"dropout_of_rows: own={tuple(own)} are {sum(sizes)} tokens, but x has {x.shape[1]}.")
    if not own:
        return x
    found = zip(own, x.split(sizes, 1), strict=True)
    parts = [dropout(key, part, rate, index_B, rows=(start, length)) for (start, _), part in found]
    return torch.cat(parts, 1) if len(parts) > 1 else parts[0]


def _draw_lanes(key: Tensor, index_B: Tensor, size: int, start: int, count: int) -> Tensor:
    """Returns [B, count] of [B, size] numbers in [0, 2**16): the four quarters of the cipher's output, in order."""
    quarter = -(-size // 4)
    keys = core.fold_in(key, index_B)[:, None]
    if count >= quarter:  # every counter is wanted
        parts = quarters(keys, torch.arange(quarter, device=key.device))
        return torch.cat(parts, dim=1)[:, start : start + count]
    at = torch.arange(start, start + count, device=key.device)
    parts = torch.stack(quarters(keys, at % quarter), dim=1)
    return parts.gather(1, (at // quarter).expand(len(parts), 1, count))[:, 0]


def dropped_levels(rate: float) -> int:
    """Returns the number of the `LEVELS` values at which an element is dropped: 0 in an evaluation."""
    return 0 if core.is_evaluating() else min(round(rate * LEVELS), LEVELS - 1)


def quarters(keys: Tensor, counter: Tensor) -> list[Tensor]:
    """Returns four numbers in [0, LEVELS) of each counter. The leading dims of the keys broadcast with the counter."""
    hi, lo = core.threefry2x32(keys, counter)
    return [q & (LEVELS - 1) for q in (hi, hi >> 16, lo, lo >> 16)]


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
        key_BH = core.fold_in(core.fold_in(self.key.to(like.device), self.index_B.to(like.device))[:, None], head_H)
        query_Q, four_S = (torch.arange(*span, device=like.device) for span in (queries, (first, last)))
        lanes = torch.stack(quarters(key_BH[:, :, None, None], (query_Q[:, None] << 32) + four_S), -1).flatten(-2)
        keep = lanes[..., keys[0] - 4 * first : keys[1] - 4 * first] >= drop
        return keep.to(like.dtype) * (LEVELS / (LEVELS - drop))

    def make_data(self, queries: Span, keys: Span) -> Given:
        level, first = dropped_levels(self.rate), (self.first_head, queries[0], keys[0])
        numbers = core.fold_in(self.key.to(self.index_B.device), self.index_B)
        return Given(dropped=Dropped(numbers, level, *first) if level else None)
