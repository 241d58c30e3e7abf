"""Block quantization: each block of a row as codes of 8 or 4 bits and a scale."""

import torch
from jaxtyping import Float, Float32, Integer
from torch import Tensor

from shardfn.kernels._arguments import FLOATS, check_block, check_dtype, check_float, check_shape, check_written
from shardfn.kernels._dispatch import implementation
from shardfn.kernels._library import define


def quantize(
    x: Float[Tensor, "r c"], *, bits: int = 8, block: int = 256
) -> tuple[Integer[Tensor, "r codes"], Float32[Tensor, "r blocks"]]:
    """Rounds x to integers of 8 or 4 bits, with a scale for each block of a row.

        S = 2^(bits-1) / max|x|                                     of the block, S = 1 where max|x| < 2^-110
        codes = clamp(round(x S), -2^(bits-1), 2^(bits-1) - 1)      ties to even
        scales = 1 / S = max|x| 2^(1-bits)

    So |x - codes * scales| <= max|x| / 2^bits, except for the clamped value +max|x|, with an error of a step. An
    infinity or NaN makes the block NaN. With 4 bits two codes share a byte, the first in the high nibble. For example a
    row of 600 elements with blocks of 256 has 3 scales. An odd row ends in a code 0. x is read twice, from the cache
    the second time.

    Args:
        x: input in fp32, bf16 or fp16, [r, c], computed in fp32.
        bits: 8 or 4.
        block: number of neighbouring elements of a row with the same scale. The last block of a row may be short. Even
            with 4 bits.

    Returns:
        Codes, int8 [r, c] or uint8 [r, ceil(c / 2)], and scales, fp32 [r, ceil(c / block)].

    Raises:
        TypeError: if x is of another dtype.
        ValueError: for other bits or blocks.

    Example:
        >>> quantize(torch.tensor([[-1.0, -0.5, 0, 0.25, 0.75, 1]]))
        (tensor([[-128,  -64,    0,   32,   96,  127]], dtype=torch.int8), tensor([[0.0078]]))

    References:
        Wang et al.: ZeRO++: Extremely Efficient Collective Communication for Giant Model Training, 2023,
        https://arxiv.org/abs/2306.10209
    """
    check_float("x", x)
    check_block(bits, block)
    return torch.ops.shardfn_kernels.quantize(x, bits, block)


def dequantize(
    codes: Integer[Tensor, "r codes"],
    scales: Float32[Tensor, "r blocks"],
    c: int,
    *,
    bits: int = 8,
    block: int = 256,
    dtype: torch.dtype = torch.float32,
    out: Float[Tensor, "r c"] | None = None,
) -> Float[Tensor, "r c"]:
    """Returns the values of the codes of `quantize`: codes * scales, computed in fp32.

    Args:
        codes: int8 [r, c], or uint8 [r, ceil(c / 2)] with 4 bits.
        scales: fp32 [r, ceil(c / block)].
        c: elements of a row.
        bits: 8 or 4, as in `quantize`.
        block: see `quantize`.
        dtype: dtype of the result, fp32, bf16 or fp16. With `out`, the dtype of `out`.
        out: [r, c], contiguous, to be filled. None for a new tensor.

    Returns:
        The values [r, c], or `out` if given.

    Raises:
        TypeError: for other dtypes.
        ValueError: for other bits or blocks, if shapes do not fit, or `out` is not contiguous.

    Example:
        >>> codes, scales = quantize(torch.tensor([[-1.0, -0.5, 0, 0.25, 0.75, 1]]), bits=4)
        >>> dequantize(codes, scales, 6, bits=4)
        tensor([[-1.0000, -0.5000,  0.0000,  0.2500,  0.7500,  0.8750]])

    References:
        Wang et al.: ZeRO++: Extremely Efficient Collective Communication for Giant Model Training, 2023,
        https://arxiv.org/abs/2306.10209
    """
    check_block(bits, block)
    check_codes(codes, scales, (codes.shape[0],), c, bits, block)
    if out is None:
        if dtype not in FLOATS:
            raise TypeError(f"dtype must be fp32, bf16 or fp16, got {dtype}")
        return torch.ops.shardfn_kernels.dequantize(codes, scales, c, bits, block, dtype)
    check_float("out", out)
    check_shape("out", out, (codes.shape[0], c), "rows of codes and c")
    check_written("out", out)
    torch.ops.shardfn_kernels.dequantize_into(codes, scales, bits, block, out)
    return out


def check_codes(codes: Tensor, scales: Tensor, rows: tuple[int, ...], c: int, bits: int, block: int) -> None:
    """Raises unless codes and scales have the dtypes and shapes of `quantize` for rows of c elements."""
    check_dtype("codes", codes, torch.int8 if bits == 8 else torch.uint8)
    check_dtype("scales", scales, torch.float32)
    check_shape("codes", codes, (*rows, c if bits == 8 else (c + 1) // 2), f"rows of c = {c} codes of {bits} bits")
    check_shape("scales", scales, (*rows, -(-c // block)), f"one for each block of {block} of c = {c} elements")


def _quantize_rows(x: Tensor, bits: int, block: int) -> tuple[Tensor, Tensor]:
    return implementation("quantize", "quantize", x.device)(x.contiguous(), bits, block)


def _dequantize_into(codes: Tensor, scales: Tensor, bits: int, block: int, out: Tensor) -> None:
    run = implementation("quantize", "dequantize_into", out.device)
    run(codes.contiguous(), scales.contiguous(), bits, block, out)


def _dequantize_rows(codes: Tensor, scales: Tensor, c: int, bits: int, block: int, dtype: torch.dtype) -> Tensor:
    out = scales.new_empty(codes.shape[0], c, dtype=dtype)
    _dequantize_into(codes, scales, bits, block, out)
    return out


def empty_codes(x: Tensor, c: int, bits: int, block: int) -> tuple[Tensor, Tensor]:
    """Returns uninitialised codes and scales for the number of rows of x, of c elements each."""
    r = x.shape[-2]
    codes = x.new_empty(r, c, dtype=torch.int8) if bits == 8 else x.new_empty(r, (c + 1) // 2, dtype=torch.uint8)
    return codes, x.new_empty(r, -(-c // block), dtype=torch.float32)


define(
    "quantize(Tensor x, int bits, int block) -> (Tensor, Tensor)",
    _quantize_rows,
    lambda x, bits, block: empty_codes(x, x.shape[1], bits, block),
)
define(
    "dequantize(Tensor codes, Tensor scales, SymInt c, int bits, int block, ScalarType dtype) -> Tensor",
    _dequantize_rows,
    lambda codes, scales, c, bits, block, dtype: scales.new_empty(codes.shape[0], c, dtype=dtype),
)
define(
    "dequantize_into(Tensor codes, Tensor scales, int bits, int block, Tensor(a!) out) -> ()",
    _dequantize_into,
    lambda *_: None,
)
