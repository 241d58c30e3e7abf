"""Activations of single elements, in Triton."""

from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._triton import ceil, exponential, launch, multiply_add

WIDTH = 1024


def gated_silu(gate: Tensor, up: Tensor) -> Tensor:
    """Maps fp32 to fp32 of the same shape."""
    y = torch.empty_like(gate)
    launch(_gated_silu, ceil(y.numel(), WIDTH), y.device, gate, up, y, y.numel(), WIDTH=WIDTH)
    return y


def gated_sigmoid(gate: Tensor, up: Tensor) -> Tensor:
    """Maps fp32 to fp32 of the same shape."""
    y = torch.empty_like(gate)
    launch(_gated_sigmoid, ceil(y.numel(), WIDTH), y.device, gate, up, y, y.numel(), WIDTH=WIDTH)
    return y


def gelu(x: Tensor) -> Tensor:
    """Maps fp32 to fp32 of the same shape."""
    y = torch.empty_like(x)
    launch(_gelu_kernel, ceil(y.numel(), WIDTH), y.device, x, y, y.numel(), WIDTH=WIDTH)
    return y


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Maps fp32 [t, h, k], and [t, k] twice, to fp32 [t, h, k]."""
    y = torch.empty_like(x)
    _, heads, dim = x.shape
    launch(_rotate_kernel, ceil(y.numel(), WIDTH), y.device, x, cos, sin, y, y.numel(), heads, dim, WIDTH=WIDTH)
    return y


@triton.jit
@no_type_check
def _rotate_kernel(x, cos, sin, y, n, heads, dim, WIDTH: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * WIDTH + tl.arange(0, WIDTH)
    k, row = at % dim, at // (heads * dim) * dim
    first = k < dim // 2
    value = tl.load(x + at, mask=at < n, other=0.0)
    other = tl.load(x + tl.where(first, at + dim // 2, at - dim // 2), mask=at < n, other=0.0)
    c, s = (tl.load(cos + row + k, mask=at < n, other=0.0), tl.load(sin + row + k, mask=at < n, other=0.0))
    tl.store(y + at, _sum_of_products(value, c, tl.where(first, -other, other), s), mask=at < n)


@triton.jit
@no_type_check
def _sum_of_products(a, b, c, d):
    """Returns a b + c d. The compiler must not fuse the operations: products of 24 bits are exact in float64."""
    return (a.to(tl.float64) * b).to(tl.float32) + (c.to(tl.float64) * d).to(tl.float32)


@triton.jit
@no_type_check
def _gated_silu(gate, up, y, n, WIDTH: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * WIDTH + tl.arange(0, WIDTH)
    x = tl.load(gate + at, mask=at < n, other=0.0)
    factor = tl.load(up + at, mask=at < n, other=0.0)
    tl.store(y + at, _multiply_sigmoid(x, x) * factor, mask=at < n)


@triton.jit
@no_type_check
def _gated_sigmoid(gate, up, y, n, WIDTH: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * WIDTH + tl.arange(0, WIDTH)
    x = tl.load(gate + at, mask=at < n, other=0.0)
    factor = tl.load(up + at, mask=at < n, other=0.0)
    tl.store(y + at, _multiply_sigmoid(factor, x), mask=at < n)


@triton.jit
@no_type_check
def _gelu_kernel(x, y, n, WIDTH: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * WIDTH + tl.arange(0, WIDTH)
    value = tl.load(x + at, mask=at < n, other=0.0)
    factor = multiply_add(value * value, 0.0713548162726009, 1.59576912160573)
    tl.store(y + at, _multiply_sigmoid(value, value * factor), mask=at < n)


@triton.jit
@no_type_check
def _multiply_sigmoid(x, a):
    """Returns x / (1 + e^-a), by only e^-|a|."""
    e = exponential(-tl.abs(a))
    return tl.math.div_rn(x * tl.where(a < 0, e, 1.0), 1.0 + e)
