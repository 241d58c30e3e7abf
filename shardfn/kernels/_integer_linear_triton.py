"""Linear layers of whole numbers, in Triton: a program for each chunk of each tile, with products of int8 by `dot`.

Inputs are rounded by the definition, whose operations round alike on all devices.
"""

import functools
from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._integer_linear import round_rows
from ._row_codes import GROUP, PANEL, kind_of, rows_apart
from ._row_linear import compute_layers, sum_chunks
from ._triton import ceil, launch

ROWS = 16


def _compute_rows(x: Tensor, packed: Tensor, num: int, chunks: int, bias: Tensor | None) -> Tensor:
    """Maps x fp32 [m, k] and codes [panels, groups, record] to fp32 [m, num]."""
    m, (panels, groups, record), kind = x.shape[0], packed.shape, kind_of(packed)
    q, scale, total = (part.contiguous() for part in round_rows(x))
    parts, tiles = x.new_empty(chunks, m, panels * PANEL), ceil(m, ROWS)
    views = packed, packed.view(torch.float32 if kind == "int4_wide" else torch.float16)
    sizes = m, groups, chunks, panels, tiles, rows_apart(packed)
    code = {
        "BITS": 8 if kind == "int8" else 4,
        "HALF": 4 if kind == "int4_wide" else 2,
        "GROUP": GROUP,
        "RECORD": record,
    }
    inputs, num_programs = (q, scale, total, *views, parts), chunks * panels * tiles
    launch(_whole_chain, num_programs, x.device, *inputs, *sizes, ROWS=ROWS, N=PANEL, **code)
    out = sum_chunks(list(parts[..., :num].unbind()))
    return out.clone() if bias is None else out + bias


integer_linears = functools.partial(compute_layers, compute=_compute_rows)


@triton.jit
@no_type_check
def _whole_chain(
    q, scales, totals, w, halves, parts, m, groups, chunks, panels, tiles, apart,
    ROWS: tl.constexpr, N: tl.constexpr, BITS: tl.constexpr, HALF: tl.constexpr, GROUP: tl.constexpr,
    RECORD: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    tile, panel, chunk = program % tiles, program // tiles % panels, program // (tiles * panels)
    row, column, inner = tile * ROWS + tl.arange(0, ROWS), tl.arange(0, N), tl.arange(0, GROUP)
    sum = tl.full((ROWS, N), 0.0, tl.float32)
    for g in range(chunk * groups // chunks, (chunk + 1) * groups // chunks):
        place = row * groups + g
        left = tl.load(q + place[:, None] * GROUP + inner[None, :], mask=row[:, None] < m, other=0)
        scale = tl.load(scales + place, mask=row < m, other=0.0)
        record = (panel * apart + g) * RECORD
        weight_scale = tl.load(halves + record // HALF + column).to(tl.float32)
        if BITS == 8:
            at = w + record + 2 * N + (inner[:, None] // 4 * N + column[None, :]) * 4 + inner[:, None] % 4
            right = tl.load(at).to(tl.int8, bitcast=True)
        else:
            at = w + record + 2 * HALF * N + (inner[:, None] // 8 * N + column[None, :]) * 4 + inner[:, None] % 4
            byte = tl.load(at).to(tl.int32)
            right = (tl.where(inner[:, None] % 8 < 4, byte, byte >> 4) & 15).to(tl.int8)
        dot = tl.dot(left, right, out_dtype=tl.int32)
        part = tl.broadcast_to(weight_scale[None, :], (ROWS, N)) * dot.to(tl.float32)
        if BITS == 4:
            least = tl.load(halves + record // HALF + N + column).to(tl.float32)
            total = tl.load(totals + place, mask=row < m, other=0.0)
            wide = tl.broadcast_to(least[None, :], (ROWS, N))
            part = tl.fma(wide, tl.broadcast_to(total[:, None], (ROWS, N)), part)
        sum = tl.fma(tl.broadcast_to(scale[:, None], (ROWS, N)), part, sum)
    where = (chunk * m + row[:, None]) * (panels * N) + panel * N + column[None, :]
    tl.store(parts + where, sum, mask=row[:, None] < m)
