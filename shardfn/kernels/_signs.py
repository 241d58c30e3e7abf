"""Signs as bits."""

import torch
from jaxtyping import Float, Float32, UInt8
from torch import Tensor

from shardfn.kernels._arguments import check_bytes, check_dtype, check_float, check_shape, check_written
from shardfn.kernels._dispatch import implementation
from shardfn.kernels._library import define


def pack_signs(x: Float[Tensor, "r c"]) -> UInt8[Tensor, "r c//8"]:
    """Packs signs, 8 a byte: the bit is 1 where x >= 0, and the first element is the most significant bit.

    So 0.0 and -0.0 count as positive, NaN as negative. Equivalent:

        weights = 2 ** torch.arange(7, -1, -1)
        ((x >= 0).reshape(r, c // 8, 8) * weights).sum(-1).to(torch.uint8)

    Reads x once and writes c / 8 bytes a row.

    Args:
        x: fp32, bf16 or fp16 [r, c], c a multiple of 8.

    Returns:
        Bits, uint8 [r, c / 8].

    Raises:
        TypeError: if x is of another dtype.
        ValueError: if 8 does not divide c.

    Example:
        >>> pack_signs(torch.tensor([[1.0, -1, 0, -0.0, -2, 3, -4, -5]]))
        tensor([[180]], dtype=torch.uint8)

    References:
        Seide, Fu, Droppo, Li, Yu: 1-Bit Stochastic Gradient Descent and its Application to Data-Parallel Distributed
        Training of Speech DNNs, Interspeech 2014.
    """
    check_float("x", x)
    check_bytes("x", x.shape[1])
    return torch.ops.shardfn_kernels.pack_signs(x)


def unpack_signs(
    bits: UInt8[Tensor, "r b"], scale: Float32[Tensor, "r"], *, out: Float32[Tensor, "r 8*b"] | None = None
) -> Float32[Tensor, "r 8*b"]:
    """Returns signs times the scale of the row: +scale where the bit is 1, -scale elsewhere.

    Equivalent:

        ones = (bits[..., None] >> torch.arange(7, -1, -1)) & 1
        torch.where(ones.bool().reshape(r, 8 * b), scale[:, None], -scale[:, None])

    Args:
        bits: bits from `pack_signs`, uint8 [r, b].
        scale: fp32 [r].
        out: fp32 [r, 8 b], contiguous, to be filled: fresh memory must first be faulted in. None for a new tensor.

    Returns:
        fp32 [r, 8 b], or `out` if given.

    Raises:
        TypeError: for other dtypes.
        ValueError: if shapes differ, or `out` is not contiguous.

    Example:
        >>> unpack_signs(torch.tensor([[180]], dtype=torch.uint8), torch.tensor([0.5]))
        tensor([[ 0.5000, -0.5000,  0.5000,  0.5000, -0.5000,  0.5000, -0.5000, -0.5000]])
    """
    r, b = bits.shape
    check_dtype("bits", bits, torch.uint8)
    check_dtype("scale", scale, torch.float32)
    check_shape("scale", scale, (r,), "one of each row of bits")
    if out is None:
        return torch.ops.shardfn_kernels.unpack_signs(bits, scale)
    check_dtype("out", out, torch.float32)
    check_shape("out", out, (r, 8 * b), "8 elements of each byte of bits")
    check_written("out", out)
    torch.ops.shardfn_kernels.unpack_signs_into(bits, scale, out)
    return out


def _pack_signs(x: Tensor) -> Tensor:
    return implementation("signs", "pack_signs", x.device)(x.contiguous())


def _unpack_signs_into(bits: Tensor, scale: Tensor, out: Tensor) -> None:
    implementation("signs", "unpack_signs", out.device)(bits.contiguous(), scale.contiguous(), out)


def _unpack_signs(bits: Tensor, scale: Tensor) -> Tensor:
    out = _empty_values(bits, scale)
    _unpack_signs_into(bits, scale, out)
    return out


def _empty_values(bits: Tensor, scale: Tensor) -> Tensor:
    return scale.new_empty(bits.shape[0], 8 * bits.shape[1])


define(
    "pack_signs(Tensor x) -> Tensor",
    _pack_signs,
    lambda x: x.new_empty(x.shape[0], x.shape[1] // 8, dtype=torch.uint8),
)
define("unpack_signs(Tensor bits, Tensor scale) -> Tensor", _unpack_signs, _empty_values)
define("unpack_signs_into(Tensor bits, Tensor scale, Tensor(a!) out) -> ()", _unpack_signs_into, lambda *_: None)
