"""Compression to 1 bit per element with error feedback.

Signs and scales of a tensor plus the error of earlier calls.
"""

import torch
from jaxtyping import Float, Float32, UInt8
from torch import Tensor

from shardfn.kernels._arguments import check_bytes, check_dtype, check_float, check_written
from shardfn.kernels._dispatch import implementation
from shardfn.kernels._library import define


def sign_compress(
    x: Float[Tensor, "*shape"], error: Float32[Tensor, "r c"], *, whole: bool = False
) -> tuple[UInt8[Tensor, "r c//8"], Float32[Tensor, " r"], Float32[Tensor, "r c"]]:
    """Compresses x plus the error of the previous call to 1 bit per element, and returns the new error.

    The error makes the compression a compression with error feedback:

        y = x + error
        scale = sqrt(mean(y^2))            of each row, or with whole=True of all rows together, the same in each
        bits = y >= 0                      packed as by `pack_signs`
        new_error = y - scale * sign(y)    where sign(0) = 1

    The compression is exact with its error: scale * sign(y) + new_error = y. Computed in fp32. Squares are added in
    float64, in the order of the definition, so every implementation on a CPU returns the same bits. A single infinity
    or NaN makes the scale, and so the errors of the rows, NaN: check x before.

    Args:
        x: input in fp32, bf16 or fp16, of any shape with at most r c elements. The elements fill the rows in order.
            Beyond the elements y is only the error. For example 100 elements leave 28 elements of an error [1, 128].
        error: fp32 [r, c], c a multiple of 8.
        whole: whether rows are parts of the same tensor.

    Returns:
        Bits uint8 [r, c / 8], scales fp32 [r], new error fp32 [r, c].

    Raises:
        TypeError: for other dtypes.
        ValueError: if 8 does not divide c, or x has more elements than error.

    Example:
        >>> from shardfn.kernels import unpack_signs
        >>> x = torch.tensor([1.0, -2, 3, -4, 0.5, 0.5, -0.5])
        >>> bits, scale, error = sign_compress(x, torch.zeros(1, 8))
        >>> bits, scale
        (tensor([[173]], dtype=torch.uint8), tensor([1.9605]))
        >>> torch.allclose(unpack_signs(bits, scale) + error, torch.tensor([*x, 0.0]))
        True

    References:
        Tang et al.: 1-bit Adam: Communication Efficient Large-Scale Training with Adam's Convergence Speed, 2021,
        https://arxiv.org/abs/2102.02888
    """
    _check_sizes(x, error)
    return torch.ops.shardfn_kernels.sign_compress(x, error, whole)


def sign_compress_(
    x: Float[Tensor, "*shape"], error: Float32[Tensor, "r c"], *, whole: bool = False
) -> tuple[UInt8[Tensor, "r c//8"], Float32[Tensor, " r"]]:
    """Compresses as `sign_compress`, and writes the new error over the old, contiguous error.

    Two passes on a CPU: x and error are read and error written. Then error is read and written, and bits are written.

    Args:
        x: see `sign_compress`.
        error: fp32 [r, c], overwritten.
        whole: see `sign_compress`.

    Returns:
        Bits uint8 [r, c / 8], scales fp32 [r].

    Raises:
        TypeError: for other dtypes.
        ValueError: if 8 does not divide c, x has more elements than error, or error is not contiguous.

    Example:
        >>> error = torch.zeros(1, 8)
        >>> bits, scale = sign_compress_(torch.tensor([1.0, -2, 3, -4, 0.5, 0.5, -0.5, 0]), error)
        >>> error
        tensor([[-0.9605, -0.0395,  1.0395, -2.0395, -1.4605, -1.4605,  1.4605, -1.9605]])
    """
    _check_sizes(x, error)
    check_written("error", error)
    return torch.ops.shardfn_kernels.sign_compress_(x, error, whole)


def _check_sizes(x: Tensor, error: Tensor) -> None:
    check_float("x", x)
    check_dtype("error", error, torch.float32)
    check_bytes("error", error.shape[1])
    if x.numel() > error.numel():
        raise ValueError(f"x has {x.numel()} elements, error has room for {error.numel()}: pad the error")


def _sign_compress_(x: Tensor, error: Tensor, whole: bool) -> tuple[Tensor, Tensor]:
    return implementation("sign_compress", "sign_compress", error.device)(x.contiguous().view(-1), error, whole)


def _sign_compress(x: Tensor, error: Tensor, whole: bool) -> tuple[Tensor, Tensor, Tensor]:
    error = error.clone(memory_format=torch.contiguous_format)
    return *_sign_compress_(x, error, whole), error


def _empty_codes(x: Tensor, error: Tensor, whole: bool) -> tuple[Tensor, Tensor]:
    r, c = error.shape
    return error.new_empty(r, c // 8, dtype=torch.uint8), error.new_empty(r)


define(
    "sign_compress(Tensor x, Tensor error, bool whole) -> (Tensor, Tensor, Tensor)",
    _sign_compress,
    lambda x, error, whole: (*_empty_codes(x, error, whole), error.new_empty(error.shape)),
)
define("sign_compress_(Tensor x, Tensor(a!) error, bool whole) -> (Tensor, Tensor)", _sign_compress_, _empty_codes)
