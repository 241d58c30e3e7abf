"""Batch-invariant linear layers, in Triton: a program for each chunk of each tile.

A single tile shape serves all numbers of rows. On a GPU the chains are fused multiply-adds, so bits equal the bits of a
CPU.
"""

import functools
from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._row_codes import GROUP, PANEL, kind_of, rows_apart
from ._row_linear import compute_layers, sum_chunks
from ._triton import ceil, launch

ROWS = 16


def _compute_rows(x: Tensor, packed: Tensor, num: int, chunks: int, bias: Tensor | None) -> Tensor:
    """Maps x fp32 [m, k] and packed [panels, k, 64], or codes, to fp32 [m, num]."""
    (m, k), panels = x.shape, packed.shape[0]
    parts = x.new_empty(chunks, m, panels * PANEL)
    tiles = ceil(m, ROWS)
    sizes = m, k, chunks, panels, tiles, rows_apart(packed)
    if (kind := kind_of(packed)) is None:
        launch(_chain_kernel, chunks * panels * tiles, x.device, x, packed, parts, *sizes, ROWS=ROWS, N=PANEL)
    else:
        views = packed, packed.view(torch.float32 if kind == "int4_wide" else torch.float16)
        code = {
            "BITS": 8 if kind == "int8" else 4,
            "HALF": 4 if kind == "int4_wide" else 2,
            "GROUP": GROUP,
            "RECORD": packed.shape[2],
        }
        launch(_coded_chain, chunks * panels * tiles, x.device, x, *views, parts, *sizes, ROWS=ROWS, N=PANEL, **code)
    out = sum_chunks(list(parts[..., :num].unbind()))
    return out.clone() if bias is None else out + bias


row_linears = functools.partial(compute_layers, compute=_compute_rows)


def row_linear(x: Tensor, packed: Tensor, num: int, chunks: int, bias: Tensor | None) -> Tensor:
    """Returns fp32 [*, num] of x [*, k]."""
    return row_linears(x, [packed], [num], chunks, [bias])[0]


@triton.jit
@no_type_check
def _chain_kernel(x, w, parts, m, k, chunks, panels, tiles, apart, ROWS: tl.constexpr, N: tl.constexpr):
    program = tl.program_id(0).to(tl.int64)
    tile, panel, chunk = program % tiles, program // tiles % panels, program // (tiles * panels)
    row, column = tile * ROWS + tl.arange(0, ROWS), tl.arange(0, N)
    total = tl.full((ROWS, N), 0.0, tl.float32)
    for at in range(chunk * k // chunks, (chunk + 1) * k // chunks):
        left = tl.load(x + row * k + at, mask=row < m, other=0.0)
        right = tl.load(w + (panel * apart + at) * N + column).to(tl.float32)
        total = tl.fma(tl.broadcast_to(left[:, None], (ROWS, N)), tl.broadcast_to(right[None, :], (ROWS, N)), total)
    where = (chunk * m + row[:, None]) * (panels * N) + panel * N + column[None, :]
    tl.store(parts + where, total, mask=row[:, None] < m)


@triton.jit
@no_type_check
def _coded_chain(
    x, w, halves, parts, m, k, chunks, panels, tiles, apart,
    ROWS: tl.constexpr, N: tl.constexpr, BITS: tl.constexpr, HALF: tl.constexpr, GROUP: tl.constexpr,
    RECORD: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    tile, panel, chunk = program % tiles, program // tiles % panels, program // (tiles * panels)
    row, column = tile * ROWS + tl.arange(0, ROWS), tl.arange(0, N)
    total = tl.full((ROWS, N), 0.0, tl.float32)
    for at in range(chunk * k // chunks, (chunk + 1) * k // chunks):
        left = tl.load(x + row * k + at, mask=row < m, other=0.0)
        record, inner = (panel * apart + at // GROUP) * RECORD, at % GROUP
        scale = tl.load(halves + record // HALF + column).to(tl.float32)
        if BITS == 8:
            code = tl.load(w + record + 2 * N + (inner // 4 * N + column) * 4 + inner % 4).to(tl.int8, bitcast=True)
            right = scale * code.to(tl.float32)
        else:
            byte = tl.load(w + record + 2 * HALF * N + (inner // 8 * N + column) * 4 + inner % 4).to(tl.int32)
            least = tl.load(halves + record // HALF + N + column).to(tl.float32)
            right = scale * (tl.where(inner % 8 < 4, byte, byte >> 4) & 15).to(tl.float32) + least
        total = tl.fma(tl.broadcast_to(left[:, None], (ROWS, N)), tl.broadcast_to(right[None, :], (ROWS, N)), total)
    where = (chunk * m + row[:, None]) * (panels * N) + panel * N + column[None, :]
    tl.store(parts + where, total, mask=row[:, None] < m)
