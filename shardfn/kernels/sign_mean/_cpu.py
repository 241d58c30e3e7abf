"""The mean of signs plus the previous error, as signs and a scale, on a CPU."""

import numpy as np
import torch
from torch import Tensor

from shardfn.kernels._cpu_blocks import Array, Expand, Squares, array, cuts, room, table
from shardfn.kernels._sums import root_mean
from shardfn.kernels.sign_compress._cpu import subtract_signs


def sign_mean(bits: Tensor, scale: Tensor, error: Tensor) -> tuple[Tensor, Tensor]:
    """Maps uint8 [k, b], fp32 [k], fp32 [8 b] to uint8 [b], fp32 [1]. Overwrites the error."""
    packed = torch.empty(bits.shape[1], dtype=torch.uint8)
    with np.errstate(all="ignore"):
        root = _add_mean(array(bits), [table(s) for s in scale.tolist()], array(error))
        subtract_signs(array(error), array(packed), root)
    return packed, torch.tensor([root])


def _add_mean(bits: Array, tables: list[Array], z: Array) -> float:
    """Adds the mean to z, and returns the scale."""
    squares, expand = Squares(z.size), Expand(bits.shape[1])
    total, value = room(z.size, np.float32), room(z.size, np.float32)
    for lo, hi in cuts(z.size):
        sums, values = total[: hi - lo], value[: hi - lo]
        for row, signs in zip(bits[:, lo // 8 : hi // 8], tables, strict=True):
            expand(row, signs, values if signs is not tables[0] else sums)
            if signs is not tables[0]:
                np.add(sums, values, out=sums)
        np.divide(sums, np.float32(len(tables)), out=sums)
        np.add(sums, z[lo:hi], out=z[lo:hi])
        squares.add(z[lo:hi])
    return float(root_mean(squares.total(), z.size))
