"""Norms of rows, in Triton: a program for each row."""

from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._triton import added, launch

LANES = 64


def row_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, centered: bool) -> Tensor:
    """Maps fp32 [*, d] to fp32 [*, d]."""
    y = torch.empty_like(x)
    shift = weight if bias is None else bias
    how = {"CENTERED": centered, "BIASED": bias is not None, "LANES": LANES}
    launch(_norm_kernel, x.shape[:-1].numel(), x.device, x, weight, shift, y, x.shape[-1], eps, **how)
    return y


@triton.jit
@no_type_check
def _norm_kernel(x, w, b, y, d, eps, CENTERED: tl.constexpr, BIASED: tl.constexpr, LANES: tl.constexpr):
    row, lane = tl.program_id(0).to(tl.int64) * d, tl.arange(0, LANES)
    num, mean = d * 1.0, eps * 0.0
    if CENTERED:
        sums = tl.full((LANES,), 0.0, tl.float32)
        for i in range(0, d, LANES):
            sums += tl.load(x + row + i + lane, mask=i + lane < d, other=0.0)
        mean = tl.math.div_rn(_sum_halves(sums, LANES), num)
    sums = tl.full((LANES,), 0.0, tl.float32)
    for i in range(0, d, LANES):
        c = tl.where(i + lane < d, tl.load(x + row + i + lane, mask=i + lane < d, other=0.0) - mean, 0.0)
        sums = tl.fma(c, c, sums)
    scale = tl.math.div_rn(1.0, tl.math.sqrt_rn(tl.math.div_rn(_sum_halves(sums, LANES), num) + eps))
    for i in range(0, d, LANES):
        there = i + lane < d
        out = (tl.load(x + row + i + lane, mask=there, other=0.0) - mean) * scale
        factor = tl.load(w + i + lane, mask=there, other=0.0)
        out = tl.fma(out, factor, tl.load(b + i + lane, mask=there, other=0.0)) if BIASED else out * factor
        tl.store(y + row + i + lane, out, mask=there)


@triton.jit
@no_type_check
def _sum_halves(x, LANES: tl.constexpr):
    """Returns the sum of lanes: the first half plus the second, until a single lane is left."""
    for i in tl.static_range(6):
        x = tl.reduce(tl.reshape(x, (2, LANES >> (i + 1))), 0, added)
    return x
