"""Multiply-adds that are rounded once, and e^x by them: the definitions. `_vectors.hpp` has the same in C++."""

import torch
from torch import Tensor

LOG2E, MAGIC = 1.44269504, 12582912.0  # 1.5 * 2^23: numbers added to it are rounded to whole numbers, ties to even
HIGH, LOW = 0.693145751953125, 1.42860677e-6  # log 2; products of HIGH and a power are exact
LEAST, MOST = -87.0, 89.0
# Of e^r for |r| <= log 2 / 2, the highest power first.
TERMS = (1.98756912e-4, 1.39819995e-3, 8.33345205e-3, 4.16657962e-2, 0.166666657, 0.5, 1.0, 1.0)


def fused(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """The sum a b + c of fp32, rounded once.

    The product is exact in float64. The sum there is rounded to odd, so that the second rounding, to float32, is that
    of the exact sum (Boldo and Melquiond, 2008).
    """
    product, c = a.double() * b.double(), c.double()
    total = product + c
    part = total - product
    error = (product - (total - part)) + (c - part)
    even = total.view(torch.int64) % 2 == 0
    odd = torch.nextafter(total, torch.where(error > 0, torch.inf, -torch.inf).to(total))
    return torch.where((error != 0) & even & error.isfinite(), odd, total).float()


def exponential(x: Tensor) -> Tensor:
    """e^x of fp32: 0 below -87, infinity above the largest number, NaN of NaN; its error is below one unit.

    x = n log 2 + r, and a polynomial of r.
    """
    number = x.new_tensor
    small = x < LEAST
    x = torch.where(small, LEAST, x)
    x = torch.where(x > MOST, MOST, x)
    n = fused(x, number(LOG2E), number(MAGIC)) - MAGIC
    r = fused(n, number(-LOW), fused(n, number(-HIGH), x))
    y = number(TERMS[0]).expand_as(x)
    for term in TERMS[1:]:
        y = fused(y, r, number(term))
    whole = n.nan_to_num().to(torch.int32)
    half = whole >> 1
    y = y * _power(half) * _power(whole - half)  # two factors: 2^128 is no float
    return torch.where(small, 0.0, y)


def _power(n: Tensor) -> Tensor:
    """2^n as fp32, of n from -126 to 127."""
    return ((n + 127) << 23).view(torch.float32)
