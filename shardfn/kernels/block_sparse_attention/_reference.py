"""Attention over the tiles of a layout, in plain torch.

A block of queries of a head at a time, over the block's keys.
"""

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from shardfn.kernels.block_sparse_attention._api import Given, Tiles, wide

from ._dropped import factors

QKV = tuple[Tensor, Tensor, Tensor]


class QueryRow(NamedTuple):
    """Block of queries of a head, of all samples: heads, positions of queries and keys, and counted pairs."""

    head: int
    key_head: int
    queries: Tensor
    keys: Tensor
    pairs: Tensor


def forward(qkv: QKV, tiles: Tiles, given: Given, block: int, scale: float) -> tuple[Tensor, Tensor]:
    """Returns y [B, T, H, K] and lse [B, H, T]."""
    q, k, v = (x.to(wide(x.dtype)) for x in qkv)
    y, lse = torch.zeros_like(q), q.new_full((q.shape[0], q.shape[2], q.shape[1]), -torch.inf)
    for row in _iterate_rows(qkv, tiles, block):
        s = _compute_scores(q, k, row, given, scale)
        own = s.logsumexp(-1)
        p = (s - own.masked_fill(own == -torch.inf, 0.0)[..., None]).exp()
        y[:, row.queries, row.head] = p * _dropout_factors(row, given, p.dtype) @ v[:, row.keys, row.key_head]
        lse[:, row.head, row.queries] = own
    return y.to(qkv[0].dtype), lse


def backward(
    dy: Tensor, qkv: QKV, lse: Tensor, delta: Tensor, tiles: Tiles, given: Given, block: int, scale: float
) -> QKV:
    """Returns the gradients of q, k and v."""
    q, k, v = (x.to(wide(x.dtype)) for x in qkv)
    dq, dk, dv, dy = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v), dy.to(q.dtype)
    for row in _iterate_rows(qkv, tiles, block):
        own = lse[:, row.head, row.queries]
        p = (_compute_scores(q, k, row, given, scale) - own.masked_fill(own == -torch.inf, 0.0)[..., None]).exp()
        out, c = dy[:, row.queries, row.head], _dropout_factors(row, given, p.dtype)
        ds = p * (c * (out @ v[:, row.keys, row.key_head].mT) - delta[:, row.head, row.queries, None]) * scale
        dq[:, row.queries, row.head] = ds @ k[:, row.keys, row.key_head]
        dk[:, row.keys, row.key_head] += ds.mT @ q[:, row.queries, row.head]
        dv[:, row.keys, row.key_head] += (c * p).mT @ out
    dtype = qkv[0].dtype
    return dq.to(dtype), dk.to(dtype), dv.to(dtype)


def _iterate_rows(qkv: QKV, tiles: Tiles, block: int) -> Iterator[QueryRow]:
    (T, H), (S, G), device = qkv[0].shape[1:3], qkv[1].shape[1:3], qkv[0].device
    starts, columns, kinds = (x.tolist() for x in tiles[:3])
    for h in range(H):
        row = starts[h if len(starts) > 1 else 0]
        for i, (a, b) in enumerate(itertools.pairwise(row)):
            queries = torch.arange(i * block, min((i + 1) * block, T), device=device)
            spans = [(j * block, min((j + 1) * block, S)) for j in columns[a:b]]
            if spans:
                keys = torch.cat([torch.arange(*span, device=device) for span in spans])
                found = zip(kinds[a:b], spans, strict=True)
                pairs = torch.cat(
                    [_load_pattern(tiles, kind, len(queries), d - c, device) for kind, (c, d) in found], -1
                )
                yield QueryRow(h, h // (H // G), queries, keys, pairs)


def _load_pattern(tiles: Tiles, kind: int, m: int, n: int, device: torch.device) -> Tensor:
    if kind < 0:
        return torch.ones(m, n, dtype=torch.bool, device=device)
    return tiles.patterns[kind, :m, :n].bool()


def _compute_scores(q: Tensor, k: Tensor, row: QueryRow, given: Given, scale: float) -> Tensor:
    """Returns the scores [B, m, n], -inf where a pair does not count."""
    s = q[:, row.queries, row.head] @ k[:, row.keys, row.key_head].mT * scale
    (B, T, H), S = q.shape[:3], k.shape[1]
    pairs = row.pairs
    if given.added is not None:
        added = given.added.expand(B, H, T, S)[:, row.head]
        s = s + added[:, row.queries[:, None], row.keys].to(s.dtype)
    if given.table is not None:
        table = given.table[row.head if given.table.shape[0] > 1 else 0]
        s = s + table[row.keys - row.queries[:, None] + T - 1].to(s.dtype)
    if given.ids_q is not None and given.ids_k is not None:
        pairs = pairs & (given.ids_q[:, row.queries, None] == given.ids_k[:, None, row.keys])
    return s.masked_fill(~pairs, -torch.inf)


def _dropout_factors(row: QueryRow, given: Given, dtype: torch.dtype) -> Tensor | float:
    """Returns the factors of the probabilities, [B, m, n], or 1 if there is no dropout."""
    return 1.0 if given.dropped is None else factors(given.dropped, row.head, row.queries, row.keys, dtype)
