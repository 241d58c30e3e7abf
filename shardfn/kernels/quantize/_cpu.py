"""Blocks of a row in codes of 8 or 4 bits, on a CPU."""

from ._reference import dequantize_into as dequantize_into
from ._reference import quantize as quantize
