"""Numbers with fixed bits: the same in every implementation, on every machine, for any number of threads.

Fused multiply-adds, e^x by fused multiply-adds, and sums of squares. `_vectors.h` has the float32 functions in C++.

The square of an fp32 number is exact in float64. Within a span of 2^18 elements of a row lane j adds the squares of the
elements j, j + 1024, j + 2048, ... in order, in float64. The lanes of a span, then the spans of a row, are added by
halving: the first half plus the second, until a single sum is left, for example 8, 4, 2, 1. Zeros fill up to a power of
two. The error is about 1e-14 of the sum, so a scale is the fp32 number next to the true scale.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

LOG2E, HIGH, LOW = 1.4426950408889634, 0.693147182464599609375, -1.904654299957768e-09
MAGIC = 12582912.0  # 1.5 * 2^23: numbers added to the constant are rounded to whole numbers, ties to even
LEAST = -87.0
# The polynomial of Cephes, the highest power first: e^r for |r| <= log 2 / 2.
EXP = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1, 1.0, 1.0)
# The polynomial of float64, with the coefficients 1 / i!.
WIDE_HIGH, WIDE_LOW = 0.693145751953125, 1.4286068203094173e-06
WIDE_MAGIC = 6755399441055744.0  # 1.5 * 2^52
WIDE_LEAST, WIDE_TERMS = -708.0, 13


def multiply_add(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """Returns the sum a b + c: of fp32, rounded once; of float64, with the product rounded, too.

    The product of fp32 is exact in float64. The sum there is rounded to odd, so the second rounding, to float32, equals
    the rounding of the exact sum (Boldo and Melquiond, 2008).
    """
    if c.dtype == torch.float64:
        return a * b + c
    product, c = a.double() * b.double(), c.double()
    total = product + c
    part = total - product
    error = (product - (total - part)) + (c - part)
    even = total.view(torch.int64) % 2 == 0
    odd = torch.nextafter(total, torch.where(error > 0, torch.inf, -torch.inf).to(total))
    return torch.where((error != 0) & even & error.isfinite(), odd, total).float()


def exponential(x: Tensor) -> Tensor:
    """Returns e^x of x <= 0, by x = n log 2 + r and a polynomial, or 0 below -87, without subnormal numbers.

    For float64, the polynomial is the Taylor series, and results are 0 below -708.
    """
    if x.dtype == torch.float64:
        return _wide_exponential(x)
    number = x.new_tensor
    at = x.clamp(min=LEAST)
    n = multiply_add(at, number(LOG2E), number(MAGIC)) - number(MAGIC)
    r = multiply_add(n, number(-LOW), multiply_add(n, number(-HIGH), at))
    power = ((n.nan_to_num().to(torch.int32) + 127) << 23).view(torch.float32)
    return torch.where(x < LEAST, 0.0, polynomial(EXP, r) * power)


def _wide_exponential(x: Tensor) -> Tensor:
    small = x < WIDE_LEAST
    x = torch.where(small, WIDE_LEAST, x)
    n = (x * LOG2E + WIDE_MAGIC) - WIDE_MAGIC
    r = (x - n * WIDE_HIGH) - n * WIDE_LOW
    y = torch.ones_like(x)
    for i in range(WIDE_TERMS, 0, -1):
        y = y * r * (1 / i) + 1
    power = ((n.nan_to_num().to(torch.int64) + 1023) << 52).view(torch.float64)
    return torch.where(small, 0.0, y * power)


def polynomial(terms: tuple[float, ...], x: Tensor) -> Tensor:
    """Returns the polynomial of these coefficients, the highest power first."""
    y = x.new_tensor(terms[0])
    for term in terms[1:]:
        y = multiply_add(y, x, x.new_tensor(term))
    return y


LANES = 1 << 10
SPAN = 1 << 18


def sum_halves(x: Tensor) -> Tensor:
    """Sums over the last dim, by halving: [..., n] -> [...]."""
    n = x.shape[-1]
    if n == 0:
        return x.new_zeros(x.shape[:-1])
    width = 1 << (n - 1).bit_length()
    x = torch.nn.functional.pad(x, (0, width - n))
    while width > 1:
        width //= 2
        x = x[..., :width] + x[..., width:]
    return x[..., 0]


def sum_squares(y: Tensor) -> Tensor:
    """Sums of squares of rows: fp32 [r, c] -> float64 [r]."""
    r, c = y.shape
    span = min(SPAN, -(-c // LANES) * LANES)
    if c == 0:
        return y.new_zeros(r, dtype=torch.float64)
    spans = -(-c // span)
    lanes = torch.nn.functional.pad(y, (0, spans * span - c)).reshape(r, spans, span // LANES, LANES)
    total = torch.zeros(r, spans, LANES, dtype=torch.float64, device=y.device)
    for i in range(span // LANES):
        total += lanes[:, :, i].double().square()
    return sum_halves(sum_halves(total))


def root_mean(squares: Tensor, num: int) -> Tensor:
    """Returns the scale of a row: sqrt(squares / num) as fp32, and 0 for rows without elements."""
    return (squares / max(num, 1)).sqrt().float()


def cut_spans(num: int, size: int = SPAN) -> Iterator[tuple[int, int]]:
    """Yields the start and end of each span of `num` elements, for example (0, 4) and (4, 7) for 7 by 4."""
    return ((lo, min(lo + size, num)) for lo in range(0, num, max(size, 1)))
