"""Multi-head latent attention (MLA): keys and values of all heads from a short latent row of each token.

    c, r    = split(x wkv_a^T)              C numbers, normalised, and R numbers, rotated and shared by all heads
    q       = norm(x wq_a^T) wq^T           or x wq^T; of each head N numbers without positions, and R rotated
    k_h     = [r, c wk_h^T]     v_h = c wv_h^T          y = softmax(scale q k^T) v          result = y wo^T

Absorbed, a head's query meets the latent row itself, so that a cache has only the C + R numbers of a token:

    q_h k_h = [q_r, q_n wk_h] [r, c]        y_h = (softmax(..) [r, c]) without r, times wv_h^T

Both forms have equal values. A batch-invariant model trains by the absorbed form, too, so that its bits are those of an
engine.

B batch, T tokens, D model, H heads, N, R and V dims of a head, C latent.

References:
    DeepSeek-AI, DeepSeek-V2, 2024, https://arxiv.org/abs/2405.04434
    Peng et al., YaRN, 2023, https://arxiv.org/abs/2309.00071 (mscale)
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardfn import nn
from shardfn.core import Axes, raise_all
from shardfn.nn import BatchInvariantWeight, moe

_SIZES = ("kv_rank", "nope_dim", "rope_dim", "v_dim", "q_rank")


@dataclasses.dataclass(frozen=True)
class Latent:
    """Sizes of latent attention, in place of heads of keys and values.

    Attributes:
        kv_rank: C, numbers of a token's latent.
        nope_dim: N, dims of a head without positions.
        rope_dim: R, rotated dims of a head. Their key is shared by all heads.
        v_dim: V, dims of a head's value.
        q_rank: numbers of the latent of queries. None: queries come from the token's state.
        interleaved: whether the weights have the two numbers of a rotated pair next to each other.
        mscale: YaRN's factor of scores, with a `YarnScaling` of the positions: scores are multiplied by (0.1 mscale
            ln(factor) + 1)^2. 0: not at all.
        norm_eps: term that the norms of latents add to the variance.

    Raises:
        ValueError: lists every size below 1, and an odd R.

    Example:
        >>> Latent(kv_rank=512, nope_dim=128, rope_dim=64, v_dim=128, q_rank=1536).row
        576
    """

    kv_rank: int
    nope_dim: int
    rope_dim: int
    v_dim: int
    q_rank: int | None = None
    interleaved: bool = False
    mscale: float = 0.0
    norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        wrong = [f"{n}={x} must be at least 1." for n in _SIZES if (x := getattr(self, n)) is not None and x < 1]
        wrong += [f"rope_dim={self.rope_dim} must be even, as pairs are rotated."] if self.rope_dim % 2 else []
        wrong += [f"mscale={self.mscale} must be 0 or more."] if self.mscale < 0 else []
        wrong += [] if self.norm_eps > 0 else [f"norm_eps={self.norm_eps} must be above 0."]
        raise_all(ValueError, "Latent:", wrong)

    @property
    def head_dim(self) -> int:
        """Returns N + R, the dims of a head's query."""
        return self.nope_dim + self.rope_dim

    @property
    def row(self) -> int:
        """Returns C + R, the numbers of a token in a cache."""
        return self.kv_rank + self.rope_dim

    def find_scale(self, rope: nn.Rope | None) -> float:
        """Returns the factor of scores without a setting of the model."""
        factor = rope.scaling.factor if rope is not None and rope.scaling is not None else 1.0
        stretch = 0.1 * self.mscale * math.log(factor) + 1.0 if factor > 1 else 1.0
        return self.head_dim**-0.5 * stretch * stretch


class LatentWeights(NamedTuple):
    """Blocks of the rank.

    Attributes:
        wq: [H * (N + R), D] or [H, N + R, D], of the rank's heads. With a latent of queries its size is in place of D.
        wkv_a: [C + R, D], whole.
        wk_HNC: the rank's heads.
        wv_HVC: the rank's heads.
        wo: [D, H * V] or [D, H, V], of the rank's heads.
        norm_keys: norm of the latent.
        wq_a: [q_rank, D], whole, or None.
        norm_queries: norm of the latent of queries.
    """

    wq: Any
    wkv_a: Any
    wk_HNC: Tensor
    wv_HVC: Tensor
    wo: Any
    norm_keys: Callable[[Tensor], Tensor]
    wq_a: Any = None
    norm_queries: Callable[[Tensor], Tensor] = lambda x: x


def latent_attention(
    latent: Latent,
    num_heads: int,
    x_BTD: Tensor,
    w: LatentWeights,
    *,
    how: nn.Attending,
    scale: float,
    table: tuple[Tensor, Tensor] | None = None,
    softcap: float | None = None,
    absorbed: bool = False,
    cached: bool = False,
    rows_R: Tensor | None = None,
    axis: Axes = None,
    sequence: int | None = None,
) -> Tensor:
    """Returns latent attention of the rank's tokens, after the output layer.

    Args:
        latent: sizes.
        num_heads: H of the whole layer.
        x_BTD: whole input, or with `sequence` the rank's rows of the tokens.
        w: blocks of the weights of the rank.
        how: mask and body of attention. With `absorbed`, a body gets latent rows as its keys and values.
        scale: factor of scores.
        table: cos and sin of R dims, of all tokens. None: the body rotates.
        softcap: see `nn.attention`.
        absorbed: whether queries meet the latent rows.
        cached: whether the body keeps the latent rows, which are then the same on all ranks, without derivatives.
        rows_R: tokens with wanted results, for a body of these queries. None: all tokens.
        axis: mesh axes along which heads are cut. None means a single device.
        sequence: T where x and the result are the rank's rows of the tokens.

    Raises:
        ValueError: the axis would cut a head in two, or a weight is not the rank's block.
    """
    C, N, R, K = latent.kv_rank, latent.nope_dim, latent.rope_dim, latent.head_dim
    _check_heads(w.wq, num_heads, K, axis)
    start, stop = nn.rank_range(num_heads, axis)
    c_BTC, r_BTR = nn.linear(x_BTD, w.wkv_a).split([C, R], -1)
    row_BTC = torch.cat([_order_pairs(latent, r_BTR), w.norm_keys(c_BTC)], -1)
    row_BTC = row_BTC if cached else nn.enter_parallel(row_BTC, axis, sequence)
    x_BTQ = x_BTD if w.wq_a is None else w.norm_queries(nn.linear(x_BTD, w.wq_a))
    features = num_heads * K if w.wq.ndim == 2 else (num_heads, K)
    own_BTQ = x_BTQ if rows_R is None else x_BTQ[:, rows_R]
    q_BTHK = nn.column_linear(own_BTQ, w.wq, features=features, axis=axis, sequence=sequence)
    q_BTHK = q_BTHK if q_BTHK.ndim == 4 else q_BTHK.unflatten(-1, (stop - start, K))
    q_BTHN, q_BTHR = q_BTHK.split([N, R], -1)
    q_BTHR = _order_pairs(latent, q_BTHR)
    multiply = functools.partial(_multiply_heads, batch_invariant=isinstance(w.wkv_a, BatchInvariantWeight))
    if absorbed:
        q_BTHK, k_BSGK = torch.cat([q_BTHR, multiply(q_BTHN, w.wk_HNC, transposed=False)], -1), row_BTC[:, :, None]
        v_BSGV = k_BSGK
    else:
        k_BSHN, v_BSGV = (nn.column_linear(row_BTC[..., R:], x) for x in (w.wk_HNC, w.wv_HVC))
        shared = row_BTC[..., None, :R].expand(*k_BSHN.shape[:-1], R)
        q_BTHK, k_BSGK = torch.cat([q_BTHR, q_BTHN], -1), torch.cat([shared, k_BSHN], -1)
    if table is not None:
        q_BTHK, k_BSGK = nn.rope(q_BTHK, *table), nn.rope(k_BSGK, *table)
    mask, scores = how.mask.of_heads(start, stop), {"scale": scale, "softcap": softcap}
    if rows_R is None and q_BTHK.shape[1] == k_BSGK.shape[1]:
        y_BTHV = nn.attention(q_BTHK, k_BSGK, v_BSGV, mask=mask, impl=how.impl, **scores)
    else:
        y_BTHV = how.impl.attend(q_BTHK, k_BSGK, v_BSGV, nn.OnlineScores(mask, **scores), k_BSGK.shape[1])
    y_BTHV = multiply(y_BTHV[..., R:], w.wv_HVC, transposed=True) if absorbed else y_BTHV
    columns = num_heads * latent.v_dim if w.wo.ndim == 2 else (num_heads, latent.v_dim)
    return nn.row_linear(y_BTHV.flatten(-2), w.wo, features=columns, axis=axis, sequence=sequence)


def _check_heads(wq: Any, num_heads: int, dim: int, axis: Axes) -> None:
    by_row = nn.all_ranges(num_heads * dim, axis)
    if wq.ndim == 2 and by_row != [(a * dim, b * dim) for a, b in nn.all_ranges(num_heads, axis)]:
        raise ValueError(
            f"latent attention: {len(by_row)} ranks of {axis!r} would cut {num_heads} heads of {dim} rows inside a"
            " head. Use Config(per_head=True), or an axis that divides the heads."
        )


def _order_pairs(latent: Latent, x_R: Tensor) -> Tensor:
    """Returns rotated dims in the order of `nn.rope`: the first numbers of all pairs, and then the second numbers."""
    return x_R.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2) if latent.interleaved else x_R


def _multiply_heads(x_BTHI: Tensor, w_H: Tensor, *, transposed: bool, batch_invariant: bool) -> Tensor:
    """Returns the product of each head's rows and the head's matrix, [I, O], or transposed [O, I]."""
    if not batch_invariant:
        return torch.einsum("bthi,hoi->btho" if transposed else "bthi,hio->btho", x_BTHI, w_H)
    B, T, H = x_BTHI.shape[:3]
    counts_H = torch.full((H,), B * T, device=x_BTHI.device)
    y = moe.grouped(x_BTHI.movedim(2, 0).flatten(0, 2), w_H, counts_H, transposed, batch_invariant=True)
    return y.view(H, B, T, -1).movedim(0, 2)
