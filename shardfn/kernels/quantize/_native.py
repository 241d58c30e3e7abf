"""Blocks of a row in codes of 8 or 4 bits, on a CPU, in C++."""

import torch
from torch import Tensor

from shardfn.kernels._build import call
from shardfn.kernels._sums import SPAN
from shardfn.kernels.quantize._api import empty_codes

from ._slabs import slabs


def quantize(x: Tensor, bits: int, block: int) -> tuple[Tensor, Tensor]:
    """Maps [r, c] to int8 [r, c] or uint8 [r, ceil(c / 2)], and fp32 [r, ceil(c / block)]."""
    codes, scales = empty_codes(x, x.shape[1], bits, block)
    for part, some, factors in slabs(x, codes, scales, bits, block, _scratch_size(x)):
        call("quantize", part.float(), *part.shape, bits, block, some, factors)
    return codes, scales


def dequantize_into(codes: Tensor, scales: Tensor, bits: int, block: int, out: Tensor) -> None:
    """Writes the dequantized values, in the dtype of `out` [r, c]."""
    for part, some, factors in slabs(out, codes, scales, bits, block, _scratch_size(out)):
        wide = part if part.dtype == torch.float32 else torch.empty(part.shape)
        call("dequantize", some, factors, *part.shape, bits, block, wide)
        if wide is not part:
            part.copy_(wide)


def _scratch_size(x: Tensor) -> int:
    return x.numel() if x.dtype == torch.float32 else SPAN
