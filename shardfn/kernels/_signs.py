"""Compression to 1 bit per element: signs packed 8 to a byte, with scales and error feedback.

`sign_compress` packs a tensor plus the error of earlier calls. `sign_mean` averages the signs of several workers, and
compresses the mean again.
"""

import functools

import numpy as np
import torch
from jaxtyping import Float, Float32, UInt8
from torch import Tensor

from ._arguments import check_bytes, check_dtype, check_shape, check_written
from ._build import call, sum_lanes
from ._fixed_bits import LANES, SPAN, cut_spans, root_mean, sum_squares
from ._op import FLOATS, KernelOp


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
    PACK_SIGNS.check_dtype("x", x)
    check_bytes("x", x.shape[1])
    return PACK_SIGNS(x)


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
        return UNPACK_SIGNS(bits, scale)
    check_dtype("out", out, torch.float32)
    check_shape("out", out, (r, 8 * b), "8 elements of each byte of bits")
    check_written("out", out)
    UNPACK_SIGNS_INTO(bits, scale, out)
    return out


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
    _check_compressed(x, error)
    return SIGN_COMPRESS(x, error, whole)


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
    _check_compressed(x, error)
    check_written("error", error)
    return SIGN_COMPRESS_(x, error, whole)


def _check_compressed(x: Tensor, error: Tensor) -> None:
    SIGN_COMPRESS.check_dtype("x", x)
    check_dtype("error", error, torch.float32)
    check_bytes("error", error.shape[1])
    if x.numel() > error.numel():
        raise ValueError(f"x has {x.numel()} elements, error has room for {error.numel()}: pad the error")


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
    _check_averaged(bits, scale, error)
    return SIGN_MEAN(bits, scale, error)


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
    _check_averaged(bits, scale, error)
    check_written("error", error)
    return SIGN_MEAN_(bits, scale, error)


def _check_averaged(bits: Tensor, scale: Tensor, error: Tensor) -> None:
    k, b = bits.shape
    check_dtype("bits", bits, torch.uint8)
    check_dtype("scale", scale, torch.float32)
    check_dtype("error", error, torch.float32)
    check_shape("scale", scale, (k,), "one of each row of bits")
    check_shape("error", error, (8 * b,), "8 elements of each byte of bits")
    if k < 1:
        raise ValueError("bits must have at least one row for a mean")


# The definitions.


def _pack_by_torch(x: Tensor) -> Tensor:
    weights = torch.tensor([128, 64, 32, 16, 8, 4, 2, 1], device=x.device)
    return ((x >= 0).reshape(x.shape[0], -1, 8) * weights).sum(-1).to(torch.uint8) if x.numel() else _empty_bits(x)


def _unpack_by_torch(bits: Tensor, scale: Tensor, out: Tensor) -> None:
    shifts = torch.arange(7, -1, -1, device=bits.device)
    ones = (bits[..., None].long() >> shifts & 1).bool().reshape(out.shape)
    out.copy_(torch.where(ones, scale[:, None], -scale[:, None]))


def _compress_by_torch(x: Tensor, error: Tensor, whole: bool) -> tuple[Tensor, Tensor]:
    r, c = error.shape
    flat = x.reshape(-1).float()
    y = torch.nn.functional.pad(flat, (0, r * c - x.numel())).reshape(r, c) + error
    return _compress_into(y, error, whole)


def _compress_into(y: Tensor, error: Tensor, whole: bool) -> tuple[Tensor, Tensor]:
    """Returns the codes of y, and writes y minus the values of the codes to `error` (y is allowed)."""
    r, c = y.shape
    squares = sum_squares(y.reshape(1, r * c)) if whole else sum_squares(y)
    scale = root_mean(squares, r * c if whole else c).expand(r).contiguous()
    error.copy_(y - torch.where(y >= 0, scale[:, None], -scale[:, None]))
    return _pack_by_torch(y), scale


def _average_by_torch(bits: Tensor, scale: Tensor, error: Tensor) -> tuple[Tensor, Tensor]:
    k, b = bits.shape
    values = error.new_empty(k, 8 * b)
    _unpack_by_torch(bits, scale, values)
    mean = functools.reduce(torch.add, values.unbind()) / k
    packed, root = _compress_into((mean + error)[None], error[None], True)
    return packed[0], root


# In C++.

# The eight signs of each byte.
_SIGNS = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1).astype(np.float32) * 2 - 1


def _table_of(scale: float) -> np.ndarray:
    """Returns, for each of the 256 bytes, +scale or -scale for each of the 8 bits: [256, 8]."""
    return _SIGNS * np.float32(scale)


def _pack_natively(x: Tensor) -> Tensor:
    bits = _empty_bits(x)
    flat, out = x.view(-1), bits.view(-1)
    for lo, hi in cut_spans(x.numel(), x.numel() if x.dtype == torch.float32 else SPAN):
        call("pack", flat[lo:hi].float(), hi - lo, out[lo // 8 :])
    return bits


def _unpack_natively(bits: Tensor, scale: Tensor, out: Tensor) -> None:
    call("unpack_rows", bits, scale, *bits.shape, out)


def _compress_natively(x: Tensor, error: Tensor, whole: bool) -> tuple[Tensor, Tensor]:
    r, c = error.shape
    x, y = x.view(-1), error.view(1, r * c) if whole else error
    scales = [_add_input(x, row, i * row.numel()) for i, row in enumerate(y)]
    bits = torch.empty(r, c // 8, dtype=torch.uint8)
    for row, packed, scale in zip(y, bits.view(y.shape[0], y.shape[1] // 8), scales, strict=True):
        call("subtract_signs", row, row.numel(), scale, packed)
    return bits, torch.tensor(scales * r if whole else scales, dtype=torch.float32)


def _add_input(x: Tensor, y: Tensor, start: int) -> float:
    """Adds x from an element on to y, and returns the scale."""
    c = y.numel()
    lanes = torch.zeros(-(-c // SPAN), LANES, dtype=torch.float64)
    for lo, hi in cut_spans(c, c if x.dtype == torch.float32 else SPAN):
        more = x[start + lo : start + hi].float()
        call("add_squares", more, more.numel(), y[lo:], hi - lo, lanes[lo // SPAN :])
    return float(root_mean(sum_lanes(lanes), c))


def _average_natively(bits: Tensor, scale: Tensor, error: Tensor) -> tuple[Tensor, Tensor]:
    k, b = bits.shape
    lanes = torch.zeros(-(-8 * b // SPAN), LANES, dtype=torch.float64)
    call("add_mean", bits, k, b, np.stack([_table_of(s) for s in scale.tolist()]), error, lanes)
    root, packed = root_mean(sum_lanes(lanes), 8 * b), torch.empty(b, dtype=torch.uint8)
    call("subtract_signs", error, 8 * b, float(root), packed)
    return packed, root.reshape(1)


# Ops with new results, by the ops that write.


def _unpack_signs(bits: Tensor, scale: Tensor) -> Tensor:
    out = _empty_values(bits, scale)
    UNPACK_SIGNS_INTO.run(bits, scale, out)
    return out


def _sign_compress(x: Tensor, error: Tensor, whole: bool) -> tuple[Tensor, Tensor, Tensor]:
    error = error.clone(memory_format=torch.contiguous_format)
    return *SIGN_COMPRESS_.run(x, error, whole), error


def _sign_mean(bits: Tensor, scale: Tensor, error: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    error = error.clone(memory_format=torch.contiguous_format)
    return *SIGN_MEAN_.run(bits, scale, error), error


def _empty_bits(x: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], x.shape[1] // 8, dtype=torch.uint8)


def _empty_values(bits: Tensor, scale: Tensor) -> Tensor:
    return scale.new_empty(bits.shape[0], 8 * bits.shape[1])


def _empty_codes(x: Tensor, error: Tensor, whole: bool) -> tuple[Tensor, Tensor]:
    del x, whole
    return _empty_bits(error), error.new_empty(error.shape[0])


def _empty_mean(bits: Tensor, scale: Tensor, error: Tensor) -> tuple[Tensor, Tensor]:
    del error
    return bits.new_empty(bits.shape[1]), scale.new_empty(1)


PACK_SIGNS = KernelOp(
    schema="pack_signs(Tensor x) -> Tensor",
    abstract=_empty_bits,
    reference=_pack_by_torch,
    dtypes=FLOATS,
    native=_pack_natively,
    triton="_signs_triton.pack_signs",
)
UNPACK_SIGNS_INTO = KernelOp(
    schema="unpack_signs_into(Tensor bits, Tensor scale, Tensor(a!) out) -> ()",
    reference=_unpack_by_torch,
    native=_unpack_natively,
    triton="_signs_triton.unpack_signs",
)
UNPACK_SIGNS = KernelOp(
    schema="unpack_signs(Tensor bits, Tensor scale) -> Tensor", abstract=_empty_values, reference=_unpack_signs
)
SIGN_COMPRESS_ = KernelOp(
    schema="sign_compress_(Tensor x, Tensor(a!) error, bool whole) -> (Tensor, Tensor)",
    abstract=_empty_codes,
    reference=_compress_by_torch,
    dtypes=FLOATS,
    native=_compress_natively,
    triton="_signs_triton.sign_compress",
)
SIGN_COMPRESS = KernelOp(
    schema="sign_compress(Tensor x, Tensor error, bool whole) -> (Tensor, Tensor, Tensor)",
    abstract=lambda x, error, whole: (*_empty_codes(x, error, whole), error.new_empty(error.shape)),
    reference=_sign_compress,
    dtypes=FLOATS,
)
SIGN_MEAN_ = KernelOp(
    schema="sign_mean_(Tensor bits, Tensor scale, Tensor(a!) error) -> (Tensor, Tensor)",
    abstract=_empty_mean,
    reference=_average_by_torch,
    native=_average_natively,
    triton="_signs_triton.sign_mean",
)
SIGN_MEAN = KernelOp(
    schema="sign_mean(Tensor bits, Tensor scale, Tensor error) -> (Tensor, Tensor, Tensor)",
    abstract=lambda bits, scale, error: (*_empty_mean(bits, scale, error), error.new_empty(error.shape)),
    reference=_sign_mean,
)
