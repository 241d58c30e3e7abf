"""Loops on a CPU, by numpy, over blocks that fit in a core's cache.

All operations on a block run before the next block is read, and write results to given memory. numpy packs, unpacks and
looks up bytes several times faster than torch. Operations of numpy use a single core.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ._sums import LANES, SPAN, halved

Array = np.ndarray

BLOCK = 1 << 15  # elements. A few blocks in fp32 fit the second-level cache, and SPAN is a multiple of a block.

# The eight signs of each byte.
_SIGNS = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1).astype(np.float32) * 2 - 1


def array(x: Tensor) -> Array:
    """Returns the tensor as a numpy array on the same memory."""
    return x.detach().numpy()


def cuts(num: int, size: int = BLOCK) -> Iterator[tuple[int, int]]:
    """Yields the start and end of each block of `num` elements."""
    return ((lo, min(lo + size, num)) for lo in range(0, num, max(size, 1)))


def room(num: int, dtype: Any) -> Array:
    """Returns uninitialised memory for `num` elements, or for a block if `num` is larger."""
    return np.empty(min(num, BLOCK), dtype)


def table(scale: Any) -> Array:
    """Returns, for each of the 256 bytes, +scale or -scale for each of the 8 bits: [256, 8]."""
    return _SIGNS * np.float32(scale)


class Expand:
    """Looks up bytes in a table, a block at a time."""

    def __init__(self, num_bytes: int) -> None:
        self._index = room(num_bytes, np.intp)

    def __call__(self, bits: Array, signs: Array, out: Array) -> None:
        """Writes the eight values of each byte into out [8 b]."""
        index = self._index[: bits.size]
        np.copyto(index, bits)
        np.take(signs, index, axis=0, out=out.reshape(-1, 8), mode="clip")


class Pack:
    """Packs the signs of a block."""

    def __init__(self, num: int) -> None:
        self._flags = room(num, np.bool_)

    def __call__(self, y: Array, bits: Array) -> None:
        """Writes the bits of y >= 0."""
        bits[...] = np.packbits(np.greater_equal(y, 0, out=self._flags[: y.size]))


class Squares:
    """Sum of the squares of a row, block by block, bitwise equal to `sum_squares`."""

    def __init__(self, num: int) -> None:
        rows = -(-min(num, BLOCK) // LANES)
        self._wide = np.zeros((1 + rows, LANES))  # row 0: the lanes' sums so far
        self._lanes = np.zeros(LANES)
        self._spans: list[Array] = []
        self._count = 0

    def add(self, y: Array) -> None:
        """Adds the next block, of `BLOCK` elements. Only the last of a row may have fewer."""
        rows = -(-y.size // LANES)
        wide = self._wide[1 : 1 + rows]
        flat = wide.reshape(-1)
        np.copyto(flat[: y.size], y)
        flat[y.size :] = 0
        np.multiply(wide, wide, out=wide)
        if self._count % SPAN == 0:
            self._lanes = np.empty(LANES)
            self._spans.append(self._lanes)
            np.add.reduce(wide, axis=0, out=self._lanes)
        else:
            # Added in front of the new rows, lane by lane: the same sum in the same order, for any cut in blocks.
            np.copyto(self._wide[0], self._lanes)
            np.add.reduce(self._wide[: 1 + rows], axis=0, out=self._lanes)
        self._count += y.size

    def total(self) -> Tensor:
        """Returns the sum so far, float64 []."""
        lanes = np.stack(self._spans) if self._spans else np.zeros((0, LANES))
        return halved(halved(torch.from_numpy(lanes)))
