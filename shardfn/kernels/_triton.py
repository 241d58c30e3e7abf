"""Helpers of the Triton kernels.

Compiled functions of Triton's library, such as `tl.sum` and `tl.zeros`, are not called, so the interpreter may be
switched on after the import of the package. The interpreter recognises reductions by name, and runs reductions fast.
Contraction of products and sums is switched off, and divisions round correctly, so results equal the reference.
"""

import contextlib
from typing import Any, no_type_check

import torch
import triton
import triton.language as tl

from ._fixed_bits import LANES

MAGIC: Any = tl.constexpr(12582912.0)  # 1.5 * 2^23: numbers added to it are rounded to whole numbers, ties to even
TINY: Any = tl.constexpr(2.0**-110)
NOT_FINITE: Any = tl.constexpr(0x7F800000)

added: Any = tl.standard._sum_combine
greatest: Any = tl.standard._elementwise_max


def launch(kernel: Any, num: int, device: torch.device, *args: Any, **constants: Any) -> None:
    """Runs `num` programs of a kernel on the device, or nothing if `num` is 0."""
    where = contextlib.nullcontext() if device.type == "cpu" else torch.get_device_module(device).device(device)
    if num:
        with where:
            kernel[(num,)](*args, **constants, enable_fp_fusion=False)


def tile(device: torch.device) -> int:
    """Returns the number of lanes summed by a program.

    Under the interpreter the number is all lanes, as the interpreter's time goes by operations.
    """
    return LANES if device.type == "cpu" else 256


def ceil(a: int, b: int) -> int:
    """Returns the quotient, rounded up."""
    return -(-a // b)


@triton.jit
@no_type_check
def signs_of(bits, place, scale):
    """Returns +scale or -scale for the elements at some positions of a row of bits."""
    byte = tl.load(bits + place // 8).to(tl.int32)
    return tl.where((byte >> (7 - (place % 8).to(tl.int32))) & 1 == 1, scale, -scale)


@triton.jit
@no_type_check
def magnitude(x):
    """Returns |x| as an int32 of the same order. NaN is above all numbers."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
@no_type_check
def factor_and_scale(top, HALF: tl.constexpr):
    """Returns S and 1 / S of a block, from the magnitude of the largest element.

    S = 0 for a magnitude that is not finite.
    """
    most = top.to(tl.float32, bitcast=True)
    usual = (most >= TINY) & (top < NOT_FINITE)
    factor = tl.math.div_rn(tl.where(usual, HALF * 1.0, 1.0), tl.where(usual, most, 1.0))
    return tl.where(top < NOT_FINITE, factor, 0.0), tl.where(most < TINY, 1.0, most * (1.0 / HALF))


@triton.jit
@no_type_check
def encode(x, factor, HALF: tl.constexpr):
    """Returns the codes of x, or 0 where the factor is 0."""
    code = ((tl.where(factor == 0.0, 0.0, x) * factor + MAGIC) - MAGIC).to(tl.int32)
    return tl.where(code > HALF - 1, HALF - 1, tl.where(code < -HALF, -HALF, code))


@triton.jit
@no_type_check
def decode(codes, column, mask, BITS: tl.constexpr):
    """Returns the codes of a row at some columns, as fp32."""
    if BITS == 8:
        code = tl.load(codes + column, mask=mask, other=0).to(tl.int32)
    else:
        byte = tl.load(codes + column // 2, mask=mask, other=0).to(tl.int32)
        code = (tl.where(column % 2 == 0, byte >> 4, byte & 15) ^ 8) - 8
    return code.to(tl.float32)


@triton.jit
@no_type_check
def multiply_add(a, b: tl.constexpr, c: tl.constexpr):
    """Returns the sum a b + c of a tensor and two numbers, rounded once."""
    return tl.fma(a, tl.full(a.shape, b, tl.float32), tl.full(a.shape, c, tl.float32))


@triton.jit
@no_type_check
def exponential(x):
    """Returns e^x of x <= 0, as in `_fixed_bits.py`."""
    n = multiply_add(x, 1.4426950408889634, 12582912.0) - 12582912.0
    r = tl.fma(n, tl.full(x.shape, -0.693147182464599609375, tl.float32), x)
    r = tl.fma(n, tl.full(x.shape, 1.904654299957768e-09, tl.float32), r)
    y = multiply_add(r, 1.9875691500e-4, 1.3981999507e-3)
    y = tl.fma(y, r, tl.full(x.shape, 8.3334519073e-3, tl.float32))
    y = tl.fma(y, r, tl.full(x.shape, 4.1665795894e-2, tl.float32))
    y = tl.fma(y, r, tl.full(x.shape, 1.6666665459e-1, tl.float32))
    y = tl.fma(y, r, tl.full(x.shape, 5.0000001201e-1, tl.float32))
    y = tl.fma(y, r, tl.full(x.shape, 1.0, tl.float32))
    y = tl.fma(y, r, tl.full(x.shape, 1.0, tl.float32))
    power = ((n.to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True)
    return tl.where(x < -87.0, 0.0, y * power)


@triton.jit
@no_type_check
def threefry(k0, k1, x0, x1):
    """Returns the two words of threefry2x32 with 20 rounds."""
    k2 = k0 ^ k1 ^ 0x1BD11BDA
    x0, x1 = four_rounds(x0 + k0, x1 + k1, 13, 15, 26, 6)
    x0, x1 = four_rounds(x0 + k1, x1 + k2 + 1, 17, 29, 16, 24)
    x0, x1 = four_rounds(x0 + k2, x1 + k0 + 2, 13, 15, 26, 6)
    x0, x1 = four_rounds(x0 + k0, x1 + k1 + 3, 17, 29, 16, 24)
    x0, x1 = four_rounds(x0 + k1, x1 + k2 + 4, 13, 15, 26, 6)
    return x0 + k2, x1 + k0 + 5


@triton.jit
@no_type_check
def four_rounds(x0, x1, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr, D: tl.constexpr):
    """Returns the words after four rounds of threefry2x32."""
    x0 += x1
    x1 = ((x1 << A) | (x1 >> (32 - A))) ^ x0
    x0 += x1
    x1 = ((x1 << B) | (x1 >> (32 - B))) ^ x0
    x0 += x1
    x1 = ((x1 << C) | (x1 >> (32 - C))) ^ x0
    x0 += x1
    x1 = ((x1 << D) | (x1 >> (32 - D))) ^ x0
    return x0, x1
