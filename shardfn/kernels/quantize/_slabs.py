"""Cuts rows of blocks into contiguous parts."""

from collections.abc import Iterator

from torch import Tensor

from shardfn.kernels._cpu_blocks import cuts


def slabs(x: Tensor, codes: Tensor, scales: Tensor, bits: int, block: int, size: int) -> Iterator[tuple[Tensor, ...]]:
    """Cuts x [r, c], codes and scales into parts of about equal size: some rows, or some blocks of a row."""
    r, c = x.shape
    if c <= size:
        for lo, hi in cuts(r, size // max(c, 1)):
            yield x[lo:hi], codes[lo:hi], scales[lo:hi]
        return
    for i in range(r):
        for lo, hi in cuts(c, max(1, size // block) * block):
            first, last = (lo, hi) if bits == 8 else (lo // 2, (hi + 1) // 2)
            parts = x[i, lo:hi], codes[i, first:last], scales[i, lo // block : -(-hi // block)]
            yield tuple(part[None] for part in parts)
