"""Sums of quantized rows, on a CPU."""

from ._reference import dequantize_sum as dequantize_sum
from ._reference import dequantize_sum_quantize as dequantize_sum_quantize
