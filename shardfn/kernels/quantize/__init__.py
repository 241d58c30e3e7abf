"""Blocks of a row in codes of 8 or 4 bits."""

from ._api import dequantize as dequantize, quantize as quantize
