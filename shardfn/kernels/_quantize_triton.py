"""Blocks of a row in codes of 8 or 4 bits, and sums of such rows, in Triton."""

from typing import no_type_check

import triton
import triton.language as tl
from torch import Tensor

from ._quantize import empty_codes
from ._triton import ceil, decode, encode, factor_and_scale, greatest, launch, magnitude

WIDTH = 1024


def quantize(x: Tensor, bits: int, block: int) -> tuple[Tensor, Tensor]:
    """Maps [r, c] to int8 [r, c] or uint8 [r, ceil(c / 2)], and fp32 [r, ceil(c / block)]."""
    c = x.shape[1]
    codes, scales = empty_codes(x, c, bits, block)
    num, width = scales.numel(), width_of(block, c)
    launch(_quantize_kernel, num, x.device, x, codes, scales, c, block, codes.shape[1], BITS=bits, WIDTH=width)
    return codes, scales


def dequantize_into(codes: Tensor, scales: Tensor, bits: int, block: int, out: Tensor) -> None:
    """Writes the dequantized values, in the dtype of `out` [r, c]."""
    c = out.shape[1]
    tiles = ceil(c, WIDTH)
    sizes = c, block, codes.shape[1], tiles
    launch(_dequantize_kernel, out.shape[0] * tiles, out.device, codes, scales, out, *sizes, BITS=bits, WIDTH=WIDTH)


def width_of(block: int, c: int) -> int:
    """Returns the smallest power of two that is at least the size of a block, and at least 2."""
    return max(2, 1 << (min(block, c) - 1).bit_length()) if c else 2


@triton.jit
@no_type_check
def _quantize_kernel(x, codes, scales, c, block, num_codes, BITS: tl.constexpr, WIDTH: tl.constexpr):
    program = tl.program_id(0).to(tl.int64)
    blocks = (c + block - 1) // block
    row, lo = program // blocks, program % blocks * block
    most = tl.where(lo + block < c, lo + block, c)
    x += row * c
    codes += row * num_codes
    if BITS == 8:
        column = lo + tl.arange(0, WIDTH)
        value = tl.load(x + column, mask=column < most, other=0.0).to(tl.float32)
        factor, scale = factor_and_scale(tl.reduce(magnitude(value), 0, greatest), 128)
        tl.store(codes + column, encode(value, factor, 128).to(tl.int8), mask=column < most)
    else:
        pair = lo // 2 + tl.arange(0, WIDTH // 2)
        high = tl.load(x + 2 * pair, mask=2 * pair < most, other=0.0).to(tl.float32)
        low = tl.load(x + 2 * pair + 1, mask=2 * pair + 1 < most, other=0.0).to(tl.float32)
        factor, scale = factor_and_scale(tl.reduce(tl.maximum(magnitude(high), magnitude(low)), 0, greatest), 8)
        both = (encode(high, factor, 8) & 15) << 4 | (encode(low, factor, 8) & 15)
        tl.store(codes + pair, both.to(tl.uint8), mask=2 * pair < most)
    tl.store(scales + program, scale)


@triton.jit
@no_type_check
def _dequantize_kernel(codes, scales, out, c, block, num_codes, tiles, BITS: tl.constexpr, WIDTH: tl.constexpr):
    program = tl.program_id(0).to(tl.int64)
    row, column = program // tiles, program % tiles * WIDTH + tl.arange(0, WIDTH)
    mask = column < c
    scale = tl.load(scales + row * ((c + block - 1) // block) + column // block, mask=mask, other=0.0)
    value = decode(codes + row * num_codes, column, mask, BITS) * scale
    tl.store(out + row * c + column, value.to(out.dtype.element_ty), mask=mask)


def dequantize_sum(codes: Tensor, scales: Tensor, c: int, bits: int, block: int) -> Tensor:
    """Returns the sum over the first dim, in order, fp32 [r, c]."""
    out, r, tiles = scales.new_empty(codes.shape[1], c), codes.shape[1], ceil(c, WIDTH)
    sizes = codes.shape[0], r, c, block, codes.shape[2], tiles
    launch(_dequantize_sum, r * tiles, out.device, codes, scales, out, *sizes, BITS=bits, WIDTH=WIDTH)
    return out


def dequantize_sum_quantize(codes: Tensor, scales: Tensor, c: int, bits: int, block: int) -> tuple[Tensor, Tensor]:
    """Maps [k, r, ...], [k, r, blocks] to [r, ...], [r, blocks]."""
    k, r, width = codes.shape
    into, factors = empty_codes(scales, c, bits, block)
    sizes, constants = (k, r, c, block, width), {"BITS": bits, "WIDTH": width_of(block, c)}
    launch(_sum_quantize, factors.numel(), scales.device, codes, scales, into, factors, *sizes, **constants)
    return into, factors


@triton.jit
@no_type_check
def _sum_codes(codes, scales, row, column, mask, k, r, c, block, num_codes, BITS: tl.constexpr):
    blocks = (c + block - 1) // block
    total = decode(codes + row * num_codes, column, mask, BITS)
    total *= tl.load(scales + row * blocks + column // block, mask=mask, other=0.0)
    for i in range(1, k):
        at = i * r + row
        scale = tl.load(scales + at * blocks + column // block, mask=mask, other=0.0)
        total += decode(codes + at * num_codes, column, mask, BITS) * scale
    return total


@triton.jit
@no_type_check
def _dequantize_sum(codes, scales, out, k, r, c, block, num_codes, tiles, BITS: tl.constexpr, WIDTH: tl.constexpr):
    program = tl.program_id(0).to(tl.int64)
    row, column = program // tiles, program % tiles * WIDTH + tl.arange(0, WIDTH)
    total = _sum_codes(codes, scales, row, column, column < c, k, r, c, block, num_codes, BITS)
    tl.store(out + row * c + column, total, mask=column < c)


@triton.jit
@no_type_check
def _sum_quantize(codes, scales, into, factors, k, r, c, block, num_codes, BITS: tl.constexpr, WIDTH: tl.constexpr):
    program = tl.program_id(0).to(tl.int64)
    blocks = (c + block - 1) // block
    row, lo = program // blocks, program % blocks * block
    most = tl.where(lo + block < c, lo + block, c)
    into += row * num_codes
    if BITS == 8:
        column = lo + tl.arange(0, WIDTH)
        total = _sum_codes(codes, scales, row, column, column < most, k, r, c, block, num_codes, BITS)
        factor, scale = factor_and_scale(tl.reduce(magnitude(total), 0, greatest), 128)
        tl.store(into + column, encode(total, factor, 128).to(tl.int8), mask=column < most)
    else:
        pair = lo // 2 + tl.arange(0, WIDTH // 2)
        high = _sum_codes(codes, scales, row, 2 * pair, 2 * pair < most, k, r, c, block, num_codes, BITS)
        low = _sum_codes(codes, scales, row, 2 * pair + 1, 2 * pair + 1 < most, k, r, c, block, num_codes, BITS)
        factor, scale = factor_and_scale(tl.reduce(tl.maximum(magnitude(high), magnitude(low)), 0, greatest), 8)
        both = (encode(high, factor, 8) & 15) << 4 | (encode(low, factor, 8) & 15)
        tl.store(into + pair, both.to(tl.uint8), mask=2 * pair < most)
    tl.store(factors + program, scale)
