"""Online softmax: attention tile by tile. The softmax of a row is kept as (top, total, sum) while keys arrive in parts.

    forward   top' = max(top, max s);  total' = total e^(top - top') + sum e^(s - top');  sum in the same way with v
    backward  p = e^(s - lse);  dv = (c p)^T dy;  ds = p (c dy v^T - delta);  dq = ds k;  dk = ds^T q

with s = scale q k^T + bias, lse = top + log total and delta = (dy y) summed over K, less the cotangent of lse. With a
softcap b, s = b tanh(scale q k^T / b) + bias, and ds has the factor 1 - tanh^2. c is the mask's factor of
probabilities, such as from dropout: `sum` includes c, but `total` and lse do not. A row without keys has lse = -inf,
y = 0 and gradient 0. No more than a tile of scores is in memory at a time. Tiles without a pair of the mask are left
out.

B samples, G key heads, R query heads of a key head, T queries, S keys, K head dim. Milakov, Gimelshein, Online
normalizer calculation for softmax, 2018, https://arxiv.org/abs/1805.02867 Dao et al., FlashAttention, 2022,
https://arxiv.org/abs/2205.14135
"""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ._masks import Mask, Span

# Positions of neighbouring tokens, in the order of memory.
Rows = tuple[Span, ...]


class OnlineScores(NamedTuple):
    """Parts of a score besides q k.

    Attributes:
        mask: mask of the counted pairs.
        scale: factor of q k. None: 1 / sqrt(K).
        slopes_H: ALiBi's slopes of the query heads, or None.
        sinks_H: score of an additional key of each query head, with the value 0, or None.
        softcap: bound c of c tanh(score / c), applied to scale q k, or None.
    """

    mask: Mask
    scale: float | None
    slopes_H: Tensor | None = None
    sinks_H: Tensor | None = None
    softcap: float | None = None

    def bias(self, queries: Span, keys: Span, device: torch.device) -> Tensor | None:
        """Returns the numbers added to scores: the mask's, [Q, K] or [.., Q, K], and -slope * distance, [H, Q, K]."""
        added = self.mask.bias(queries, keys, device)
        if self.slopes_H is None:
            return added
        distance = torch.arange(*queries, device=device)[:, None] - torch.arange(*keys, device=device)
        sloped = -self.slopes_H[:, None, None] * distance.abs()
        return sloped if added is None else sloped + added

    def of_heads(self, start: int, stop: int) -> "OnlineScores":
        """Returns the scores of some query heads."""
        slopes_H, sinks_H = (None if x is None else x[start:stop] for x in (self.slopes_H, self.sinks_H))
        return self._replace(mask=self.mask.of_heads(start, stop), slopes_H=slopes_H, sinks_H=sinks_H)


class Tile(NamedTuple):
    """Rows `at` of a tensor: the tokens of positions `span`."""

    at: Span
    span: Span


class OnlineState(NamedTuple):
    """The softmax of a tile of queries over the keys so far: maximum and sum of e^(s - top), and the sum with v."""

    top: Tensor
    total: Tensor
    sum: Tensor


def tiles(rows: Rows, block: int) -> list[Tile]:
    """Rows in pieces of at most `block`.

    Example:
        >>> [tuple(t) for t in tiles(((0, 3), (9, 11)), 2)]
        [((0, 2), (0, 2)), ((2, 3), (2, 3)), ((3, 5), (9, 11))]
    """
    out, at = [], 0
    for start, stop in rows:
        for a in range(start, stop, block):
            b = min(a + block, stop)
            out.append(Tile((at, at + b - a), (a, b)))
            at += b - a
    return out


def wide(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype of sums."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def factor(how: OnlineScores, q: Tensor) -> float:
    """Returns the scale of q k."""
    return q.shape[-1] ** -0.5 if how.scale is None else how.scale


def take(x: Tensor, at: Span) -> Tensor:
    """Rows of dim -2, in the dtype of sums."""
    return x[..., at[0] : at[1], :].to(wide(x.dtype))


def absorb(
    states: list[OnlineState | None],
    q_BGRTK: Tensor,
    queries: Rows,
    kv: tuple[Tensor, Tensor],
    keys: Rows,
    how: OnlineScores,
    block: int,
) -> None:
    """Takes keys and values [B, G, S, K] into the states of the tiles of queries."""
    for key in tiles(keys, block):
        k, v = (take(x, key.at) for x in kv)
        for i, query in enumerate(tiles(queries, block)):
            if how.mask.cover(query.span, key.span) == "none":
                continue
            s, _ = _compute_scores(take(q_BGRTK, query.at), k, query.span, key.span, how)
            states[i] = _fold_values(states[i], s, v, _probability_factors(s, query.span, key.span, how))


def finish(
    states: Sequence[OnlineState | None], q_BGRTK: Tensor, v: Tensor, queries: Rows, block: int
) -> tuple[Tensor, Tensor]:
    """Returns y [B, G, R, T, K] and lse [B, G, R, T] of all tiles."""
    ys, lses = [], []
    for state, query in zip(states, tiles(queries, block), strict=True):
        if state is None:  # empty sums, as functions of the would-be inputs
            q = take(q_BGRTK, query.at)
            empty = torch.zeros_like(q[..., 0])
            ys.append(empty[..., None].expand(*empty.shape, v.shape[-1]))
            lses.append(empty - math.inf)
        else:
            total = state.total.masked_fill(state.total == 0, 1.0)  # of rows without keys: the sum is 0, the top -inf
            ys.append(state.sum / total[..., None])
            lses.append(state.top + total.log())
    if not ys:
        return torch.zeros_like(q_BGRTK[..., :1]).expand(*q_BGRTK.shape[:-1], v.shape[-1]), _wide_zeros(q_BGRTK[..., 0])
    return torch.cat(ys, -2).to(v.dtype), torch.cat(lses, -1)


class Outer(NamedTuple):
    """Inputs of a backward by queries: the queries, the cotangent of y, lse, and delta."""

    q_BGRTK: Tensor
    dy_BGRTK: Tensor
    lse_BGRT: Tensor
    delta_BGRT: Tensor


def transpose(
    dqs: list[Tensor | None],
    outer: Outer,
    queries: Rows,
    kv: tuple[Tensor, Tensor],
    keys: Rows,
    how: OnlineScores,
    block: int,
) -> tuple[Tensor, Tensor]:
    """Adds to the gradients of the tiles of queries, and returns the gradients of keys and values, [B, G, S, K]."""
    columns: list[tuple[Tensor, Tensor]] = []
    for key in tiles(keys, block):
        k, v = (take(x, key.at) for x in kv)
        dk, dv = torch.zeros_like(k), torch.zeros_like(v)
        for i, query in enumerate(tiles(queries, block)):
            if how.mask.cover(query.span, key.span) == "none":
                continue
            q, dy, lse, delta = (_rows_of(x, query.at) for x in outer)
            s, slope = _compute_scores(q, k, query.span, key.span, how)
            p = _compute_probabilities(s, lse)
            c = _probability_factors(p, query.span, key.span, how)
            ds = p * _multiply_factors((_join_groups(dy) @ v.mT).view_as(p), c).sub(delta[..., None]) * slope
            dv = dv + _join_groups(_multiply_factors(p, c)).mT @ _join_groups(dy)
            dk = dk + _join_groups(ds).mT @ _join_groups(q)
            dq = (_join_groups(ds) @ k).view_as(q)
            before = dqs[i]
            dqs[i] = dq if before is None else before + dq
        columns.append((dk, dv))
    if not columns:
        return _wide_zeros(kv[0]), _wide_zeros(kv[1])
    dk, dv = (torch.cat(x, -2) for x in zip(*columns, strict=True))
    return dk, dv


class Pushed:
    """The tangents of y and lse: dlse = sum p ds, dy = sum (c p ds v + c p dv) - y dlse."""

    def __init__(self, queries: Rows, outer: tuple[Tensor, Tensor, Tensor], block: int) -> None:
        self._tiles, self._outer, self._block = tiles(queries, block), outer, block
        self._sums: list[tuple[Tensor, Tensor] | None] = [None] * len(self._tiles)

    def absorb(self, tensors: Sequence[Tensor], keys: Rows, how: OnlineScores) -> None:
        """Takes keys, values and tangents of both, [B, G, S, K]."""
        for key in tiles(keys, self._block):
            k, v, dk, dv = (take(x, key.at) for x in tensors)
            for i, query in enumerate(self._tiles):
                if how.mask.cover(query.span, key.span) == "none":
                    continue
                q, dq, lse = (_rows_of(x, query.at) for x in self._outer)
                s, slope = _compute_scores(q, k, query.span, key.span, how)
                p = _compute_probabilities(s, lse)
                pds = p * (_join_groups(dq) @ k.mT + _join_groups(q) @ dk.mT).view_as(p) * slope
                c = _probability_factors(p, query.span, key.span, how)
                dsum = _join_groups(_multiply_factors(pds, c)) @ v + _join_groups(_multiply_factors(p, c)) @ dv
                new = pds.sum(-1), dsum.view(*p.shape[:-1], v.shape[-1])
                old = self._sums[i]
                self._sums[i] = new if old is None else (old[0] + new[0], old[1] + new[1])

    def finish(self, y: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the tangents of y [B, G, R, T, K] and lse [B, G, R, T]."""
        dys, dlses = [], []
        for found, tile in zip(self._sums, self._tiles, strict=True):
            own = take(y, tile.at)
            dlse, sum = (_wide_zeros(own[..., 0]), _wide_zeros(own)) if found is None else found
            dys.append(sum - own * dlse[..., None])
            dlses.append(dlse)
        if not dys:
            return torch.zeros_like(y), _wide_zeros(y[..., 0])
        return torch.cat(dys, -2).to(y.dtype), torch.cat(dlses, -1)


def gathered(parts: Sequence[Tensor | None], like: Tensor, rows: Rows, block: int) -> Tensor:
    """Returns the tiles of a gradient as a single tensor. None stands for zeros."""
    pairs: Iterator[tuple[Tensor | None, Tile]] = zip(parts, tiles(rows, block), strict=True)
    found = [_wide_zeros(like[..., t.at[0] : t.at[1], :]) if p is None else p for p, t in pairs]
    return torch.cat(found, -2).to(like.dtype) if found else torch.zeros_like(like)


def _compute_scores(
    q: Tensor, k: Tensor, queries: Span, keys: Span, how: OnlineScores
) -> tuple[Tensor, Tensor | float]:
    """Returns scores [B, G, R, Q, K], -inf where a pair does not count, and their derivatives with regard to q k."""
    slope: Tensor | float = factor(how, q)
    s = (_join_groups(q) @ k.mT).view(*q.shape[:-1], k.shape[-2]) * slope
    if how.softcap is not None:
        bounded = (s / how.softcap).tanh()
        s, slope = bounded * how.softcap, (1 - bounded * bounded) * slope
    bias = how.bias(queries, keys, q.device)
    s = s if bias is None else s + _split_groups(bias, q).to(s.dtype)
    if how.mask.cover(queries, keys) == "all":
        return s, slope
    return s.masked_fill(~_split_groups(how.mask.pairs(queries, keys, q.device), q), -math.inf), slope


def _compute_probabilities(s: Tensor, lse: Tensor) -> Tensor:
    """Returns e^(s - lse), or 0 in rows without keys."""
    return (s - lse.masked_fill(lse == -math.inf, 0.0)[..., None]).exp()


def _probability_factors(p: Tensor, queries: Span, keys: Span, how: OnlineScores) -> Tensor | None:
    """Returns the factors of the probabilities of a tile [B, G, R, Q, K] after the softmax. None is 1."""
    c = how.mask.scales(queries, keys, math.prod(p.shape[-4:-2]), p)
    return None if c is None else _split_groups(c, p)


def _multiply_factors(x: Tensor, c: Tensor | None) -> Tensor:
    return x if c is None else x * c


def _fold_values(state: OnlineState | None, s: Tensor, v: Tensor, c: Tensor | None) -> OnlineState:
    top = s.amax(-1) if state is None else torch.maximum(state.top, s.amax(-1))
    shift = top.masked_fill(top == -math.inf, 0.0)  # rows without a key so far
    p = (s - shift[..., None]).exp()
    total, sum = p.sum(-1), (_join_groups(_multiply_factors(p, c)) @ v).view(*p.shape[:-1], v.shape[-1])
    if state is not None:
        before = (state.top - shift).exp()
        total, sum = total + state.total * before, sum + state.sum * before[..., None]
    return OnlineState(top, total, sum)


def _join_groups(x: Tensor) -> Tensor:
    """Returns [B, G, R, T, K] as [B, G, R * T, K]: the query heads of a key head are rows of a single product."""
    return x.flatten(-3, -2)


def _split_groups(x: Tensor, q: Tensor) -> Tensor:
    """Returns [.., H or 1, Q, K] as [.., G or 1, R or 1, Q, K]."""
    if x.ndim == 2:
        return x
    return x.unflatten(-3, tuple(q.shape[-4:-2])) if x.shape[-3] != 1 else x.unsqueeze(-3)


def _rows_of(x: Tensor, at: Span) -> Tensor:
    """Returns the rows of a tile, from a tensor [.., T, K] or [.., T]."""
    return take(x, at) if x.ndim == 5 else x[..., at[0] : at[1]]


def _wide_zeros(x: Tensor) -> Tensor:
    return torch.zeros_like(x, dtype=wide(x.dtype))


def narrowed(*qkv: Tensor) -> tuple[Tensor, ...]:
    """Returns queries, keys and values in the dtype of autocast, once, as forward and backward are separate."""
    kind = qkv[0].device.type
    if not torch.is_autocast_enabled(kind) or qkv[0].dtype == torch.float64:
        return qkv
    return tuple(x.to(torch.get_autocast_dtype(kind)) for x in qkv)


def refuse_gradients(how: OnlineScores) -> None:
    """Raises where data other than queries, keys and values would need a gradient.

    Raises:
        ValueError: slopes or a mask's data require a gradient.
    """
    if how.slopes_H is not None and how.slopes_H.requires_grad:
        raise ValueError("attention: slopes_H requires a gradient, which only Dense() takes. Pass slopes_H.detach().")
    wrong = [type(m).__name__ for m in how.mask.parts if any(t.requires_grad for t in m.tensors)]
    if wrong:
        raise ValueError(
            f"attention: data of the masks {', '.join(wrong)} require a gradient, which only Dense() computes. Detach"
            " the data, or use Dense()."
        )
