"""Attention of ragged tokens over a paged KV cache. The cache first receives the tokens' keys and values."""

from ._api import ragged_attention as ragged_attention
from ._codes import (
    cache_row as cache_row,
    quantize_cache_rows as quantize_cache_rows,
    dequantize_cache_rows as dequantize_cache_rows,
)
