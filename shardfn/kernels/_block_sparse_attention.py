"""Attention over the tiles of a layout: a tile has `block` queries and `block` keys, the last may have fewer.

B samples, T queries, S keys, H query heads, G key heads, K head dim, L layouts (1, or H), N and M blocks of queries and
keys.
"""

from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int32, Int64, UInt8
from torch import Tensor

from shardfn.kernels._arguments import check_dtype, check_shape
from shardfn.kernels._dispatch import implementation
from shardfn.kernels._library import define

from . import _scratch
from ._mapped import register

_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


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
        ids_q: with ids_k: only pairs of the same number count, [B, T].
        ids_k: [B, S].
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
        scale: of q k.

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
    return torch.ops.shardfn_kernels.block_sparse_attention(q_BTHK, k_BSGK, v_BSGK, *rest)


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
        scale: of q k.

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
    return torch.ops.shardfn_kernels.block_sparse_attention_backward(
        dy_BTHK, *qkv, y_BTHK, lse_BHT, *tiles, *_flatten_given(given), block, float(scale)
    )


def wide(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype in which attention is computed."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _check_shapes(q: Tensor, k: Tensor, v: Tensor, tiles: Tiles, given: Given, block: int) -> None:
    if q.dtype not in _FLOATS:
        raise TypeError(f"q must be fp64, fp32, bf16 or fp16, got {q.dtype}. Convert q")
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


def _run_forward(q: Tensor, k: Tensor, v: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    if not q.numel() or not k.numel():
        return torch.zeros_like(q, memory_format=torch.contiguous_format), _empty_lse(q).fill_(-torch.inf)
    return implementation("block_sparse_attention", "forward", q.device)((q, k, v), *_split_arguments(args))


def _run_backward(dy: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, lse: Tensor, *args: Any) -> Any:
    if not q.numel() or not k.numel():
        return tuple(torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    dtype = wide(q.dtype)
    delta_BHT = (dy.to(dtype) * y.to(dtype)).sum(-1).transpose(1, 2).contiguous()
    run = implementation("block_sparse_attention", "backward", q.device)
    return run(dy, (q, k, v), lse, delta_BHT, *_split_arguments(args))


def _empty_lse(q: Tensor) -> Tensor:
    B, T, H, _ = q.shape
    return q.new_empty(B, H, T, dtype=wide(q.dtype))


_TAKES = (
    "Tensor starts, Tensor columns, Tensor kinds, Tensor patterns, Tensor? ids_q, Tensor? ids_k, Tensor? added,"
    " Tensor? table, Tensor? keys, int level, int head, int query, int key, int block, float scale"
)

define(
    f"block_sparse_attention(Tensor q, Tensor k, Tensor v, {_TAKES}) -> (Tensor, Tensor)",
    _run_forward,
    lambda q, *_: (torch.empty_like(q, memory_format=torch.contiguous_format), _empty_lse(q)),
    scratch=_scratch.forward,
)
define(
    f"block_sparse_attention_backward(Tensor dy, Tensor q, Tensor k, Tensor v, Tensor y, Tensor lse, {_TAKES})"
    " -> (Tensor, Tensor, Tensor)",
    _run_backward,
    lambda dy, q, k, v, *_: tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v)),
    scratch=_scratch.backward,
)
register("block_sparse_attention", 3)
register("block_sparse_attention_backward", 6)
