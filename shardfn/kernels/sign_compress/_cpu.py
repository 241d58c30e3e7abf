"""A tensor plus the previous error, as signs and scales, on a CPU."""

import numpy as np
import torch
from torch import Tensor

from shardfn.kernels._cpu_blocks import Array, Expand, Pack, Squares, array, cuts, room, table
from shardfn.kernels._sums import root_mean


def sign_compress(x: Tensor, error: Tensor, whole: bool) -> tuple[Tensor, Tensor]:
    """Maps flat [n], fp32 [r, c] with n <= r c to uint8 [r, c / 8], fp32 [r]. Overwrites the error."""
    r, c = error.shape
    y = error.view(1, r * c) if whole else error
    with np.errstate(all="ignore"):
        scales = [_add_input(x, array(row), i * row.numel()) for i, row in enumerate(y)]
        bits = torch.empty(r, c // 8, dtype=torch.uint8)
        for row, packed, scale in zip(y, bits.view(y.shape[0], y.shape[1] // 8), scales, strict=True):
            subtract_signs(array(row), array(packed), scale)
    return bits, torch.tensor(scales * r if whole else scales, dtype=torch.float32)


def _add_input(x: Tensor, y: Array, start: int) -> float:
    """Adds x from an element on to y, and returns the scale."""
    squares, wide = Squares(y.size), torch.from_numpy(room(y.size, np.float32))
    for lo, hi in cuts(y.size):
        more = x[start + lo : start + hi]
        if more.dtype != torch.float32:
            more = wide[: more.numel()].copy_(more)
        part = y[lo : lo + more.numel()]
        np.add(array(more), part, out=part)
        squares.add(y[lo:hi])
    return float(root_mean(squares.total(), y.size))


def subtract_signs(y: Array, bits: Array, scale: float) -> None:
    """Writes the bits of y >= 0, and takes +-scale from y."""
    pack, expand, signs, values = Pack(y.size), Expand(bits.size), table(scale), room(y.size, np.float32)
    for lo, hi in cuts(y.size):
        part, packed, value = y[lo:hi], bits[lo // 8 : hi // 8], values[: hi - lo]
        pack(part, packed)
        expand(packed, signs, value)
        np.subtract(part, value, out=part)
