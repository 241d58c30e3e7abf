"""Sums of quantized rows, as floats or quantized again."""

from ._api import dequantize_sum as dequantize_sum, dequantize_sum_quantize as dequantize_sum_quantize
