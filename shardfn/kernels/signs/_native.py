"""Signs as bits, on a CPU, in C++."""

import torch
from torch import Tensor

from shardfn.kernels._build import call
from shardfn.kernels._cpu_blocks import cuts, table
from shardfn.kernels._sums import SPAN


def pack_signs(x: Tensor) -> Tensor:
    """Maps [r, c] to uint8 [r, c / 8]."""
    bits = torch.empty(x.shape[0], x.shape[1] // 8, dtype=torch.uint8)
    flat, out = x.view(-1), bits.view(-1)
    for lo, hi in cuts(x.numel(), x.numel() if x.dtype == torch.float32 else SPAN):
        part = flat[lo:hi].float()
        call("pack", part, hi - lo, out[lo // 8 :])
    return bits


def unpack_signs(bits: Tensor, scale: Tensor, out: Tensor) -> None:
    """Writes +-scale of each row: uint8 [r, b], fp32 [r] into fp32 [r, 8 b]."""
    for row, s, values in zip(bits, scale.tolist(), out, strict=True):
        call("expand", row, row.numel(), table(s), values)
