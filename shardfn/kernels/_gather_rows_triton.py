"""Weighted sums of rows by number, in Triton: a program for each block of each row of the result."""

from typing import no_type_check

import triton
import triton.language as tl
from torch import Tensor

from ._gather_rows import sum_dtype
from ._triton import added, ceil, launch

WIDTH = 1024


def gather_rows(x: Tensor, index: Tensor, weights: Tensor | None) -> Tensor:
    """Maps x [n, d], index [m, j], and weights [m, j] to [m, d]."""
    (n, d), (m, j) = x.shape, index.shape
    out, blocks = x.new_empty(m, d), ceil(d, WIDTH)
    factors = out if weights is None else weights.to(sum_dtype(x.dtype))
    sizes = n, d, j, blocks
    constants = {"WEIGHTED": weights is not None, "DOUBLE": sum_dtype(x.dtype).itemsize == 8, "WIDTH": WIDTH}
    launch(_gather_kernel, m * blocks, x.device, x, index, factors, out, *sizes, **constants)
    return out


def row_dots(x: Tensor, y: Tensor, index: Tensor) -> Tensor:
    """Maps x [n, d], y [m, d] and index [m, j] to [m, j]."""
    (n, d), (m, j) = x.shape, index.shape
    out = x.new_empty(m, j, dtype=sum_dtype(x.dtype))
    constants = {"DOUBLE": out.dtype.itemsize == 8, "WIDTH": WIDTH}
    launch(_dots_kernel, m * j, x.device, x, y, index, out, n, d, j, **constants)
    return out


@triton.jit
@no_type_check
def _gather_kernel(
    x, index, weights, out, n, d, j, blocks, WEIGHTED: tl.constexpr, DOUBLE: tl.constexpr, WIDTH: tl.constexpr
):
    kind: tl.constexpr = tl.float64 if DOUBLE else tl.float32
    row, k = tl.program_id(0).to(tl.int64) // blocks, tl.program_id(0) % blocks * WIDTH + tl.arange(0, WIDTH)
    total, begun = tl.full((WIDTH,), 0.0, kind), 0
    for c in range(row * j, (row + 1) * j):
        at = tl.load(index + c)
        named = (at >= 0) & (at < n)
        valid = tl.where(named, d, 0)
        term = tl.load(x + at * d + k, mask=k < valid, other=0.0).to(kind)
        if WEIGHTED:
            term = term * tl.load(weights + c)
        total = tl.where(named, tl.where(begun > 0, total + term, term), total)
        begun += tl.where(named, 1, 0)
    tl.store(out + row * d + k, total.to(out.dtype.element_ty), mask=k < d)


@triton.jit
@no_type_check
def _dots_kernel(x, y, index, out, n, d, j, DOUBLE: tl.constexpr, WIDTH: tl.constexpr):
    kind: tl.constexpr = tl.float64 if DOUBLE else tl.float32
    place, lane = tl.program_id(0).to(tl.int64), tl.arange(0, WIDTH)
    row, at = place // j, tl.load(index + place)
    valid = tl.where((at >= 0) & (at < n), d, 0)
    total = tl.full((WIDTH,), 0.0, kind)
    for first in range(0, d, WIDTH):
        k = first + lane
        left = tl.load(x + at * d + k, mask=k < valid, other=0.0).to(kind)
        right = tl.load(y + row * d + k, mask=k < valid, other=0.0).to(kind)
        total = total + left * right
    tl.store(out + place, tl.reduce(total, 0, added))
