"""Rows of a KV cache in codes: the key or value of a head has codes of a byte each, and a scale.

    int8    x = scale q,    q from -127 to 127            scale = max|x| / 127
    fp8     x = scale q,    q of float8_e4m3fn            scale = max|x| / 448

A row is the codes, padded with zeros to a multiple of four bytes, then the scale in float32, for example 64 + 4 bytes
for a head dim of 64. So a token's codes depend only on the token's key and value, not on other tokens.
"""

import torch
from jaxtyping import Float32, Shaped, UInt8
from torch import Tensor

# The largest code of each dtype.
LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}


def cache_row(head_dim: int, dtype: torch.dtype) -> int:
    """Returns the elements of a row of a cache: the head dim, and for codes the bytes of codes and scale.

    Example:
        >>> cache_row(77, torch.float32), cache_row(77, torch.int8)
        (77, 84)
    """
    return -(-head_dim // 4) * 4 + 4 if dtype in LARGEST else head_dim


def quantize_cache_rows(x: Float32[Tensor, "*batch k"], dtype: torch.dtype) -> UInt8[Tensor, "*batch row"]:
    """Rounds rows to codes. |x - decoded| is at most half of the scale in int8, and max(|x| / 16, scale / 1024) in fp8.

    A row with an infinite or NaN value is decoded as NaN.

    Args:
        x: the rows.
        dtype: `torch.int8` or `torch.float8_e4m3fn`.

    Returns:
        The bytes of the rows.

    Example:
        >>> rows = quantize_cache_rows(torch.tensor([[1.0, -4.0, 0.5]]), torch.float8_e4m3fn)
        >>> dequantize_cache_rows(rows, 3, torch.float8_e4m3fn)
        tensor([[ 1.0000, -4.0000,  0.5000]])
    """
    top, k = LARGEST[dtype], x.shape[-1]
    scale = x.abs().amax(-1, keepdim=True) / top
    q = torch.where(scale > 0, x / scale, 0.0).clamp(-top, top).nan_to_num(0.0)
    codes = (q.round() if dtype == torch.int8 else q).to(dtype).view(torch.uint8)
    codes = torch.nn.functional.pad(codes, (0, cache_row(k, dtype) - 4 - k))
    return torch.cat([codes, scale.view(torch.uint8)], -1)


def dequantize_cache_rows(rows: UInt8[Tensor, "*batch row"], k: int, dtype: torch.dtype) -> Float32[Tensor, "*batch k"]:
    """Returns the values of the bytes of rows.

    Args:
        rows: rows from `quantize_cache_rows`.
        k: the head dim.
        dtype: see `quantize_cache_rows`.
    """
    scale = rows[..., -4:].contiguous().view(torch.float32)
    return rows[..., :k].contiguous().view(dtype).float() * scale


def as_rows(cache: Shaped[Tensor, "*batch row"]) -> Shaped[Tensor, "*batch row"]:
    """Returns a cache of codes as bytes, as a view."""
    return cache.view(torch.uint8) if cache.dtype in LARGEST else cache
