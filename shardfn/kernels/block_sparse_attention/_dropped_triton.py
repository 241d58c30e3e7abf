"""The factors of dropout in Triton: the numbers of `_dropped.py`, computed for each pair."""

from typing import no_type_check

import triton
import triton.language as tl


@triton.jit
@no_type_check
def factors(keys, b, head, t, s, level, kept):
    """Returns the factors [m, n] of queries [m, 1] and keys [1, n], by global positions.

    `kept`, or 0 for dropped pairs.
    """
    own, zero = keys + b * 2, s * 0  # the interpreter wraps around only in tensors
    k0, k1 = tl.load(own + zero).to(tl.uint32), tl.load(own + 1 + zero).to(tl.uint32)
    k0, k1 = threefry(k0, k1, zero.to(tl.uint32), (head + zero).to(tl.uint32))
    x0, x1 = threefry(k0, k1, (t + zero).to(tl.uint32), (s // 4 + 0 * t).to(tl.uint32))
    word = tl.where(s % 4 < 2, x0, x1)
    number = tl.where(s % 2 == 0, word & 0xFFFF, word >> 16).to(tl.int32)
    return tl.where(number >= level, kept, 0.0)


@triton.jit
@no_type_check
def threefry(k0, k1, x0, x1):
    """Returns the two words of threefry2x32 with 20 rounds."""
    k2 = k0 ^ k1 ^ 0x1BD11BDA
    x0, x1 = four(x0 + k0, x1 + k1, 13, 15, 26, 6)
    x0, x1 = four(x0 + k1, x1 + k2 + 1, 17, 29, 16, 24)
    x0, x1 = four(x0 + k2, x1 + k0 + 2, 13, 15, 26, 6)
    x0, x1 = four(x0 + k0, x1 + k1 + 3, 17, 29, 16, 24)
    x0, x1 = four(x0 + k1, x1 + k2 + 4, 13, 15, 26, 6)
    return x0 + k2, x1 + k0 + 5


@triton.jit
@no_type_check
def four(x0, x1, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr, D: tl.constexpr):
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
