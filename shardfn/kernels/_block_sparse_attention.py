"""Attention over the tiles of a layout: a tile has `block` queries and `block` keys, the last may have fewer.

B samples, T queries, S keys, H query heads, G key heads, K head dim, L layouts (1, or H), N and M blocks of queries and
keys.
"""

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int32, Int64, UInt8
from torch import Tensor

from ._arguments import check_dtype, check_shape, num_threads
from ._build import call
from ._draw import MASK, PARITY, ROTATIONS
from ._op import KernelOp

QKV = tuple[Tensor, Tensor, Tensor]
LEVELS = 1 << 16  # of dropout
# Columns of scores that pass through the softmax together, if blocks are smaller.
_WIDE = 512
# The least number of units of work in a backward.
_PARTS = 16
# Indices after the samples' tensors of the ids and keys of dropout, and of `added`. The tiles are 0 to 3, the table 7.
_OF_SAMPLES, _ADDED = (4, 5, 8), 6
_SOURCE = "_block_sparse_attention.cpp"


class Tiles(NamedTuple):
    """Computed tiles, row by row: row i of layout l has the tiles starts[l, i] .. starts[l, i + 1].

    Attributes:
        starts: [L, N + 1].
        columns: column of each tile, the tile's block of keys, [tiles].
        kinds: kind of each tile, -1 if all pairs of the tile count, else the pattern of the tile, [tiles].
        patterns: counted pairs of each pattern, [patterns, block, block].
    """

    starts: Int32[Tensor, "l n1"]
    columns: Int32[Tensor, " tiles"]
    kinds: Int32[Tensor, " tiles"]
    patterns: UInt8[Tensor, "patterns block block"]


class Dropped(NamedTuple):
    """Dropout of probabilities after the softmax. Kept probabilities are scaled by 2^16 / (2^16 - level).

    Each pair has a number of 16 bits, and is dropped where the number is below `level`. For example level 6554 drops a
    tenth of the pairs. With (k0, k1) = threefry2x32(key of the sample, (0, head)) the numbers of the keys 4 i .. 4 i +
    3 of a query are the quarters of threefry2x32((k0, k1), (query, i)), from the low half of the first word on.

    Attributes:
        keys: keys of each sample, two words of 32 bits, [B, 2].
        level: level in [1, 2^16).
        head: the index in the whole of the first head here.
        query: the index in the whole of the first query here.
        key: the index in the whole of the first key here.

    References:
        Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3, SC 2011, https://doi.org/10.1145/2063384.2063405
    """

    keys: Int64[Tensor, "b 2"]
    level: int
    head: int = 0
    query: int = 0
    key: int = 0


class Given(NamedTuple):
    """Parts of a pair's score in addition to q k. None for a field leaves the part out.

    Attributes:
        ids_q: numbers of queries [B, T]. With ids_k only pairs of the same number count.
        ids_k: numbers of keys, [B, S].
        added: numbers added to the scores, [B or 1, H or 1, T or 1, S or 1]. -inf leaves a pair out.
        table: added by distance: at s - t + T - 1 for query t and key s, [H or 1, T + S - 1].
        dropped: the dropout of probabilities.
    """

    ids_q: Int64[Tensor, "b t"] | None = None
    ids_k: Int64[Tensor, "b s"] | None = None
    added: Float[Tensor, "b h t s"] | None = None
    table: Float[Tensor, "h d"] | None = None
    dropped: Dropped | None = None


def block_sparse_attention(
    q_BTHK: Float[Tensor, "b t h k"],
    k_BSGK: Float[Tensor, "b s g k"],
    v_BSGK: Float[Tensor, "b s g k"],
    tiles: Tiles,
    given: Given = Given(),  # noqa: B008  # a value
    *,
    block: int,
    scale: float,
) -> tuple[Float[Tensor, "b t h k"], Float[Tensor, "b h t"]]:
    """Returns softmax(scale q k^T + added) c v over the pairs of some tiles. Query head h reads key head h // (H / G).

        lse = log sum of e^s over the pairs of a row        -inf without pairs
        y = sum of c e^(s - lse) v                          0 without pairs

    with c = 1, or the factor of `given.dropped`.

    Computed in fp32, for fp64 in fp64. Time and memory are proportional to the tiles.

    Args:
        q_BTHK: queries in fp64, fp32, bf16 or fp16.
        k_BSGK: keys of the same dtype. G divides H, for example 8 and 32.
        v_BSGK: values.
        tiles: computed tiles, of a single layout for all heads, or of H layouts.
        given: the other parts of scores.
        block: queries, and keys, of a tile.
        scale: factor of q k.

    Returns:
        y, of the dtype of q, and lse, fp32 or fp64.

    Raises:
        TypeError: other dtypes, or unequal dtypes.
        ValueError: shapes do not fit, or G does not divide H.

    Example:
        >>> diagonal = Tiles(*(torch.tensor(x, dtype=torch.int32) for x in ([[0, 1, 2]], [0, 1], [-1, -1])),
        ...                  torch.ones(0, 2, 2, dtype=torch.uint8))
        >>> v = torch.arange(4.0).view(1, 4, 1, 1)
        >>> block_sparse_attention(v * 0, v, v, diagonal, block=2, scale=1.0)[0].flatten()
        tensor([0.5000, 0.5000, 2.5000, 2.5000])

    References:
        Child et al., Generating Long Sequences with Sparse Transformers, 2019, https://arxiv.org/abs/1904.10509
        Dao et al., FlashAttention, 2022, https://arxiv.org/abs/2205.14135
    """
    _check_shapes(q_BTHK, k_BSGK, v_BSGK, tiles, given, block)
    rest = *tiles, *_flatten_given(given), block, float(scale)
    return BLOCK_SPARSE_ATTENTION(q_BTHK, k_BSGK, v_BSGK, *rest)


def block_sparse_attention_backward(
    dy_BTHK: Float[Tensor, "b t h k"],
    qkv: tuple[Tensor, Tensor, Tensor],
    y_BTHK: Float[Tensor, "b t h k"],
    lse_BHT: Float[Tensor, "b h t"],
    tiles: Tiles,
    given: Given = Given(),  # noqa: B008  # a value
    *,
    block: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of `block_sparse_attention`, with p = e^(s - lse) and delta = (dy y) summed over K.

        dv = (c p)^T dy;  ds = p (c dy v^T - delta);  dq = scale ds k;  dk = scale ds^T q

    Args:
        dy_BTHK: cotangent of y.
        qkv: queries, keys and values.
        y_BTHK: the result.
        lse_BHT: the other result.
        tiles: tiles as in the forward, like the following.
        given: the other parts of scores.
        block: queries, and keys, of a tile.
        scale: factor of q k.

    Returns:
        dq, dk and dv, of the shapes and dtype of q, k and v.

    Raises:
        TypeError: other dtypes, or unequal dtypes.
        ValueError: shapes do not fit.

    Example:
        >>> one = Tiles(*(torch.tensor(x, dtype=torch.int32) for x in ([[0, 1]], [0], [-1])),
        ...             torch.ones(0, 2, 2, dtype=torch.uint8))
        >>> v = torch.arange(2.0).view(1, 2, 1, 1)
        >>> y, lse = block_sparse_attention(v * 0, v, v, one, block=2, scale=1.0)
        >>> block_sparse_attention_backward(v, (v * 0, v, v), y, lse, one, block=2, scale=1.0)[2].flatten()
        tensor([0.5000, 0.5000])
    """
    _check_shapes(*qkv, tiles, given, block)
    for name, x in (("dy", dy_BTHK), ("y", y_BTHK)):
        check_dtype(name, x, qkv[0].dtype)
        check_shape(name, x, tuple(qkv[0].shape), "that of q")
    return BLOCK_SPARSE_ATTENTION_BACKWARD(
        dy_BTHK, *qkv, y_BTHK, lse_BHT, *tiles, *_flatten_given(given), block, float(scale)
    )


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype in which attention is computed."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _check_shapes(q: Tensor, k: Tensor, v: Tensor, tiles: Tiles, given: Given, block: int) -> None:
    BLOCK_SPARSE_ATTENTION.check_dtype("q", q)
    (B, T, H, K), (S, G) = q.shape, k.shape[1:3]
    for name, x in (("k", k), ("v", v)):
        check_dtype(name, x, q.dtype)
        check_shape(name, x, (B, S, G, K), "samples and head dim of q, keys and key heads of k")
    if H % max(G, 1):
        raise ValueError(f"{H} query heads over {G} key heads: the latter must divide the former")
    L = tiles.starts.shape[0]
    if L not in (1, H):
        raise ValueError(f"tiles must have 1 layout for all heads, or {H} layouts for {H} query heads, got {L}")
    check_shape("tiles.starts", tiles.starts, (L, -(-T // block) + 1), f"{T} queries in blocks of {block}")
    check_shape("tiles.kinds", tiles.kinds, tuple(tiles.columns.shape), "one a tile")
    check_shape("tiles.patterns", tiles.patterns, (tiles.patterns.shape[0], block, block), f"blocks of {block}")
    _check_given(given, (B, T, S, H))


def _check_given(given: Given, sizes: tuple[int, int, int, int]) -> None:
    B, T, S, H = sizes
    shapes = (B, T), (B, S), (B, H, T, S), (H, T + S - 1)
    for name, x, shape in zip(given._fields[:4], given[:4], shapes, strict=True):
        free = name in ("added", "table")
        if x is not None and not all(n == m or (free and n == 1) for n, m in zip(x.shape, shape, strict=True)):
            raise ValueError(f"given.{name} is of shape {tuple(x.shape)}, must be {shape}" + ", or 1" * free)
    if given.dropped is not None:
        check_shape("given.dropped.keys", given.dropped.keys, (B, 2), f"{B} samples")
        if not 0 < given.dropped.level < 1 << 16:
            raise ValueError(f"given.dropped.level is {given.dropped.level}, must be in [1, 2**16): leave it out for 0")


def _flatten_given(given: Given) -> tuple[Any, ...]:
    return *given[:4], *(given.dropped or (None, 0, 0, 0, 0))


def _split_arguments(args: tuple[Any, ...]) -> tuple[Tiles, Given, int, float]:
    """Makes the op's last arguments into (tiles, given, block, scale)."""
    *found, block, scale = args
    dropped = None if found[8] is None else Dropped(*found[8:])
    return Tiles(*found[:4]), Given(*found[4:8])._replace(dropped=dropped), block, scale


def takes_forward(attend: Callable[..., Any]) -> Callable[..., Any]:
    """Makes an implementation `attend(qkv, tiles, given, block, scale)` take the arguments of the op."""

    def run_forward(q: Tensor, k: Tensor, v: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
        if not q.numel() or not k.numel():
            return torch.zeros_like(q, memory_format=torch.contiguous_format), _empty_lse(q).fill_(-torch.inf)
        return attend((q, k, v), *_split_arguments(args))

    return run_forward


def takes_backward(differentiate: Callable[..., Any]) -> Callable[..., Any]:
    """Makes an implementation `differentiate(dy, qkv, lse, delta, tiles, ...)` take the arguments of the op."""

    def run_backward(dy: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, lse: Tensor, *args: Any) -> QKV:
        if not q.numel() or not k.numel():
            dq, dk, dv = (torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
            return dq, dk, dv
        dtype = sum_dtype(q.dtype)
        delta_BHT = (dy.to(dtype) * y.to(dtype)).sum(-1).transpose(1, 2).contiguous()
        return differentiate(dy, (q, k, v), lse, delta_BHT, *_split_arguments(args))

    return run_backward


def _empty_lse(q: Tensor) -> Tensor:
    B, T, H, _ = q.shape
    return q.new_empty(B, H, T, dtype=sum_dtype(q.dtype))


# The definition: a block of queries of a head at a time, over the block's keys.


class _QueryRow(NamedTuple):
    """Block of queries of a head, of all samples: heads, positions of queries and keys, and counted pairs."""

    head: int
    key_head: int
    queries: Tensor
    keys: Tensor
    pairs: Tensor


@takes_forward
def _attend_by_torch(qkv: QKV, tiles: Tiles, given: Given, block: int, scale: float) -> tuple[Tensor, Tensor]:
    """Returns y [B, T, H, K] and lse [B, H, T]."""
    q, k, v = (x.to(sum_dtype(x.dtype)) for x in qkv)
    y, lse = torch.zeros_like(q), q.new_full((q.shape[0], q.shape[2], q.shape[1]), -torch.inf)
    for row in _iterate_rows(qkv, tiles, block):
        s = _compute_scores(q, k, row, given, scale)
        own = s.logsumexp(-1)
        p = (s - own.masked_fill(own == -torch.inf, 0.0)[..., None]).exp()
        y[:, row.queries, row.head] = p * _dropout_factors(row, given, p.dtype) @ v[:, row.keys, row.key_head]
        lse[:, row.head, row.queries] = own
    return y.to(qkv[0].dtype), lse


@takes_backward
def _backward_by_torch(
    dy: Tensor, qkv: QKV, lse: Tensor, delta: Tensor, tiles: Tiles, given: Given, block: int, scale: float
) -> QKV:
    """Returns the gradients of q, k and v."""
    q, k, v = (x.to(sum_dtype(x.dtype)) for x in qkv)
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


def _iterate_rows(qkv: QKV, tiles: Tiles, block: int) -> Iterator[_QueryRow]:
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
                yield _QueryRow(h, h // (H // G), queries, keys, pairs)


def _load_pattern(tiles: Tiles, kind: int, m: int, n: int, device: torch.device) -> Tensor:
    if kind < 0:
        return torch.ones(m, n, dtype=torch.bool, device=device)
    return tiles.patterns[kind, :m, :n].bool()


def _compute_scores(q: Tensor, k: Tensor, row: _QueryRow, given: Given, scale: float) -> Tensor:
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


def _dropout_factors(row: _QueryRow, given: Given, dtype: torch.dtype) -> Tensor | float:
    """Returns the factors of the probabilities, [B, m, n], or 1 if there is no dropout."""
    return 1.0 if given.dropped is None else dropout_factors(given.dropped, row.head, row.queries, row.keys, dtype)


# Dropout: threefry2x32 of each pair. `core` draws the same numbers, but kernels import no other room.


def dropout_factors(dropped: Dropped, head: int, queries: Tensor, keys: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the factors of the pairs of some queries [m] and keys [n] of one head: [B, m, n].

    Example:
        >>> dropped = Dropped(torch.tensor([[0, 7]]), level=1 << 15)
        >>> dropout_factors(dropped, 0, torch.arange(2), torch.arange(4), torch.float32).tolist()
        [[[2.0, 2.0, 0.0, 0.0], [0.0, 2.0, 2.0, 0.0]]]
    """
    own = _apply_threefry(
        dropped.keys.unbind(-1), torch.zeros_like(keys[:1]), torch.full_like(keys[:1], dropped.head + head)
    )
    key, at = (own[0][:, None, None], own[1][:, None, None]), keys + dropped.key
    first, second = _apply_threefry(key, (queries + dropped.query)[:, None], at // 4)
    lanes = torch.where(at % 4 < 2, first, second) >> 16 * (at % 2) & LEVELS - 1
    return (lanes >= dropped.level).to(dtype) * (LEVELS / (LEVELS - dropped.level))


def _apply_threefry(key: tuple[Tensor, ...], hi: Tensor, lo: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the two words of the counters (hi, lo), as numbers in [0, 2^32)."""
    ks = (*key, key[0] ^ key[1] ^ PARITY)
    x0, x1 = hi + ks[0] & MASK, lo + ks[1] & MASK
    for i in range(5):
        for r in ROTATIONS[i % 2]:
            x0 = x0 + x1 & MASK
            x1 = (x1 << r | x1 >> 32 - r) & MASK ^ x0
        x0, x1 = x0 + ks[(i + 1) % 3] & MASK, x1 + ks[(i + 2) % 3] + i + 1 & MASK
    return x0, x1


# In C++.


@takes_forward
def _attend_natively(qkv: QKV, tiles: Tiles, given: Given, block: int, scale: float) -> tuple[Tensor, Tensor]:
    """Returns y [B, T, H, K] and lse [B, H, T]."""
    B, T, H, _ = qkv[0].shape
    q, k, v = (_widen_input(x) for x in qkv)
    y, lse = torch.empty_like(q), q.new_empty(B, H, T)
    _run_kernel((q, k, v), tiles, given, block, scale, (y, lse), back=False)
    return y.to(qkv[0].dtype), lse


@takes_backward
def _backward_natively(
    dy: Tensor, qkv: QKV, lse: Tensor, delta: Tensor, tiles: Tiles, given: Given, block: int, scale: float
) -> QKV:
    """Returns the gradients of q, k and v."""
    q, k, v = (_widen_input(x) for x in qkv)
    dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
    outer = None, lse.contiguous(), _widen_input(dy), delta, dq, dk, dv
    _run_kernel((q, k, v), tiles, given, block, scale, outer, back=True)
    return dq.to(qkv[0].dtype), dk.to(qkv[0].dtype), dv.to(qkv[0].dtype)


def _widen_input(x: Tensor) -> Tensor:
    return x.to(sum_dtype(x.dtype)).contiguous()


def _run_kernel(
    qkv: QKV, tiles: Tiles, given: Given, block: int, scale: float, outer: tuple[Any, ...], *, back: bool
) -> None:
    q, k, _ = qkv
    (B, T, H, K), (S, G) = q.shape, k.shape[1:3]
    added = None if given.added is None else given.added.to(q.dtype).expand(B, H, T, S)
    table = None if given.table is None else given.table.to(q.dtype).contiguous()
    strides = (0,) * 4 if added is None else added.stride()
    heads = 0 if table is None else table.shape[0]
    keys, *places = given.dropped or (None, 0, 0, 0, 0)
    sizes = B, T, S, H, G, K, block, tiles.starts.shape[0], *strides, heads, *places
    data = (None if x is None else x.contiguous() for x in (given.ids_q, given.ids_k, keys))
    # Held until the call returns, because the call receives the addresses.
    tensors = *qkv, *(x.contiguous() for x in tiles), *data, added, table, *outer
    tensors += (None,) * (19 - len(tensors))
    at = np.array([0 if x is None else x.data_ptr() for x in tensors], np.uint64)
    numbers, factor = np.array((*sizes, num_threads()), np.int64), np.array([scale])
    call("block_sparse_attention", numbers, factor, at, int(q.dtype == torch.float64), int(back), source=_SOURCE)


# Bytes that the C++ allocates during a run.


def count_forward_scratch(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> int:
    """Forward: keys and values padded to whole vectors, a block of queries per thread, and 16-bit values as fp32.

    Example:
        >>> q = torch.empty(1, 4, 1, 16)
        >>> count_forward_scratch(q, q, q, 16, 1.0) - torch.get_num_threads() * 4 * 16 * (2 * 16 + 512 + 2)
        1280
    """
    block, size = int(rest[-2]), _element_bytes(q)
    W, P = _pad_length(q.shape[-1]), _pad_length(block)
    own = block * (2 * W + P * max(_WIDE // P, 1) + 2)
    return _count_packed_bytes(k, block) + num_threads() * own * size + sum(map(_count_widened_bytes, (q, q, k, v)))


def _count_backward_scratch(dy: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, lse: Tensor, *rest: Any) -> int:
    """Backward: keys and values in two layouts, and their gradients once for each part of the queries."""
    del y, lse
    (B, T, H, K), S, block = q.shape, k.shape[1], int(rest[-2])
    W, P = _pad_length(K), _pad_length(block)
    parts = min(-(-T // block), -(-_PARTS // max(B * H, 1)))
    sums, own = B * H * parts * 2 * S * W, block * (3 * W + 2 * P)
    widened = sum(map(_count_widened_bytes, (dy, q, q, k, k, v, v)))
    return 2 * _count_packed_bytes(k, block) + (sums + num_threads() * own) * _element_bytes(q) + widened


def _count_packed_bytes(k: Tensor, block: int) -> int:
    B, S, G, K = k.shape
    return B * G * (-(-S // block) * K * _pad_length(block) + S * _pad_length(K)) * _element_bytes(k)


def _pad_length(n: int) -> int:
    return -(-n // 16) * 16


def _element_bytes(x: Tensor) -> int:
    return max(x.element_size(), 4)


def _count_widened_bytes(x: Tensor) -> int:
    return 4 * x.numel() if x.element_size() == 2 else 0


# Rules for vmap: a mapped dim joins the samples. Mapped tables or tiles get a call each.


def _map_op(name: str, num: int, info: Any, in_dims: Any, *args: Any) -> Any:
    """Maps an op where the first `num` tensors have the samples in dim 0."""
    return _map_by_sample(getattr(torch.ops.shardfn_kernels, name), num, info.batch_size, in_dims, args)


def _map_by_sample(op: Any, num: int, many: int, in_dims: Any, args: Any) -> Any:
    def has_samples(at: int) -> bool:
        x, dim, part = args[at], in_dims[at], at - num
        alone = x is not None and part == _ADDED and dim is None and x.shape[0] == 1
        return at < num or (x is not None and part in (*_OF_SAMPLES, _ADDED) and not alone)

    if any(dim is not None and not has_samples(at) for at, dim in enumerate(in_dims)):
        return _map_in_turn(op, many, in_dims, args)
    samples = args[0].shape[0 if in_dims[0] is None else int(in_dims[0] == 0)]

    def fold_samples(x: Tensor, dim: int | None) -> Tensor:
        x = x.expand(many, *x.shape) if dim is None else x.movedim(dim, 0)
        return x.expand(many, samples, *x.shape[2:]).flatten(0, 1)

    pairs = enumerate(zip(args, in_dims, strict=True))
    outs = op(*(fold_samples(x, dim) if has_samples(at) else x for at, (x, dim) in pairs))
    return tuple(y.unflatten(0, (many, samples)) for y in outs), (0,) * len(outs)


def _map_in_turn(op: Any, many: int, in_dims: Any, args: Any) -> Any:
    def call_op(i: int) -> Any:
        return op(*(x if dim is None else x.select(dim, i) for x, dim in zip(args, in_dims, strict=True)))

    outs = [torch.stack(ys) for ys in zip(*(call_op(i) for i in range(many)), strict=True)]
    return tuple(outs), (0,) * len(outs)


# Operations: two products for each tile of each head, and five in the backward.


def _count_flops(q: Tensor, k: Tensor, v: Tensor, starts: Tensor, columns: Tensor, *rest: Any) -> int:
    del k, v
    return 2 * _count_tile_flops(q, starts, columns, rest[-2])


def _count_backward_flops(dy: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, lse: Tensor, *rest: Any) -> int:
    del dy, k, v, y, lse
    return 5 * _count_tile_flops(q, rest[0], rest[1], rest[-2])


def _count_tile_flops(q: Tensor, starts: Tensor, columns: Tensor, block: int) -> int:
    B, _, H, K = q.shape
    return 2 * B * K * block**2 * columns.shape[0] * (H // max(starts.shape[0], 1))


_TAKES = (
    "Tensor starts, Tensor columns, Tensor kinds, Tensor patterns, Tensor? ids_q, Tensor? ids_k, Tensor? added,"
    " Tensor? table, Tensor? keys, int level, int head, int query, int key, int block, float scale"
)
BLOCK_SPARSE_ATTENTION = KernelOp(
    schema=f"block_sparse_attention(Tensor q, Tensor k, Tensor v, {_TAKES}) -> (Tensor, Tensor)",
    abstract=lambda q, *_: (torch.empty_like(q, memory_format=torch.contiguous_format), _empty_lse(q)),
    reference=_attend_by_torch,
    dtypes=(torch.float64, torch.float32, torch.bfloat16, torch.float16),
    native=_attend_natively,
    source=_SOURCE,
    triton="_block_sparse_attention_triton.forward",
    contiguous=False,
    mapped=functools.partial(_map_op, "block_sparse_attention", 3),
    flops=_count_flops,
    scratch=count_forward_scratch,
)
BLOCK_SPARSE_ATTENTION_BACKWARD = KernelOp(
    schema="block_sparse_attention_backward(Tensor dy, Tensor q, Tensor k, Tensor v, Tensor y, Tensor lse,"
    f" {_TAKES}) -> (Tensor, Tensor, Tensor)",
    abstract=lambda dy, q, k, v, *_: tuple(
        torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v)
    ),
    reference=_backward_by_torch,
    native=_backward_natively,
    source=_SOURCE,
    triton="_block_sparse_attention_triton.backward",
    contiguous=False,
    mapped=functools.partial(_map_op, "block_sparse_attention_backward", 6),
    flops=_count_backward_flops,
    scratch=_count_backward_scratch,
)
