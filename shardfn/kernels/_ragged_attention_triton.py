"""Attention of ragged tokens over a paged cache, in Triton: a program for each row of a token.

A single tile shape serves all plans. Products and sums are Triton's, so a row's bits are fixed on a device, but differ
from a CPU.
"""

from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._ragged_attention import LARGEST, TILE, check_plan, find_slots, view_rows, write_cache
from ._triton import added, greatest, launch


def ragged_attention(
    q: Tensor, k: Tensor, v: Tensor, cache: Tensor, slots: Tensor, positions: Tensor, sequences: Tensor, tables: Tensor,
    scale: float, window: int | None, softcap: float | None, slopes: Tensor | None, sinks: Tensor | None,
    tree: Tensor | None, rows: Tensor | None, relative: Tensor | None, images: Tensor | None, branch: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Returns fp32 [R, H, K] and [R, H] of R queries. Writes the cache [blocks, parts, G, block, row]."""
    check_plan(cache, slots, positions, sequences, tables, window, tree, rows)
    write_cache(k, v, cache, slots)
    (R, H, K), G = q.shape, k.shape[1]
    places = find_slots(cache.shape[3], slots, positions, sequences, tables, window, tree, images, branch)
    if rows is not None:
        places, positions = places[rows.long()], positions[rows.long()]
    y, lse, width = q.new_empty(R, H, K), q.new_empty(R, H), max(16, triton.next_power_of_2(K))
    given = (None if x is None else x.contiguous() for x in (slopes, sinks, relative))
    scores = (scale, 0.0) if softcap is None else (scale / softcap, softcap)
    # Codes are bytes, and scales the last of each row's float32 numbers.
    scales = view_rows(cache).view(torch.float32) if cache.dtype in LARGEST else None
    tensors = q.contiguous(), view_rows(cache), scales, places, positions, *given, y, lse
    reach = 0 if relative is None else relative.shape[1]
    args = *tensors, *scores, places.shape[1], H, G, cache.shape[3], reach
    codes = {torch.int8: 1, torch.float8_e4m3fn: 2}.get(cache.dtype, 0)
    sizes = {"K": K, "ROW": cache.shape[-1], "WIDTH": width, "N": TILE, "PARTS": cache.shape[1]}
    launch(_row_kernel, R * H, q.device, *args, **sizes, CODES=codes)
    return y, lse


@triton.jit
@no_type_check
def _decode_values(x, CODES: tl.constexpr):
    """Returns floats, or the numbers of codes: bytes of int8, and then of float8_e4m3fn."""
    if CODES == 1:
        return x.to(tl.int8, bitcast=True).to(tl.float32)
    elif CODES == 2:
        code = x.to(tl.int32)
        size = code & 127
        large = ((size << 20) + (120 << 23)).to(tl.float32, bitcast=True)
        value = tl.where(size < 8, size.to(tl.float32) * 0.001953125, large)
        return tl.where(code >= 128, -value, value)
    else:
        return x.to(tl.float32)


@triton.jit
@no_type_check
def _row_kernel(
    q, cache, scales, places, positions, slopes, sinks, relative, y, lse, scale, cap, end, H, G, block, reach,
    K: tl.constexpr, ROW: tl.constexpr, WIDTH: tl.constexpr, N: tl.constexpr, CODES: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Computes a head of a query."""
    program = tl.program_id(0).to(tl.int64)
    i, h = program // H, program % H
    n, d, g = tl.arange(0, N), tl.arange(0, WIDTH), h // (H // G)
    own = tl.load(q + program * K + d, mask=d < K, other=0.0)
    top, total = tl.full([1], float("-inf"), tl.float32), tl.full([1], 0.0, tl.float32)
    if sinks is not None:
        top = tl.load(sinks + h + tl.arange(0, 1))
        total = tl.where(top > float("-inf"), 1.0, 0.0)
    sum = tl.full([WIDTH], 0.0, tl.float32)
    for begin in range(0, end, N):
        place = tl.load(places + i * end + begin + n)
        seen = place >= 0
        place = tl.where(seen, place, 0)
        row = (place // block * PARTS * G + g) * block + place % block
        at = (row * ROW)[:, None] + d[None, :]
        mask = seen[:, None] & (d < K)[None, :]
        key = _decode_values(tl.load(cache + at, mask=mask, other=0), CODES)
        if CODES != 0:
            key = key * tl.load(scales + (row + 1) * (ROW // 4) - 1, mask=seen, other=0.0)[:, None]
        x = tl.reduce(key * own[None, :], 1, added) * scale
        if cap != 0:
            e = tl.exp(-2.0 * tl.abs(x))
            x = tl.where(x < 0, e - 1.0, 1.0 - e) / (1.0 + e) * cap
        if slopes is not None:
            x -= tl.load(slopes + h) * (tl.load(positions + i) - begin - n).to(tl.float32)
        if relative is not None:
            away = tl.load(positions + i) - begin - n
            away = tl.minimum(tl.maximum(away, 0), reach - 1)
            x += tl.load(relative + h * reach + away)
        x = tl.where(seen, x, float("-inf"))
        most = tl.maximum(top, tl.reduce(x, 0, greatest))
        shift = tl.where(most == float("-inf"), 0.0, most)
        weights, before = tl.exp(x - shift), tl.exp(top - shift)
        value = _decode_values(tl.load(cache + (PARTS - 1) * G * block * ROW + at, mask=mask, other=0), CODES)
        if CODES != 0:
            value = (
                value
                * tl.load(scales + (row + (PARTS - 1) * G * block + 1) * (ROW // 4) - 1, mask=seen, other=0.0)[:, None]
            )
        total = total * before + tl.reduce(weights, 0, added)
        sum = sum * before + tl.reduce(value * weights[:, None], 0, added)
        top = most
    out = tl.where(total == 0.0, 0.0, sum / tl.where(total == 0.0, 1.0, total))
    tl.store(y + program * K + d, out, mask=d < K)
    tl.store(lse + program + tl.arange(0, 1), top + tl.log(total))
