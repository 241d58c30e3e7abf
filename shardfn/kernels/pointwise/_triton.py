"""Activations of single elements, in Triton."""

from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from shardfn.kernels._triton import ceil, exponential, fused, launch

WIDTH = 1024


def gated_silu(gate: Tensor, up: Tensor) -> Tensor:
    """From fp32 of one shape to fp32 of that shape."""
    y = torch.empty_like(gate)
    launch(_gated_silu, ceil(y.numel(), WIDTH), y.device, gate, up, y, y.numel(), WIDTH=WIDTH)
    return y


def gelu(x: Tensor) -> Tensor:
    """From fp32 to fp32 of that shape."""
    y = torch.empty_like(x)
    launch(_gelu, ceil(y.numel(), WIDTH), y.device, x, y, y.numel(), WIDTH=WIDTH)
    return y


@triton.jit
@no_type_check
def _gated_silu(gate, up, y, n, WIDTH: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * WIDTH + tl.arange(0, WIDTH)
    x = tl.load(gate + at, mask=at < n, other=0.0)
    factor = tl.load(up + at, mask=at < n, other=0.0)
    tl.store(y + at, _by_sigmoid(x, x) * factor, mask=at < n)


@triton.jit
@no_type_check
def _gelu(x, y, n, WIDTH: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * WIDTH + tl.arange(0, WIDTH)
    value = tl.load(x + at, mask=at < n, other=0.0)
    factor = fused(value * value, 0.0713548162726009, 1.59576912160573)
    tl.store(y + at, _by_sigmoid(value, value * factor), mask=at < n)


@triton.jit
@no_type_check
def _by_sigmoid(x, a):
    """X / (1 + e^-a), by e^-|a| alone."""
    e = exponential(-tl.abs(a))
    return tl.math.div_rn(x * tl.where(a < 0, e, 1.0), 1.0 + e)
