"""Sums of squares with fixed bits: the same in every implementation, on every machine, for any number of threads.

The square of an fp32 number is exact in float64. Within a span of 2^18 elements of a row lane j adds the squares of the
elements j, j + 1024, j + 2048, ... in order, in float64. The lanes of a span, then the spans of a row, are added by
halving: the first half plus the second, until a single sum is left, for example 8, 4, 2, 1. Zeros fill up to a power of
two. The error is about 1e-14 of the sum, so a scale is the fp32 number next to the true scale.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

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
