"""Attention over the tiles of a layout, in Triton: a program walks along the tiles of some queries, or of some keys.

Products of 16-bit values are summed in fp32: probabilities and gradients of probabilities are rounded to 16 bits in
between. fp64 is computed by the reference.
"""

from typing import Any, NamedTuple, no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import _block_sparse_attention as sparse
from ._block_sparse_attention import LEVELS, QKV, Given, Tiles, takes_backward, takes_forward
from ._triton import added as plus
from ._triton import ceil, greatest, launch, threefry

MOST = 64  # rows held by a program, unless the rows are too wide


def forward(q: Tensor, k: Tensor, v: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    """Returns y [B, T, H, K] and lse [B, H, T]."""
    run = sparse.BLOCK_SPARSE_ATTENTION.reference if q.dtype == torch.float64 else _attend
    return run(q, k, v, *args)


def backward(dy: Tensor, *args: Any) -> QKV:
    """Returns the gradients of q, k and v."""
    run = sparse.BLOCK_SPARSE_ATTENTION_BACKWARD.reference if dy.dtype == torch.float64 else _differentiate
    return run(dy, *args)


@takes_forward
def _attend(qkv: QKV, tiles: Tiles, given: Given, block: int, scale: float) -> tuple[Tensor, Tensor]:
    q, k, v = (x.contiguous() for x in qkv)
    (B, T, H, _), M = q.shape, _block_sides(q, block)
    y, lse = torch.empty_like(q), q.new_empty(B, H, T, dtype=torch.float32)
    num = B * H * ceil(T, block) * M["PARTS"]
    launch(_forward_kernel, num, q.device, q, k, v, *_kernel_arguments(q, k, tiles, given, scale), y, lse, **M)
    return y, lse


@takes_backward
def _differentiate(
    dy: Tensor, qkv: QKV, lse: Tensor, delta: Tensor, tiles: Tiles, given: Given, block: int, scale: float
) -> QKV:
    q, k, v = (x.contiguous() for x in qkv)
    dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
    (B, T, H, _), (S, G), sides = q.shape, k.shape[1:3], _block_sides(q, block)
    outer, arguments = (dy.contiguous(), lse.contiguous(), delta), _kernel_arguments(q, k, tiles, given, scale)
    num = B * H * ceil(T, block) * sides["PARTS"]
    launch(_backward_queries, num, q.device, q, k, v, *arguments, *outer, dq, **sides)
    turned = _sort_by_column(tiles, ceil(S, block))
    num = B * G * ceil(S, block) * sides["PARTS"]
    launch(_backward_keys, num, q.device, q, k, v, *arguments, *outer, *turned, dk, dv, **sides)
    return dq, dk, dv


class Turned(NamedTuple):
    """Tiles column by column: column j of layout l has the tiles order[starts[l, j] .. starts[l, j + 1]].

    Attributes:
        starts: [L, M + 1].
        order: numbers of tiles.
        rows: row of each tile by number, the tile's block of queries.
    """

    starts: Tensor
    order: Tensor
    rows: Tensor


def _sort_by_column(tiles: Tiles, num_columns: int) -> Turned:
    (L, N), device = (tiles.starts.shape[0], tiles.starts.shape[1] - 1), tiles.starts.device
    counts = tiles.starts.diff(dim=1).flatten().long()
    row = torch.arange(L * N, device=device).repeat_interleave(counts, output_size=tiles.columns.numel())
    place = row // max(N, 1) * num_columns + tiles.columns
    ordered, order = place.sort(stable=True)
    first = torch.arange(L, device=device)[:, None] * num_columns + torch.arange(num_columns + 1, device=device)
    starts = torch.searchsorted(ordered, first)
    return Turned(starts.int(), order.int(), (row % max(N, 1)).int())


def _block_sides(q: Tensor, block: int) -> dict[str, Any]:
    """Returns the sizes of a program's blocks: rows of a tile, and the width of a row, rounded up to powers of two."""
    K = q.shape[-1]
    width = max(16, 1 << (K - 1).bit_length())
    most = max(16, min(MOST, (1 << 15) // (width * q.element_size())))
    rows = min(most, max(16, 1 << (block - 1).bit_length()))
    # Triton's interpreter, on a CPU, multiplies the bits of bf16 as whole numbers.
    widened = q.dtype == torch.bfloat16 and q.device.type == "cpu"
    return {"K": K, "BLOCK": block, "WIDTH": width, "ROWS": rows, "PARTS": ceil(block, rows), "WIDENED": widened}


def _kernel_arguments(q: Tensor, k: Tensor, tiles: Tiles, given: Given, scale: float) -> tuple[Any, ...]:
    (B, T, H, _), (S, G) = q.shape, k.shape[1:3]
    added = None if given.added is None else given.added.float().expand(B, H, T, S)
    table = None if given.table is None else given.table.float().contiguous()
    ids = (None if x is None else x.contiguous() for x in given[:2])
    strides = (0,) * 4 if added is None else added.stride()
    heads = 0 if table is None or table.shape[0] == 1 else T + S - 1
    sizes = T, S, H, G, tiles.starts.shape[0]
    keys, level, *first = given.dropped or (None, 0, 0, 0, 0)
    dropped = None if keys is None else keys.contiguous(), level, LEVELS / (LEVELS - level), *first
    return *(x.contiguous() for x in tiles), *ids, added, *strides, table, heads, *dropped, *sizes, scale


@triton.jit
@no_type_check
def _dropout_factors(keys, b, head, t, s, level, kept):
    """Returns the factors [m, n] of queries [m, 1] and keys [1, n], by global positions.

    `kept`, or 0 for dropped pairs.
    """
    own, zero = keys + b * 2, s * 0  # the interpreter wraps around only in tensors
    k0, k1 = tl.load(own + zero).to(tl.uint32), tl.load(own + 1 + zero).to(tl.uint32)
    k0, k1 = threefry(k0, k1, zero.to(tl.uint32), (head + zero).to(tl.uint32))
    x0, x1 = threefry(k0, k1, (t + zero).to(tl.uint32), (s // 4 + 0 * t).to(tl.uint32))
    word = tl.where(s % 4 < 2, x0, x1)
    number = tl.where(s % 2 == 0, word & 0xFFFF, word >> 16).to(tl.int32)
    return tl.where(number >= level, kept, 0.0)


@triton.jit
@no_type_check
def _rows_of(x, at, mask, d, stride, K: tl.constexpr, WIDENED: tl.constexpr):
    """Loads rows [ROWS, WIDTH] of a head, zeros beyond the end."""
    rows = tl.load(x + at[:, None] * stride + d[None, :], mask=mask[:, None] & (d < K)[None, :], other=0.0)
    return rows.to(tl.float32) if WIDENED else rows


@triton.jit
@no_type_check
def _compute_scores(
    q, k, r, c, i, j, b, h, kind, patterns, ids_q, ids_k, added, s_b, s_h, s_t, s_s, table, table_head, T, S, scale,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Returns the scores [ROWS, ROWS], -inf where a pair does not count. r and c lie in tile (i, j)."""
    t, s = (i * BLOCK + r)[:, None], (j * BLOCK + c)[None, :]
    counts = ((r < BLOCK)[:, None] & (t < T)) & ((c < BLOCK)[None, :] & (s < S))
    x = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    if added is not None:
        x += tl.load(added + b * s_b + h * s_h + t.to(tl.int64) * s_t + s * s_s, mask=counts, other=0.0)
    if table is not None:
        x += tl.load(table + h * table_head + s - t + T - 1, mask=counts, other=0.0)
    if ids_q is not None:
        id = tl.load(ids_q + b * T + t, mask=t < T, other=0)
        counts = counts & (id == tl.load(ids_k + b * S + s, mask=s < S, other=0))
    place = patterns + kind.to(tl.int64) * BLOCK * BLOCK + r[:, None] * BLOCK + c[None, :]
    # A vector of bools: the interpreter takes no mask made of a scalar and a tensor.
    pattern = tl.load(place, mask=counts & (kind + 0 * c >= 0)[None, :], other=1)
    return tl.where(counts & (pattern != 0), x, float("-inf"))


@triton.jit
@no_type_check
def _forward_kernel(
    q, k, v, starts, columns, kinds, patterns, ids_q, ids_k, added, s_b, s_h, s_t, s_s, table, table_head,
    keys, level, kept, head0, query0, key0, T, S, H, G, L, scale, y, lse,
    K: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, PARTS: tl.constexpr,
    WIDENED: tl.constexpr,
):  # fmt: skip
    """Computes the forward of some queries of a head."""
    program, N = tl.program_id(0).to(tl.int64), (T + BLOCK - 1) // BLOCK
    r, i = program % PARTS * ROWS + tl.arange(0, ROWS), program // PARTS % N
    h, b = program // PARTS // N % H, program // PARTS // N // H
    d, t, g = tl.arange(0, WIDTH), i * BLOCK + r, h // (H // G)
    mine = (r < BLOCK) & (t < T)
    own = _rows_of(q + (b * T * H + h) * K, t, mine, d, H * K, K, WIDENED)
    top, total = tl.full([ROWS], float("-inf"), tl.float32), tl.full([ROWS], 0.0, tl.float32)
    sum = tl.full([ROWS, WIDTH], 0.0, tl.float32)
    row = starts + tl.where(L > 1, h, 0) * (N + 1) + i
    for at in range(tl.load(row), tl.load(row + 1)):
        j, kind = tl.load(columns + at).to(tl.int64), tl.load(kinds + at)
        for c0 in range(0, BLOCK, ROWS):
            c = c0 + tl.arange(0, ROWS)
            theirs, head = (c < BLOCK) & (j * BLOCK + c < S), (b * S * G + g) * K
            key = _rows_of(k + head, j * BLOCK + c, theirs, d, G * K, K, WIDENED)
            x = _compute_scores(
                own, key, r, c, i, j, b, h, kind, patterns, ids_q, ids_k, added, s_b, s_h, s_t, s_s, table, table_head,
                T, S, scale, BLOCK,
            )  # fmt: skip
            most = tl.maximum(top, tl.reduce(x, 1, greatest))
            shift = tl.where(most == float("-inf"), 0.0, most)
            p, before = tl.exp(x - shift[:, None]), tl.exp(top - shift)
            total = total * before + tl.reduce(p, 1, plus)
            if keys is not None:
                p *= _dropout_factors(
                    keys, b, h + head0, (t + query0)[:, None], (j * BLOCK + c + key0)[None, :], level, kept
                )
            value = _rows_of(v + head, j * BLOCK + c, theirs, d, G * K, K, WIDENED)
            sum = sum * before[:, None] + tl.dot(p.to(value.dtype), value, input_precision="ieee")
            top = most
    none = total == 0.0
    total = tl.where(none, 1.0, total)
    out = sum / total[:, None]
    place = y + (b * T * H + h) * K + t[:, None] * (H * K) + d[None, :]
    tl.store(place, out.to(y.dtype.element_ty), mask=mine[:, None] & (d < K)[None, :])
    tl.store(lse + (b * H + h) * T + t, tl.where(none, float("-inf"), top + tl.log(total)), mask=mine)


@triton.jit
@no_type_check
def _backward_queries(
    q, k, v, starts, columns, kinds, patterns, ids_q, ids_k, added, s_b, s_h, s_t, s_s, table, table_head,
    keys, level, kept, head0, query0, key0, T, S, H, G, L, scale, dy, lse, delta, dq,
    K: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, PARTS: tl.constexpr,
    WIDENED: tl.constexpr,
):  # fmt: skip
    """Computes the gradient of some queries of a head."""
    program, N = tl.program_id(0).to(tl.int64), (T + BLOCK - 1) // BLOCK
    r, i = program % PARTS * ROWS + tl.arange(0, ROWS), program // PARTS % N
    h, b = program // PARTS // N % H, program // PARTS // N // H
    d, t, g, head = tl.arange(0, WIDTH), i * BLOCK + r, h // (H // G), (b * T * H + h) * K
    mine = (r < BLOCK) & (t < T)
    own, cotangent = (
        _rows_of(q + head, t, mine, d, H * K, K, WIDENED),
        _rows_of(dy + head, t, mine, d, H * K, K, WIDENED),
    )
    by = tl.load(lse + (b * H + h) * T + t, mask=mine, other=0.0)
    by = tl.where(by == float("-inf"), 0.0, by)
    less = tl.load(delta + (b * H + h) * T + t, mask=mine, other=0.0)
    sum = tl.full([ROWS, WIDTH], 0.0, tl.float32)
    row = starts + tl.where(L > 1, h, 0) * (N + 1) + i
    for at in range(tl.load(row), tl.load(row + 1)):
        j, kind = tl.load(columns + at).to(tl.int64), tl.load(kinds + at)
        for c0 in range(0, BLOCK, ROWS):
            c = c0 + tl.arange(0, ROWS)
            theirs, place = (c < BLOCK) & (j * BLOCK + c < S), (b * S * G + g) * K
            key = _rows_of(k + place, j * BLOCK + c, theirs, d, G * K, K, WIDENED)
            value = _rows_of(v + place, j * BLOCK + c, theirs, d, G * K, K, WIDENED)
            x = _compute_scores(
                own, key, r, c, i, j, b, h, kind, patterns, ids_q, ids_k, added, s_b, s_h, s_t, s_s, table, table_head,
                T, S, scale, BLOCK,
            )  # fmt: skip
            dp = tl.dot(cotangent, tl.trans(value), input_precision="ieee")
            if keys is not None:
                dp *= _dropout_factors(
                    keys, b, h + head0, (t + query0)[:, None], (j * BLOCK + c + key0)[None, :], level, kept
                )
            ds = tl.exp(x - by[:, None]) * (dp - less[:, None])
            sum += tl.dot(ds.to(key.dtype), key, input_precision="ieee")
    place = dq + head + t[:, None] * (H * K) + d[None, :]
    tl.store(place, (sum * scale).to(dq.dtype.element_ty), mask=mine[:, None] & (d < K)[None, :])


@triton.jit
@no_type_check
def _backward_keys(
    q, k, v, starts, columns, kinds, patterns, ids_q, ids_k, added, s_b, s_h, s_t, s_s, table, table_head,
    keys, level, kept, head0, query0, key0, T, S, H, G, L, scale, dy, lse, delta, column_starts, order, rows, dk, dv,
    K: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, PARTS: tl.constexpr,
    WIDENED: tl.constexpr,
):  # fmt: skip
    """Computes the gradients of some keys and values of a key head.

    Sums over the query heads that read the key head.
    """
    program, M = tl.program_id(0).to(tl.int64), (S + BLOCK - 1) // BLOCK
    c, j = program % PARTS * ROWS + tl.arange(0, ROWS), program // PARTS % M
    g, b = program // PARTS // M % G, program // PARTS // M // G
    d, s, place = tl.arange(0, WIDTH), j * BLOCK + c, (b * S * G + g) * K
    mine = (c < BLOCK) & (s < S)
    key, value = _rows_of(k + place, s, mine, d, G * K, K, WIDENED), _rows_of(v + place, s, mine, d, G * K, K, WIDENED)
    sum_k, sum_v = tl.full([ROWS, WIDTH], 0.0, tl.float32), tl.full([ROWS, WIDTH], 0.0, tl.float32)
    for h in range(g * (H // G), (g + 1) * (H // G)):
        column, head = column_starts + tl.where(L > 1, h, 0) * (M + 1) + j, (b * T * H + h) * K
        for n in range(tl.load(column), tl.load(column + 1)):
            at = tl.load(order + n)
            i, kind = tl.load(rows + at).to(tl.int64), tl.load(kinds + at)
            for r0 in range(0, BLOCK, ROWS):
                r = r0 + tl.arange(0, ROWS)
                t = i * BLOCK + r
                theirs = (r < BLOCK) & (t < T)
                own, cotangent = (
                    _rows_of(q + head, t, theirs, d, H * K, K, WIDENED),
                    _rows_of(dy + head, t, theirs, d, H * K, K, WIDENED),
                )
                by = tl.load(lse + (b * H + h) * T + t, mask=theirs, other=0.0)
                by = tl.where(by == float("-inf"), 0.0, by)
                less = tl.load(delta + (b * H + h) * T + t, mask=theirs, other=0.0)
                x = _compute_scores(
                    own, key, r, c, i, j, b, h, kind, patterns, ids_q, ids_k, added, s_b, s_h, s_t, s_s, table,
                    table_head, T, S, scale, BLOCK,
                )  # fmt: skip
                p, dp = tl.exp(x - by[:, None]), tl.dot(cotangent, tl.trans(value), input_precision="ieee")
                ds = p * (dp - less[:, None])
                if keys is not None:
                    factor = _dropout_factors(
                        keys, b, h + head0, (t + query0)[:, None], (s + key0)[None, :], level, kept
                    )
                    ds, p = p * (factor * dp - less[:, None]), factor * p
                sum_v += tl.dot(tl.trans(p.to(own.dtype)), cotangent, input_precision="ieee")
                sum_k += tl.dot(tl.trans(ds.to(own.dtype)), own, input_precision="ieee")
    at = s[:, None] * (G * K) + d[None, :]
    here = mine[:, None] & (d < K)[None, :]
    tl.store(dk + place + at, (sum_k * scale).to(dk.dtype.element_ty), mask=here)
    tl.store(dv + place + at, sum_v.to(dv.dtype.element_ty), mask=here)
