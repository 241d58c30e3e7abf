"""Sums of quantized rows, on a CPU: the definition, applied to parts of the size of a core's cache."""

from torch import Tensor

from shardfn.kernels._cpu_blocks import BLOCK
from shardfn.kernels.quantize import _cpu as quantizer
from shardfn.kernels.quantize import _reference as reference
from shardfn.kernels.quantize._slabs import slabs


def dequantize_sum(codes: Tensor, scales: Tensor, bits: int, block: int, out: Tensor) -> None:
    """Writes the sum over the first dim, in order, into fp32 [r, c]."""
    quantizer.dequantize_into(codes[0], scales[0], bits, block, out)
    for more, factors in zip(codes[1:], scales[1:], strict=True):
        for part, some, these in slabs(out, more, factors, bits, block, BLOCK):
            part += reference.dequantize(some, these, part.shape[1], bits, block)


def dequantize_sum_quantize(codes: Tensor, scales: Tensor, c: int, bits: int, block: int) -> tuple[Tensor, Tensor]:
    """Maps [k, r, ...], [k, r, blocks] to [r, ...], [r, blocks]."""
    total = scales.new_empty(codes.shape[1], c)
    dequantize_sum(codes, scales, bits, block, total)
    return quantizer.quantize(total, bits, block)
