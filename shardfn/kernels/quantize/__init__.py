"""Block quantization: each block of a row as codes of 8 or 4 bits and a scale."""

from ._api import dequantize as dequantize, quantize as quantize
