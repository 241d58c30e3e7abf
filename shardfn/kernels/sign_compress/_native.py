"""A tensor plus the previous error, as signs and scales, on a CPU, in C++."""

import torch
from torch import Tensor

from shardfn.kernels._build import call, total
from shardfn.kernels._cpu_blocks import cuts
from shardfn.kernels._sums import LANES, SPAN, root_mean


def sign_compress(x: Tensor, error: Tensor, whole: bool) -> tuple[Tensor, Tensor]:
    """Maps flat [n], fp32 [r, c] with n <= r c to uint8 [r, c / 8], fp32 [r]. Overwrites the error."""
    r, c = error.shape
    y = error.view(1, r * c) if whole else error
    scales = [_add_input(x, row, i * row.numel()) for i, row in enumerate(y)]
    bits = torch.empty(r, c // 8, dtype=torch.uint8)
    for row, packed, scale in zip(y, bits.view(y.shape[0], y.shape[1] // 8), scales, strict=True):
        call("subtract_signs", row, row.numel(), scale, packed)
    return bits, torch.tensor(scales * r if whole else scales, dtype=torch.float32)


def _add_input(x: Tensor, y: Tensor, start: int) -> float:
    c = y.numel()
    lanes = torch.zeros(-(-c // SPAN), LANES, dtype=torch.float64)
    for lo, hi in cuts(c, c if x.dtype == torch.float32 else SPAN):
        more = x[start + lo : start + hi].float()
        call("add_squares", more, more.numel(), y[lo:], hi - lo, lanes[lo // SPAN :])
    return float(root_mean(total(lanes), c))
