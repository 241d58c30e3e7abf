"""Blocks of a row in codes of 8 or 4 bits, on a CPU: the definition, on parts of the size of a core's cache."""

from torch import Tensor

from shardfn.kernels._cpu_blocks import BLOCK
from shardfn.kernels.quantize._api import empty_codes

from . import _reference as reference
from ._slabs import slabs


def quantize(x: Tensor, bits: int, block: int) -> tuple[Tensor, Tensor]:
    """Maps [r, c] to int8 [r, c] or uint8 [r, ceil(c / 2)], and fp32 [r, ceil(c / block)]."""
    codes, scales = empty_codes(x, x.shape[1], bits, block)
    for part, some, factors in slabs(x, codes, scales, bits, block, BLOCK):
        for into, value in zip((some, factors), reference.quantize(part, bits, block), strict=True):
            into.copy_(value)
    return codes, scales


def dequantize_into(codes: Tensor, scales: Tensor, bits: int, block: int, out: Tensor) -> None:
    """Writes the dequantized values, in the dtype of `out` [r, c]."""
    for part, some, factors in slabs(out, codes, scales, bits, block, BLOCK):
        reference.dequantize_into(some, factors, bits, block, part)
