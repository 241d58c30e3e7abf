"""Products of groups of rows with a matrix each, in Triton: a program for each tile of the result.

Tiles of rows lie within a group. There are at most m / ROWS + e + 1 tiles, whatever the counts: the last group has the
rows past all counts, and programs without rows end at once. So counts stay on the device.
"""

from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._grouped_product import CHUNKS, GROUPED_PRODUCT, lay_out
from ._row_linear import sum_chunks
from ._triton import ceil, launch

ROWS, COLUMNS, DEPTH = 32, 64, 32


def grouped_product(x: Tensor, w: Tensor, counts: Tensor, transposed: bool, exact: bool) -> Tensor:
    """Maps x [m, k] and w [e, k, n] or [e, n, k] to [m, n]."""
    if exact and x.dtype == torch.float64:
        return GROUPED_PRODUCT.reference(x, w, counts, transposed, exact)
    (w, transposed), x = lay_out(w, transposed), x.contiguous()
    m, k = x.shape
    n = w.shape[1 if transposed else 2]
    chunks = CHUNKS if exact else 1
    parts = x.new_empty(chunks, m, n)
    tiles = _list_tiles(counts, m)
    across = ceil(n, COLUMNS)
    strides = (1, k) if transposed else (n, 1)
    sizes = m, k, n, w.shape[0], chunks, across, tiles.shape[1], *strides
    # Products of float64 in parts of a matrix are not on every GPU.
    chain = exact or x.dtype == torch.float64
    constants = {"CHAIN": chain, "WIDENED": _is_widened(x), "ROWS": ROWS, "N": COLUMNS, "K": DEPTH}
    launch(_product_kernel, chunks * across * tiles.shape[1], x.device, x, w, tiles, parts, *sizes, **constants)
    return sum_chunks(list(parts.unbind())) if exact else parts[0]


def grouped_outer(x: Tensor, y: Tensor, counts: Tensor) -> Tensor:
    """Maps x [m, k] and y [m, n] to [e, k, n]."""
    (m, k), n, e = x.shape, y.shape[1], counts.shape[0]
    out, ends = x.new_empty(e, k, n), counts.cumsum(0).clamp(max=m)
    down, across = ceil(k, COLUMNS), ceil(n, COLUMNS)
    constants = {"CHAIN": x.dtype == torch.float64, "WIDENED": _is_widened(x), "M": COLUMNS, "N": COLUMNS, "K": DEPTH}
    launch(_outer_kernel, e * down * across, x.device, x, y, ends, out, k, n, down, across, **constants)
    return out


def _is_widened(x: Tensor) -> bool:
    """Returns whether parts of matrices are multiplied in float32: the interpreter's product takes no bfloat16."""
    return x.device.type == "cpu" and x.dtype == torch.bfloat16


def _list_tiles(counts: Tensor, m: int) -> Tensor:
    """Returns the group, the first row and the end of each tile of rows.

    The result is int64 [3, tiles], including tiles without a row.
    """
    ends = counts.cumsum(0).clamp(max=m)
    ends = torch.cat([ends, ends.new_full((1,), m)])
    starts = torch.cat([ends.new_zeros(1), ends[:-1]])
    last = ((ends - starts + ROWS - 1) // ROWS).cumsum(0)
    tile = torch.arange(m // ROWS + len(ends), device=counts.device)
    group = torch.searchsorted(last, tile, right=True).clamp(max=len(ends) - 1)
    first = starts[group] + (tile - torch.cat([last.new_zeros(1), last[:-1]])[group]) * ROWS
    return torch.stack([group, first, torch.minimum(first + ROWS, ends[group])])


@triton.jit
@no_type_check
def _product_kernel(
    x, w, tiles, parts, m, k, n, e, chunks, across, num, along, aside,
    CHAIN: tl.constexpr, WIDENED: tl.constexpr, ROWS: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    tile, column, chunk = program % num, program // num % across * N + tl.arange(0, N), program // (num * across)
    group, first, end = tl.load(tiles + tile), tl.load(tiles + num + tile), tl.load(tiles + 2 * num + tile)
    row = first + tl.arange(0, ROWS)
    here = (row < end)[:, None] & (column < n)[None, :]
    where = parts + (chunk * m + row[:, None]) * n + column[None, :]
    if CHAIN:
        kind: tl.constexpr = x.dtype.element_ty
        total = tl.full((ROWS, N), 0.0, kind)
        if group < e:
            for at in range(chunk * k // chunks, (chunk + 1) * k // chunks):
                left = tl.load(x + row * k + at, mask=row < end, other=0.0)
                right = tl.load(w + group * k * n + at * along + column * aside, mask=column < n, other=0.0)
                wide, high = tl.broadcast_to(left[:, None], (ROWS, N)), tl.broadcast_to(right[None, :], (ROWS, N))
                total = tl.fma(wide, high, total)
        tl.store(where, total, mask=here)
    else:
        total = tl.full((ROWS, N), 0.0, tl.float32)
        if group < e:
            for start in range(0, k, K):
                at = start + tl.arange(0, K)
                inside = (row < end)[:, None] & (at < k)[None, :]
                left = tl.load(x + row[:, None] * k + at[None, :], mask=inside, other=0.0)
                inside = (at < k)[:, None] & (column < n)[None, :]
                place = group * k * n + at[:, None] * along + column[None, :] * aside
                right = tl.load(w + place, mask=inside, other=0.0)
                if WIDENED:
                    left, right = left.to(tl.float32), right.to(tl.float32)
                total = tl.dot(left, right, total, input_precision="ieee")
        tl.store(where, total.to(parts.dtype.element_ty), mask=here)


@triton.jit
@no_type_check
def _outer_kernel(
    x, y, ends, out, k, n, down, across,
    CHAIN: tl.constexpr, WIDENED: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    group = program // (down * across)
    left, right = program // across % down * M + tl.arange(0, M), program % across * N + tl.arange(0, N)
    end = tl.load(ends + group)
    begin = tl.load(ends + tl.where(group > 0, group - 1, 0))
    begin = tl.where(group > 0, begin, 0)
    if CHAIN:
        kind: tl.constexpr = x.dtype.element_ty
        total = tl.full((M, N), 0.0, kind)
        for row in range(begin, end):
            a = tl.load(x + row * k + left, mask=left < k, other=0.0)
            b = tl.load(y + row * n + right, mask=right < n, other=0.0)
            total = tl.fma(tl.broadcast_to(a[:, None], (M, N)), tl.broadcast_to(b[None, :], (M, N)), total)
    else:
        total = tl.full((M, N), 0.0, tl.float32)
        for start in range(begin, end, K):
            row = start + tl.arange(0, K)
            inside = (left < k)[:, None] & (row < end)[None, :]
            a = tl.load(x + row[None, :] * k + left[:, None], mask=inside, other=0.0)
            inside = (row < end)[:, None] & (right < n)[None, :]
            b = tl.load(y + row[:, None] * n + right[None, :], mask=inside, other=0.0)
            if WIDENED:
                a, b = a.to(tl.float32), b.to(tl.float32)
            total = tl.dot(a, b, total, input_precision="ieee")
    inside = (left < k)[:, None] & (right < n)[None, :]
    place = (group * k + left[:, None]) * n + right[None, :]
    tl.store(out + place, total.to(out.dtype.element_ty), mask=inside)
