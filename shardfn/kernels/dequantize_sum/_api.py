"""Sums of quantized rows, as floats or quantized again."""

import torch
from jaxtyping import Float32, Integer
from torch import Tensor

from shardfn.kernels._arguments import check_block
from shardfn.kernels._dispatch import implementation
from shardfn.kernels._library import define
from shardfn.kernels.quantize._api import check_codes, empty_codes


def dequantize_sum(
    codes: Integer[Tensor, "k r codes"],
    scales: Float32[Tensor, "k r blocks"],
    c: int,
    *,
    bits: int = 8,
    block: int = 256,
) -> Float32[Tensor, "r c"]:
    """Returns the sum over k of dequantized codes of `quantize`, in fp32, added in the order of k.

    Args:
        codes: int8 [k, r, c], or uint8 [k, r, ceil(c / 2)] with 4 bits, with k >= 1.
        scales: fp32 [k, r, ceil(c / block)].
        c: elements of a row.
        bits: 8 or 4, as in `quantize`.
        block: see `quantize`.

    Returns:
        fp32 [r, c].

    Raises:
        TypeError: for other dtypes.
        ValueError: for other bits or blocks, if shapes do not fit, or k is 0.

    Example:
        >>> from shardfn.kernels import quantize
        >>> codes, scales = quantize(torch.tensor([[-1.0, 0.5], [-2.0, 1.0]]))
        >>> dequantize_sum(codes[:, None], scales[:, None], 2)
        tensor([[-3.0000,  1.5000]])
    """
    _check_inputs(codes, scales, c, bits, block)
    return torch.ops.shardfn_kernels.dequantize_sum(codes, scales, c, bits, block)


def dequantize_sum_quantize(
    codes: Integer[Tensor, "k r codes"],
    scales: Float32[Tensor, "k r blocks"],
    c: int,
    *,
    bits: int = 8,
    block: int = 256,
) -> tuple[Integer[Tensor, "r codes"], Float32[Tensor, "r blocks"]]:
    """Returns `quantize(dequantize_sum(...))` without the floats between.

    The middle of a reduction in two hops.

    The op sums in fp32, and does not divide: for the mean divide once, at the end.

    Args:
        codes: int8 [k, r, c], or uint8 [k, r, ceil(c / 2)] with 4 bits, with k >= 1.
        scales: fp32 [k, r, ceil(c / block)].
        c: elements of a row.
        bits: 8 or 4, as in `quantize`, of the argument and of the result.
        block: see `quantize`.

    Returns:
        Codes and scales of the sum, as from `quantize`.

    Raises:
        TypeError: for other dtypes.
        ValueError: for other bits or blocks, if shapes do not fit, or k is 0.

    Example:
        >>> from shardfn.kernels import quantize
        >>> codes, scales = quantize(torch.tensor([[-1.0, 0.5], [-2.0, 1.0]]))
        >>> dequantize_sum_quantize(codes[:, None], scales[:, None], 2)
        (tensor([[-128,   64]], dtype=torch.int8), tensor([[0.0234]]))

    References:
        Wang et al.: ZeRO++: Extremely Efficient Collective Communication for Giant Model Training, 2023,
        https://arxiv.org/abs/2306.10209
    """
    _check_inputs(codes, scales, c, bits, block)
    return torch.ops.shardfn_kernels.dequantize_sum_quantize(codes, scales, c, bits, block)


def _check_inputs(codes: Tensor, scales: Tensor, c: int, bits: int, block: int) -> None:
    check_block(bits, block)
    check_codes(codes, scales, tuple(codes.shape[:2]), c, bits, block)
    if codes.shape[0] < 1:
        raise ValueError("codes has no row: there is no sum of nothing")


def _dequantize_sum(codes: Tensor, scales: Tensor, c: int, bits: int, block: int) -> Tensor:
    out = scales.new_empty(codes.shape[1], c)
    run = implementation("dequantize_sum", "dequantize_sum", out.device)
    run(codes.contiguous(), scales.contiguous(), bits, block, out)
    return out


def _dequantize_sum_quantize(codes: Tensor, scales: Tensor, c: int, bits: int, block: int) -> tuple[Tensor, Tensor]:
    run = implementation("dequantize_sum", "dequantize_sum_quantize", scales.device)
    return run(codes.contiguous(), scales.contiguous(), c, bits, block)


define(
    "dequantize_sum(Tensor codes, Tensor scales, SymInt c, int bits, int block) -> Tensor",
    _dequantize_sum,
    lambda codes, scales, c, bits, block: scales.new_empty(codes.shape[1], c),
)
define(
    "dequantize_sum_quantize(Tensor codes, Tensor scales, SymInt c, int bits, int block) -> (Tensor, Tensor)",
    _dequantize_sum_quantize,
    lambda codes, scales, c, bits, block: empty_codes(scales, c, bits, block),
)
