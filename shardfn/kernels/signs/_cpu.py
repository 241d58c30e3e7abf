"""Signs as bits, on a CPU."""

import numpy as np
import torch
from torch import Tensor

from shardfn.kernels._cpu_blocks import BLOCK, Expand, Pack, array, cuts, room, table


def pack_signs(x: Tensor) -> Tensor:
    """Maps [r, c] to uint8 [r, c / 8]."""
    bits = torch.empty(x.shape[0], x.shape[1] // 8, dtype=torch.uint8)
    x, out, pack = x.view(-1), array(bits).reshape(-1), Pack(x.numel())
    wide = torch.from_numpy(room(x.numel(), np.float32))
    for lo, hi in cuts(x.numel()):
        part = x[lo:hi] if x.dtype == torch.float32 else wide[: hi - lo].copy_(x[lo:hi])
        pack(array(part), out[lo // 8 : hi // 8])
    return bits


def unpack_signs(bits: Tensor, scale: Tensor, out: Tensor) -> None:
    """Writes +-scale of each row: uint8 [r, b], fp32 [r] into fp32 [r, 8 b]."""
    packed, values, expand = array(bits), array(out), Expand(bits.shape[1])
    for i, s in enumerate(scale.tolist()):
        signs = table(s)
        for lo, hi in cuts(bits.shape[1], BLOCK // 8):
            expand(packed[i, lo:hi], signs, values[i, 8 * lo : 8 * hi])
