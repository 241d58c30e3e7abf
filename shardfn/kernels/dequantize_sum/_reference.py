"""Sums of quantized rows: the definition."""

from torch import Tensor

from shardfn.kernels.quantize import _reference as quantizer


def dequantize_sum(codes: Tensor, scales: Tensor, bits: int, block: int, out: Tensor) -> None:
    """Writes the sum over the first dim, in order, into fp32 [r, c]."""
    out.copy_(quantizer.dequantize(codes[0], scales[0], out.shape[1], bits, block))
    for i in range(1, codes.shape[0]):
        out += quantizer.dequantize(codes[i], scales[i], out.shape[1], bits, block)


def dequantize_sum_quantize(codes: Tensor, scales: Tensor, c: int, bits: int, block: int) -> tuple[Tensor, Tensor]:
    """Maps [k, r, ...], [k, r, blocks] to [r, ...], [r, blocks]."""
    total = scales.new_empty(codes.shape[1], c)
    dequantize_sum(codes, scales, bits, block, total)
    return quantizer.quantize(total, bits, block)
