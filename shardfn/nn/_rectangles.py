"""Attention of some queries over some keys by `kernels.block_sparse_attention`, with queries and keys in parts.

A rectangle has the queries of positions (start, stop) and the keys of other positions. The result of the rows is (y,
lse). Two results over different keys join, with lse = log(e^lse1 + e^lse2), to

    y = e^(lse1 - lse) y1 + e^(lse2 - lse) y2

and the gradients of a rectangle need only y and lse over all keys, so gradients are sums over rectangles.

B samples, T queries, S keys, H query heads, G key heads, K head dim. Dao et al., FlashAttention, 2022,
https://arxiv.org/abs/2205.14135 Liu et al., Ring Attention with Blockwise Transformers, 2023,
https://arxiv.org/abs/2310.01889
"""

import functools
import math
import operator
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from shardfn._torch import DisableFuncTorch, disable_current_modes
from shardfn.kernels import Given, Tiles, block_sparse_attention, block_sparse_attention_backward, is_native

from ._data_masks import together
from ._dropout import PairDropout
from ._masks import NONE, SOME, Array, Full, Mask, Span
from ._online import OnlineScores, Outer, Rows, absorb, factor, finish, gathered, tiles, transpose, wide


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


# The default tile of the kernel: two tiles and the products of both fit a core's cache.
KERNEL_TILE = 64
# The tile of torch's products.
TORCH_TILE = 512
QKV = tuple[Tensor, Tensor, Tensor]


class Rectangle(NamedTuple):
    """Positions of queries and keys, and the size of a tile, computed by the kernel or by torch's products."""

    queries: Span
    keys: Span
    block: int
    kernel: bool


def kernel_tile(how: OnlineScores, device: torch.device, block: int) -> int | None:
    """Returns the best tile of the kernel for given scores, or None where torch's products are to compute the scores.

    Torch's products compute where the kernel has no fast path, such as on a CPU without a compiler, for masks without
    data for the kernel, and for bounded scores (softcap).
    """
    if how.softcap is not None:
        return None
    known = all(m.in_kernels for m in how.mask.parts) and sum(isinstance(m, PairDropout) for m in how.mask.parts) <= 1
    return min(block, KERNEL_TILE) if known and device.type == "cpu" and is_native("block_sparse_attention") else None


def attend_over(qkv: QKV, how: OnlineScores, at: Rectangle) -> tuple[Tensor, Tensor]:
    """Returns y [B, T, H, K] and lse [B, H, T] of a rectangle."""
    if not at.kernel:
        return _attend_in_tiles(qkv, how, at)
    found = _tiles_and_given(qkv[0], how, at)
    return block_sparse_attention(*qkv, *found, block=at.block, scale=factor(how, qkv[0]))


def gradients_over(dy_BTHK: Tensor, qkv: QKV, y_BTHK: Tensor, lse_BHT: Tensor, how: OnlineScores, at: Rectangle) -> QKV:
    """Returns a rectangle's parts of the gradients of q, k and v, from y and lse over all keys."""
    if not at.kernel:
        return _gradients_in_tiles(dy_BTHK, qkv, y_BTHK, lse_BHT, how, at)
    found, scale = _tiles_and_given(qkv[0], how, at), factor(how, qkv[0])
    return block_sparse_attention_backward(dy_BTHK, qkv, y_BTHK, lse_BHT, *found, block=at.block, scale=scale)


def merged(one: tuple[Tensor, Tensor] | None, other: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Returns (y, lse) over the keys of both parts.

    Example:
        >>> lse = torch.zeros(1, 1, 1)
        >>> y, lse = merged((torch.ones(1, 1, 1, 1), lse), (torch.zeros(1, 1, 1, 1), lse))
        >>> y.item(), lse.exp().item()
        (0.5, 2.0)
    """
    if one is None:
        return other
    lse = torch.logaddexp(one[1], other[1])
    floor = lse.masked_fill(lse == -math.inf, 0.0)  # of rows without keys
    parts = [y * (own - floor).exp().transpose(1, 2)[..., None] for y, own in (one, other)]
    return parts[0] + parts[1], lse


def rectangles(queries: Rows, keys: Rows, how: OnlineScores, block: int) -> Iterator[tuple[Span, Span, Rectangle]]:
    """Yields the tiles of queries and keys that the mask does not exclude.

    Each tile is (rows of the queries, rows of the keys, rectangle for the kernel).
    """
    whole = sum(stop - start for start, stop in (*queries, *keys)) or 1
    for query in tiles(queries, whole):
        for key in tiles(keys, whole):
            if how.mask.cover(query.span, key.span) != "none":
                yield query.at, key.at, Rectangle(query.span, key.span, block, True)


def _tiles_and_given(q: Tensor, how: OnlineScores, at: Rectangle) -> tuple[Tiles, Given]:
    known: Mask = functools.reduce(operator.and_, [m for m in how.mask.parts if m.of_positions], Full())
    (a, b), (c, d) = at.queries, at.keys
    found = together(m.make_data(at.queries, at.keys) for m in how.mask.parts if not m.of_positions)
    if how.slopes_H is not None:
        table = -how.slopes_H[:, None] * torch.arange(c - b + 1, d - a, device=q.device).abs()
        found = found._replace(table=table if found.table is None else found.table + table)
    ids_q, ids_k = (
        None if x is None else x.to(q.device, torch.int64).expand(q.shape[0], -1) for x in (found.ids_q, found.ids_k)
    )
    added, table = (None if x is None else x.to(q.device, wide(q.dtype)) for x in (found.added, found.table))
    drop = None if found.dropped is None else found.dropped._replace(keys=found.dropped.keys.to(q.device))
    counted = tiles_of(known, at.queries, at.keys, at.block).on(q.device)
    return counted, Given(ids_q, ids_k, added, table, drop)


def _attend_in_tiles(qkv: QKV, how: OnlineScores, at: Rectangle) -> tuple[Tensor, Tensor]:
    q, k, v = by_key_head(qkv)
    states: list[Any] = [None] * len(tiles((at.queries,), at.block))
    absorb(states, q, (at.queries,), (k, v), (at.keys,), how, at.block)
    y, lse = finish(states, q, v, (at.queries,), at.block)
    return y.flatten(1, 2).transpose(1, 2), lse.flatten(1, 2)


def _gradients_in_tiles(
    dy_BTHK: Tensor, qkv: QKV, y_BTHK: Tensor, lse_BHT: Tensor, how: OnlineScores, at: Rectangle
) -> QKV:
    q, k, v = by_key_head(qkv)
    dy, y = (x.transpose(1, 2).unflatten(1, q.shape[1:3]) for x in (dy_BTHK, y_BTHK))
    lse = lse_BHT.unflatten(1, q.shape[1:3])
    dqs: list[Any] = [None] * len(tiles((at.queries,), at.block))
    outer = Outer(q, dy, lse, (dy.to(lse.dtype) * y.to(lse.dtype)).sum(-1))
    dk, dv = transpose(dqs, outer, (at.queries,), (k, v), (at.keys,), how, at.block)
    dq = gathered(dqs, q, (at.queries,), at.block).flatten(1, 2)
    return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)


def by_key_head(qkv: tuple[Tensor, ...]) -> QKV:
    """Returns q as [B, G, R, T, K], k and v as [B, G, S, K]."""
    q, k, v = (x.transpose(1, 2) for x in qkv)
    return q.unflatten(1, (k.shape[1], q.shape[1] // max(k.shape[1], 1))), k, v
