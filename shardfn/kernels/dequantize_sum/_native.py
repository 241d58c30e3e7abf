"""Sums of quantized rows, on a CPU, in C++."""

import torch
from torch import Tensor

from shardfn.kernels._build import call
from shardfn.kernels.quantize._api import empty_codes


def dequantize_sum(codes: Tensor, scales: Tensor, bits: int, block: int, out: Tensor) -> None:
    """Writes the sum over the first dim, in order, into fp32 [r, c]."""
    call("dequantize_sum", codes, scales, codes.shape[0], *out.shape, bits, block, out, None, None)


def dequantize_sum_quantize(codes: Tensor, scales: Tensor, c: int, bits: int, block: int) -> tuple[Tensor, Tensor]:
    """Maps [k, r, ...], [k, r, blocks] to [r, ...], [r, blocks]."""
    k, r, _ = codes.shape
    result = empty_codes(scales, c, bits, block)
    call("dequantize_sum", codes, scales, k, r, c, bits, block, torch.empty(min(block, c)), *result)
    return result
