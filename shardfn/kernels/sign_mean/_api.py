"""The mean of several workers' signs, compressed again to signs and a scale."""

import torch
from jaxtyping import Float32, UInt8
from torch import Tensor

from shardfn.kernels._arguments import check_dtype, check_shape, check_written
from shardfn.kernels._dispatch import implementation
from shardfn.kernels._library import define


def sign_mean(
    bits: UInt8[Tensor, "k b"], scale: Float32[Tensor, " k"], error: Float32[Tensor, " 8*b"]
) -> tuple[UInt8[Tensor, " b"], Float32[Tensor, "1"], Float32[Tensor, " 8*b"]]:
    """Averages the signs of k workers, adds the error of the previous call, and compresses the result.

        z = (scale_0 q_0 + ... + scale_(k-1) q_(k-1)) / k + error    q_i = +-1 of row i, added in the order of rows
        scale = sqrt(mean(z^2)), bits = z >= 0, new_error = z - scale * sign(z)

    Computed in fp32, as in `sign_compress`. No [k, 8 b] of floats is made.

    Args:
        bits: bits from `pack_signs`, uint8 [k, b], a row of each worker, with k >= 1.
        scale: fp32 [k].
        error: fp32 [8 b], the server's.

    Returns:
        Bits uint8 [b], scale fp32 [1], new error fp32 [8 b].

    Raises:
        TypeError: for other dtypes.
        ValueError: if shapes differ, or there is no row.

    Example:
        >>> bits = torch.tensor([[0b10101101], [0b00110001]], dtype=torch.uint8)
        >>> sign_mean(bits, torch.tensor([2.0, 1.0]), torch.zeros(8))[:2]
        (tensor([173], dtype=torch.uint8), tensor([1.1180]))

    References:
        Tang et al.: 1-bit Adam: Communication Efficient Large-Scale Training with Adam's Convergence Speed, 2021,
        https://arxiv.org/abs/2102.02888
    """
    _check_shapes(bits, scale, error)
    return torch.ops.shardfn_kernels.sign_mean(bits, scale, error)


def sign_mean_(
    bits: UInt8[Tensor, "k b"], scale: Float32[Tensor, " k"], error: Float32[Tensor, " 8*b"]
) -> tuple[UInt8[Tensor, " b"], Float32[Tensor, "1"]]:
    """Averages as `sign_mean`, and writes the new error over the old, contiguous error.

    Args:
        bits: see `sign_mean`.
        scale: see `sign_mean`.
        error: fp32 [8 b], overwritten.

    Returns:
        Bits uint8 [b], scale fp32 [1].

    Raises:
        TypeError: for other dtypes.
        ValueError: if shapes differ, there is no row, or error is not contiguous.

    Example:
        >>> error = torch.zeros(8)
        >>> bits, scale = sign_mean_(torch.tensor([[0b10101101]], dtype=torch.uint8), torch.tensor([2.0]), error)
        >>> bits, scale, error
        (tensor([173], dtype=torch.uint8), tensor([2.]), tensor([0., 0., 0., 0., 0., 0., 0., 0.]))
    """
    _check_shapes(bits, scale, error)
    check_written("error", error)
    return torch.ops.shardfn_kernels.sign_mean_(bits, scale, error)


def _check_shapes(bits: Tensor, scale: Tensor, error: Tensor) -> None:
    k, b = bits.shape
    check_dtype("bits", bits, torch.uint8)
    check_dtype("scale", scale, torch.float32)
    check_dtype("error", error, torch.float32)
    check_shape("scale", scale, (k,), "one of each row of bits")
    check_shape("error", error, (8 * b,), "8 elements of each byte of bits")
    if k < 1:
        raise ValueError("bits has no row: there is no mean of nothing")


def _sign_mean_(bits: Tensor, scale: Tensor, error: Tensor) -> tuple[Tensor, Tensor]:
    return implementation("sign_mean", "sign_mean", error.device)(bits.contiguous(), scale.contiguous(), error)


def _sign_mean(bits: Tensor, scale: Tensor, error: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    error = error.clone(memory_format=torch.contiguous_format)
    return *_sign_mean_(bits, scale, error), error


def _empty_codes(bits: Tensor, scale: Tensor, error: Tensor) -> tuple[Tensor, Tensor]:
    return bits.new_empty(bits.shape[1]), scale.new_empty(1)


define(
    "sign_mean(Tensor bits, Tensor scale, Tensor error) -> (Tensor, Tensor, Tensor)",
    _sign_mean,
    lambda bits, scale, error: (*_empty_codes(bits, scale, error), error.new_empty(error.shape)),
)
define("sign_mean_(Tensor bits, Tensor scale, Tensor(a!) error) -> (Tensor, Tensor)", _sign_mean_, _empty_codes)
