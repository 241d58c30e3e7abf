"""Backends of attention as values: on a single device, and on ranks with some tokens of a sequence each.

    Dense()                                 torch's kernel
    BatchInvariant()                        batch-invariant: tokens have the same bits next to any other tokens
    Blockwise(block)                        a tile of scores at a time
    BlockSparse(block)                      a kernel over the tiles left by the mask
    Ulysses(axis, length, inner)            tokens of some heads: heads are dealt to ranks and back by `all_to_all`
    Ring(axis, length, zigzag)              keys and values go round
    Chunked(chunk, axis, length)            as Ulysses, and keys and values wait on the host or on disk
    Ulysses("u", T, inner=Ring("r"))        both: the tokens are cut by r, and then by u

All of them compute the same. A sequence of `length` tokens is cut as `torch.chunk` cuts it, by `axes` from major to
minor. Any length will do, for example 7 tokens on 3 ranks. With `zigzag` the tokens are put in `sequence_order` before
the cut: each rank then has a stretch from the front and a stretch from the back, and under a causal mask an equal
number of pairs.

B samples, T queries, S keys, H query heads, G key heads, R = H / G, K head dim, P ranks. Jacobs et al., DeepSpeed
Ulysses, 2023, https://arxiv.org/abs/2309.14509 Liu et al., Ring Attention with Blockwise Transformers, 2023,
https://arxiv.org/abs/2310.01889 Brandon et al., Striped Attention, 2023, https://arxiv.org/abs/2311.09431 (balance)
Fang, Zhao, USP: A Unified Sequence Parallelism Approach, 2024, https://arxiv.org/abs/2405.07719 (both)
"""

import abc
import contextlib
import dataclasses
import functools
import math
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Int64
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel

from shardfn.collectives import all_gather, all_to_all, axis_index, axis_size
from shardfn.core import Axes

from ._chunked import Chunked
from ._masks import Causal, Full, Mask
from ._online import OnlineScores, Rows, factor, narrowed, wide
from ._parallel import all_ranges, assign_heads, evenly, ranges_over, rank_range
from ._rectangles import KERNEL_TILE, TORCH_TILE
from ._ring import online
from ._ring_rounds import num_rows, part_of


class Local(abc.ABC):
    """Body of attention that cuts nothing."""

    @abc.abstractmethod
    def attend(self, q_BTHK: Tensor, k_BSGK: Tensor, v_BSGK: Tensor, how: OnlineScores, length: int) -> Tensor:
        """Returns the attention of the rank's queries over all keys."""

    def with_queries(self, rows_R: Tensor) -> "Local | None":
        """Returns the body that takes the queries of only these tokens, or None if there is no such body."""
        del rows_R

    def rows(self, length: int) -> Rows:
        """Returns the positions of the rank's tokens of a sequence."""
        return ((0, length),)

    @property
    def axes(self) -> tuple[str, ...]:
        """Returns the axes along which tokens are cut, major to minor."""
        return ()

    @property
    def lengths(self) -> frozenset[int]:
        """Returns the lengths of the whole sequence that the body and its inner bodies were given."""
        return frozenset()

    def order(self, length: int, num_ranks: Sequence[int]) -> Rows:
        """Returns the positions of all tokens, in the order before the cut."""
        del num_ranks
        return ((0, length),)

    @property
    def shuffled_axes(self) -> tuple[str, ...]:
        """Returns the axes over which tokens are dealt out of order, major to minor."""
        return ()


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
        if how.softcap is not None:
            raise ValueError(f"attention: BlockSparse() has no softcap={how.softcap}. Use Blockwise() or Dense().")
        known = functools.reduce(operator.and_, [m for m in how.mask.parts if m.of_positions], Full())
        tile, rows = self.block or known.tile or KERNEL_TILE, (((0, k_BSGK.shape[1]),),)
        return online(None, rows, (q_BTHK, k_BSGK, v_BSGK), how, TORCH_TILE, tile)


def _call_sdpa(q_BHTK: Tensor, k_BGSK: Tensor, v_BGSK: Tensor, **options: Any) -> Tensor:
    """Calls torch's SDPA, in the plain form where necessary.

    Fused kernels have no jvp, and divide by the number of heads.
    """
    forward_mode = any(forward_ad.unpack_dual(x).tangent is not None for x in (q_BHTK, k_BGSK, v_BGSK))
    # A rank has no heads where there are more ranks than heads. Torch 2.11 then ends the process.
    plain = forward_mode or q_BHTK.shape[1] == 0
    with sdpa_kernel(SDPBackend.MATH) if plain else contextlib.nullcontext():
        return F.scaled_dot_product_attention(q_BHTK, k_BGSK, v_BGSK, **options)


@dataclasses.dataclass(frozen=True)
class Dense(Local):
    """Attention by `scaled_dot_product_attention`.

    Masks except causal and full masks are in memory whole, [T, S] or larger.

    So are the probabilities where a mask multiplies them: `PairDropout`.
    """

    def attend(self, q_BTHK: Tensor, k_BSGK: Tensor, v_BSGK: Tensor, how: OnlineScores, length: int) -> Tensor:
        """Returns the attention of the rank's queries over all keys."""
        del length
        q_BHTK, k_BGSK, v_BGSK = (x.transpose(1, 2) for x in (q_BTHK, k_BSGK, v_BSGK))
        (H, T), (G, S) = q_BHTK.shape[1:3], k_BGSK.shape[1:3]
        options: dict[str, Any] = {"scale": how.scale, "enable_gqa": H != G}
        bounded = how.sinks_H is not None or how.softcap is not None
        if how.slopes_H is None and not bounded and isinstance(how.mask, Causal | Full):
            causal = isinstance(how.mask, Causal)
            return _call_sdpa(q_BHTK, k_BGSK, v_BGSK, is_causal=causal, **options).transpose(1, 2)
        spans, device = ((0, T), (0, S)), q_BTHK.device
        pairs, bias = how.mask.pairs(*spans, device), how.bias(*spans, device)
        some = pairs.any(-1, keepdim=True)
        # A row without keys attends to all, and is set to 0: torch's gradient of an empty softmax is not 0.
        open = pairs | ~some
        scales = how.mask.scales(*spans, H, torch.empty((), dtype=wide(q_BHTK.dtype), device=device))
        if scales is not None or bounded:
            y_BHTK = _multiply_scores(narrowed(q_BHTK, k_BGSK, v_BGSK), (open, bias, scales), how)
            return y_BHTK.masked_fill(~some, 0.0).transpose(1, 2)
        keep = open if bias is None else bias.masked_fill(~open, -math.inf).to(q_BTHK.dtype)
        keep = keep[None] if keep.ndim == 3 else keep  # torch's fused kernels take two or four dims
        y_BHTK = _call_sdpa(q_BHTK, k_BGSK, v_BGSK, attn_mask=keep, **options)
        return y_BHTK.masked_fill(~some, 0.0).transpose(1, 2)


@dataclasses.dataclass(frozen=True)
class Blockwise(Local):
    """Attention a tile of scores at a time, forward and backward.

    Memory O(T), and no work for tiles outside of the mask.

    Attributes:
        block: queries, and keys, of a tile.
    """

    block: int = 512

    def attend(self, q_BTHK: Tensor, k_BSGK: Tensor, v_BSGK: Tensor, how: OnlineScores, length: int) -> Tensor:
        """Returns the attention of the rank's queries over all keys."""
        del length
        return online(None, (((0, k_BSGK.shape[1]),),), (q_BTHK, k_BSGK, v_BSGK), how, self.block)


@dataclasses.dataclass(frozen=True)
class Ring:
    """Ring attention: keys and values go round the ranks. See `shardfn/nn/_ring.py`.

    Attributes:
        axis: mesh axes along which tokens are cut.
        length: number of tokens of the whole sequence, needed where the axis has several ranks.
        zigzag: the tokens lie in `sequence_order`.
        block: queries, and keys, of a tile.
    """

    axis: Axes
    length: int | None = None
    zigzag: bool = False
    block: int = 512

    @property
    def axes(self) -> tuple[str, ...]:
        """Returns the axes along which tokens are cut, major to minor."""
        return _axis_names(self.axis)

    @property
    def lengths(self) -> frozenset[int]:
        """Returns the lengths of the whole sequence that the body and its inner bodies were given."""
        return frozenset() if self.length is None else frozenset({self.length})

    def rows(self, length: int) -> Rows:
        """Returns the positions of the rank's tokens of a sequence."""
        return self._rows_by_rank(length)[int(axis_index(self.axis))]

    def order(self, length: int, num_ranks: Sequence[int]) -> Rows:
        """Returns the positions of all tokens, in the order before the cut."""
        if not self.zigzag:
            return ((0, length),)
        return tuple(span for rows in _deal_zigzag(ranges_over(length, num_ranks)) for span in rows)

    @property
    def shuffled_axes(self) -> tuple[str, ...]:
        """Returns the axes over which tokens are dealt out of order, major to minor."""
        return self.axes if self.zigzag else ()

    def attend(self, q_BTHK: Tensor, k_BSGK: Tensor, v_BSGK: Tensor, how: OnlineScores, length: int) -> Tensor:
        """Returns the attention of the rank's queries over all keys."""
        return online(self.axis, self._rows_by_rank(length), (q_BTHK, k_BSGK, v_BSGK), how, self.block)

    def _rows_by_rank(self, length: int) -> tuple[Rows, ...]:
        cuts = all_ranges(length, self.axis)
        return _deal_zigzag(cuts) if self.zigzag else tuple(((a, b),) if a < b else () for a, b in cuts)


@dataclasses.dataclass(frozen=True)
class Ulysses:
    """Ulysses: each rank has all tokens of some heads during attention.

    `all_to_all` of q, k and v before, and of y after.

    Query heads are dealt as by `torch.chunk`, also where the ranks do not divide the heads, or are more, for example 7
    heads on 3 ranks as 3, 3 and 1. Each rank gets the key heads read by the rank's query heads. Key heads needed by
    several ranks are sent several times.

    Attributes:
        axis: mesh axes along which tokens are cut.
        length: number of tokens of the whole sequence, needed where the axis has several ranks.
        inner: body of attention of each rank. A `Ring` cuts the tokens along the ring's axis first.
    """

    axis: Axes
    length: int | None = None
    inner: Local | Ring = dataclasses.field(default_factory=Dense)

    @property
    def axes(self) -> tuple[str, ...]:
        """Returns the axes along which tokens are cut, major to minor."""
        return self.inner.axes + _axis_names(self.axis)

    @property
    def lengths(self) -> frozenset[int]:
        """Returns the lengths of the whole sequence that the body and its inner bodies were given."""
        return self.inner.lengths | (frozenset() if self.length is None else {self.length})

    @property
    def shuffled_axes(self) -> tuple[str, ...]:
        """Returns the axes over which tokens are dealt out of order, major to minor."""
        return self.inner.shuffled_axes

    def order(self, length: int, num_ranks: Sequence[int]) -> Rows:
        """Returns the positions of all tokens, in the order before the cut."""
        return self.inner.order(length, num_ranks)

    def rows(self, length: int) -> Rows:
        """Returns the positions of the rank's tokens of a sequence."""
        inner = self.inner.rows(length)
        return part_of(inner, *rank_range(num_rows(inner), self.axis))

    def attend(self, q_BTHK: Tensor, k_BSGK: Tensor, v_BSGK: Tensor, how: OnlineScores, length: int) -> Tensor:
        """Returns the attention of the rank's queries over all keys."""
        if axis_size(self.axis) == 1:
            return self.inner.attend(q_BTHK, k_BSGK, v_BSGK, how, length)
        (H, G), T = (q_BTHK.shape[2], k_BSGK.shape[2]), num_rows(self.inner.rows(length))
        sent, read = assign_heads(H, G, self.axis)
        k_BSGK, v_BSGK = (x if sent is None else x[:, :, sent] for x in (k_BSGK, v_BSGK))
        q, k, v = (all_to_all(x, self.axis, split_dim=2, concat_dim=1, size=T) for x in (q_BTHK, k_BSGK, v_BSGK))
        if not evenly(read, k.shape[2]):
            k, v = k[:, :, read], v[:, :, read]
        y = self.inner.attend(q, k, v, how.of_heads(*rank_range(H, self.axis)), length)
        return all_to_all(y, self.axis, split_dim=1, concat_dim=2, size=H)


AttentionBackend = Local | Ulysses | Ring | Chunked
DENSE = Dense()
CAUSAL = Causal()


class Attending(NamedTuple):
    """Mask and implementation of a layer's attention.

    Attributes:
        mask: mask of the counted pairs, of all tokens and all heads.
        impl: body that computes the attention.
    """

    mask: Mask = CAUSAL
    impl: AttentionBackend = DENSE


def sequence_order(body: AttentionBackend, length: int, num_ranks: int | Sequence[int]) -> Int64[Tensor, " t"]:
    """Returns the order into which a loader puts the tokens before ranks take equal parts of them: `x[:, order]`.

    The order is by position, except for a ring with `zigzag=True`.

    Args:
        body: attention backend.
        length: number of tokens T.
        num_ranks: number of ranks along the axis of the ring, or along each axis, major to minor, of a ring of several
            axes.

    Raises:
        ValueError: `num_ranks` is a single number for a ring of several axes. The number does not determine the parts.

    Example:
        >>> sequence_order(Ring("sp", 8, zigzag=True), 8, num_ranks=2).tolist()
        [0, 1, 6, 7, 2, 3, 4, 5]
    """
    ranks = (num_ranks,) if isinstance(num_ranks, int) else tuple(num_ranks)
    if body.shuffled_axes and len(ranks) != len(body.shuffled_axes):
        raise ValueError(
            f"sequence_order: num_ranks={num_ranks} is for {len(ranks)} axes, and {body} deals tokens over"
            f" {body.shuffled_axes}. num_ranks must have the ranks along each axis, major to minor."
        )
    return torch.cat([torch.arange(a, b) for a, b in (*body.order(length, ranks), (0, 0))])


def shard_rows(body: AttentionBackend, num_tokens: int) -> Rows:
    """Returns the positions of the rank's tokens, as ranges (start, stop), in order.

    Args:
        body: how attention is computed.
        num_tokens: number of tokens of the rank.

    Raises:
        ValueError: the body cuts the tokens but has no length, or the rank has another number of tokens.

    Example:
        >>> shard_rows(Ulysses("sp", 8), 8)
        ((0, 8),)
    """
    length = whole_length(body, num_tokens)
    rows = body.rows(length)
    if num_rows(rows) != num_tokens:
        raise ValueError(
            f"attention: this rank has {num_tokens} tokens, but of {length} over {_axes_text(body)} its part is"
            f" {num_rows(rows)}. Cut the batch along {body.axes}, or correct length."
        )
    return rows


def rank_positions(body: AttentionBackend, num_tokens: int, device: torch.device | None = None) -> Int64[Tensor, " t"]:
    """Returns the global positions of the rank's tokens: for rotary tables and learned positions.

    Args:
        body: how attention is computed.
        num_tokens: number of tokens of the rank.
        device: device of the result.

    Raises:
        ValueError: as `shard_rows`.

    Example:
        >>> rank_positions(Dense(), 3).tolist()
        [0, 1, 2]
    """
    return torch.cat([torch.arange(a, b, device=device) for a, b in (*shard_rows(body, num_tokens), (0, 0))])


def whole_sequence(x_BT: Int64[Tensor, "b t"], body: AttentionBackend) -> Int64[Tensor, "b t2"]:
    """Gathers numbers of each rank's tokens to numbers of all tokens, in the order of positions, for `Segments`.

    Args:
        x_BT: numbers of the rank's tokens.
        body: how attention is computed.

    Raises:
        ValueError: as `shard_rows`.

    Example:
        >>> whole_sequence(torch.tensor([[1, 1, 2]]), Dense()).tolist()
        [[1, 1, 2]]
    """
    shard_rows(body, x_BT.shape[1])
    if not body.axes:
        return x_BT
    length = whole_length(body, x_BT.shape[1])
    order = sequence_order(body, length, [axis_size(a) for a in body.shuffled_axes])
    return all_gather(x_BT, body.axes, dim=1, size=length)[:, order.argsort().to(x_BT.device)]


def whole_length(body: AttentionBackend, num_tokens: int) -> int:
    """Returns the number of tokens of the whole sequence, from the rank's number.

    Raises:
        ValueError: the number is missing, or given twice.
    """
    lengths = set(body.lengths)
    if len(lengths) > 1:
        raise ValueError(
            f"attention: {body} has two lengths, and must have a single length. Leave out the length of the inner body."
        )
    if not lengths and math.prod(axis_size(a) for a in body.axes) > 1:
        raise ValueError(
            f"attention: {type(body).__name__} over {_axes_text(body)} needs length=, the tokens of the whole sequence:"
            f" it does not follow from the {num_tokens} that this rank has."
        )
    return lengths.pop() if lengths else num_tokens


def _multiply_scores(
    qkv: tuple[Tensor, ...], pairs: tuple[Tensor, Tensor | None, Tensor | None], how: OnlineScores
) -> Tensor:
    """Returns (scales softmax(scale q k^T + bias)) v, [B, H, T, K], with all scores in memory, in the dtype of sums.

    The softmax is over the sinks, too. With a softcap c the first summand is c tanh(scale q k^T / c).
    """
    q_BHTK, k_BGSK, v_BGSK = (x.to(wide(x.dtype)) for x in qkv)
    open, bias, scales = pairs
    repeats = q_BHTK.shape[1] // max(k_BGSK.shape[1], 1)
    k_BHSK, v_BHSK = (x.repeat_interleave(repeats, 1) for x in (k_BGSK, v_BGSK))
    with torch.autocast(q_BHTK.device.type, enabled=False):
        s_BHTS = q_BHTK @ k_BHSK.mT * factor(how, q_BHTK)
        s_BHTS = s_BHTS if how.softcap is None else (s_BHTS / how.softcap).tanh() * how.softcap
        s_BHTS = s_BHTS if bias is None else s_BHTS + bias
        s_BHTS = s_BHTS.masked_fill(~open, -math.inf)
        if how.sinks_H is not None:
            sinks_H1 = how.sinks_H.to(s_BHTS.dtype)[:, None, None].expand(*s_BHTS.shape[:-1], 1)
            s_BHTS = torch.cat([s_BHTS, sinks_H1], -1)
        if bias is None:
            p_BHTS = s_BHTS.softmax(-1)
        else:  # numbers of -inf may leave a row without keys, and torch's softmax of such a row is nan
            empty = (s_BHTS == -math.inf).all(-1, keepdim=True)
            p_BHTS = s_BHTS.masked_fill(empty, 0.0).softmax(-1).masked_fill(empty, 0.0)
        p_BHTS = p_BHTS[..., : k_BHSK.shape[2]]
        return ((p_BHTS if scales is None else p_BHTS * scales) @ v_BHSK).to(qkv[0].dtype)


def _deal_zigzag(ranges: list[tuple[int, int]]) -> tuple[Rows, ...]:
    """Returns two stretches per rank, together as long as the rank's range.

    Fronts in rank order, and backs in reverse.
    """
    sizes = [stop - start for start, stop in ranges]
    fronts = [-(-n // 2) for n in sizes]
    backs, out = [n - f for n, f in zip(sizes, fronts, strict=True)], []
    for r in range(len(sizes)):
        front, back = sum(fronts[:r]), sum(fronts) + sum(backs[r + 1 :])
        out.append(tuple((a, b) for a, b in ((front, front + fronts[r]), (back, back + backs[r])) if a < b))
    return tuple(out)


def _axis_names(axis: Axes) -> tuple[str, ...]:
    return () if axis is None else (axis,) if isinstance(axis, str) else tuple(axis)


def _axes_text(body: AttentionBackend) -> str:
    return " x ".join(f"{axis_size(a)} ranks of {a!r}" for a in body.axes)
