"""Block quantization: each block of a row as codes of 8 or 4 bits and a scale, and sums of quantized rows."""

from collections.abc import Iterator

import torch
from jaxtyping import Float, Float32, Integer
from torch import Tensor

from ._arguments import check_block, check_dtype, check_shape, check_written
from ._build import call
from ._fixed_bits import SPAN, cut_spans
from ._op import FLOATS, KernelOp

TINY = 2.0**-110  # a block with a smaller maximum counts as zero: the scale would not be a normal number


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
    QUANTIZE.check_dtype("x", x)
    check_block(bits, block)
    return QUANTIZE(x, bits, block)


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
    _check_codes(codes, scales, (codes.shape[0],), c, bits, block)
    if out is None:
        if dtype not in FLOATS:
            raise TypeError(f"dtype must be one of {FLOATS}, got {dtype}")
        return DEQUANTIZE(codes, scales, c, bits, block, dtype)
    QUANTIZE.check_dtype("out", out)
    check_shape("out", out, (codes.shape[0], c), "rows of codes and c")
    check_written("out", out)
    DEQUANTIZE_INTO(codes, scales, bits, block, out)
    return out


def _check_codes(codes: Tensor, scales: Tensor, rows: tuple[int, ...], c: int, bits: int, block: int) -> None:
    """Raises unless codes and scales have the dtypes and shapes of `quantize` for rows of c elements."""
    check_dtype("codes", codes, torch.int8 if bits == 8 else torch.uint8)
    check_dtype("scales", scales, torch.float32)
    check_shape("codes", codes, (*rows, c if bits == 8 else (c + 1) // 2), f"rows of c = {c} codes of {bits} bits")
    check_shape("scales", scales, (*rows, -(-c // block)), f"one for each block of {block} of c = {c} elements")


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
        >>> codes, scales = quantize(torch.tensor([[-1.0, 0.5], [-2.0, 1.0]]))
        >>> dequantize_sum(codes[:, None], scales[:, None], 2)
        tensor([[-3.0000,  1.5000]])
    """
    _check_summands(codes, scales, c, bits, block)
    return DEQUANTIZE_SUM(codes, scales, c, bits, block)


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
        >>> codes, scales = quantize(torch.tensor([[-1.0, 0.5], [-2.0, 1.0]]))
        >>> dequantize_sum_quantize(codes[:, None], scales[:, None], 2)
        (tensor([[-128,   64]], dtype=torch.int8), tensor([[0.0234]]))

    References:
        Wang et al.: ZeRO++: Extremely Efficient Collective Communication for Giant Model Training, 2023,
        https://arxiv.org/abs/2306.10209
    """
    _check_summands(codes, scales, c, bits, block)
    return DEQUANTIZE_SUM_QUANTIZE(codes, scales, c, bits, block)


def _check_summands(codes: Tensor, scales: Tensor, c: int, bits: int, block: int) -> None:
    check_block(bits, block)
    _check_codes(codes, scales, tuple(codes.shape[:2]), c, bits, block)
    if codes.shape[0] < 1:
        raise ValueError("codes must have at least one row to sum")


# The definitions.


def _quantize_by_torch(x: Tensor, bits: int, block: int) -> tuple[Tensor, Tensor]:
    r, c = x.shape
    blocks = -(-c // block)
    x_RNB = torch.nn.functional.pad(x.float(), (0, blocks * block - c)).reshape(r, blocks, block)
    top = x_RNB.abs().amax(-1) if x.numel() else x_RNB.new_zeros(r, blocks)
    small = top < TINY
    factor = torch.where(small, 1.0, 2.0 ** (bits - 1) / top)
    scales = torch.where(small, 1.0, top * 2.0 ** (1 - bits))
    half = 2 ** (bits - 1)
    codes = (x_RNB * factor[..., None]).round().clamp(-half, half - 1).nan_to_num(0.0).to(torch.int8)
    codes = codes.reshape(r, blocks * block)[:, :c]
    return (codes.contiguous() if bits == 8 else _pack_nibbles(codes)), scales


def _pack_nibbles(codes: Tensor) -> Tensor:
    """Packs int8 [r, c] of 4-bit values to uint8 [r, ceil(c / 2)], the first of two in the high nibble."""
    r, c = codes.shape
    pairs = torch.nn.functional.pad(codes.to(torch.int16), (0, c % 2)).reshape(r, (c + 1) // 2, 2)
    return ((pairs[..., 0] & 15) << 4 | (pairs[..., 1] & 15)).to(torch.uint8)


def _unpack_nibbles(codes: Tensor, c: int) -> Tensor:
    both = torch.stack([codes >> 4, codes & 15], -1).reshape(codes.shape[0], 2 * codes.shape[1])[:, :c]
    return ((both ^ 8).to(torch.int16) - 8).to(torch.int8)


def _decode_by_torch(codes: Tensor, scales: Tensor, c: int, bits: int, block: int) -> Tensor:
    """Returns the values, fp32 [r, c]."""
    values = (codes if bits == 8 else _unpack_nibbles(codes, c)).float()
    return values * scales.repeat_interleave(block, 1)[:, :c]


def _dequantize_by_torch(codes: Tensor, scales: Tensor, bits: int, block: int, out: Tensor) -> None:
    out.copy_(_decode_by_torch(codes, scales, out.shape[1], bits, block))


def _sum_by_torch(codes: Tensor, scales: Tensor, c: int, bits: int, block: int) -> Tensor:
    out = _decode_by_torch(codes[0], scales[0], c, bits, block)
    for more, factors in zip(codes[1:], scales[1:], strict=True):
        out += _decode_by_torch(more, factors, c, bits, block)
    return out


def _sum_codes_by_torch(codes: Tensor, scales: Tensor, c: int, bits: int, block: int) -> tuple[Tensor, Tensor]:
    return _quantize_by_torch(_sum_by_torch(codes, scales, c, bits, block), bits, block)


# In C++.


def _quantize_natively(x: Tensor, bits: int, block: int) -> tuple[Tensor, Tensor]:
    codes, scales = empty_codes(x, x.shape[1], bits, block)
    for part, some, factors in _cut_slabs(x, codes, scales, bits, block, _scratch_size(x)):
        call("quantize", part.float(), *part.shape, bits, block, some, factors)
    return codes, scales


def _dequantize_natively(codes: Tensor, scales: Tensor, bits: int, block: int, out: Tensor) -> None:
    for part, some, factors in _cut_slabs(out, codes, scales, bits, block, _scratch_size(out)):
        wide = part if part.dtype == torch.float32 else torch.empty(part.shape)
        call("dequantize", some, factors, *part.shape, bits, block, wide)
        if wide is not part:
            part.copy_(wide)


def _scratch_size(x: Tensor) -> int:
    return x.numel() if x.dtype == torch.float32 else SPAN


def _cut_slabs(
    x: Tensor, codes: Tensor, scales: Tensor, bits: int, block: int, size: int
) -> Iterator[tuple[Tensor, ...]]:
    """Cuts x [r, c], codes and scales into parts of about equal size: some rows, or some blocks of a row."""
    r, c = x.shape
    if c <= size:
        for lo, hi in cut_spans(r, size // max(c, 1)):
            yield x[lo:hi], codes[lo:hi], scales[lo:hi]
        return
    for i in range(r):
        for lo, hi in cut_spans(c, max(1, size // block) * block):
            first, last = (lo, hi) if bits == 8 else (lo // 2, (hi + 1) // 2)
            parts = x[i, lo:hi], codes[i, first:last], scales[i, lo // block : -(-hi // block)]
            yield tuple(part[None] for part in parts)


def _sum_natively(codes: Tensor, scales: Tensor, c: int, bits: int, block: int) -> Tensor:
    out = scales.new_empty(codes.shape[1], c)
    call("dequantize_sum", codes, scales, len(codes), *out.shape, bits, block, out, None, None)
    return out


def _sum_codes_natively(codes: Tensor, scales: Tensor, c: int, bits: int, block: int) -> tuple[Tensor, Tensor]:
    k, r, _ = codes.shape
    result = empty_codes(scales, c, bits, block)
    call("dequantize_sum", codes, scales, k, r, c, bits, block, torch.empty(min(block, c)), *result)
    return result


def _dequantize(codes: Tensor, scales: Tensor, c: int, bits: int, block: int, dtype: torch.dtype) -> Tensor:
    out = scales.new_empty(codes.shape[0], c, dtype=dtype)
    DEQUANTIZE_INTO.run(codes, scales, bits, block, out)
    return out


def empty_codes(x: Tensor, c: int, bits: int, block: int) -> tuple[Tensor, Tensor]:
    """Returns uninitialised codes and scales for the number of rows of x, of c elements each."""
    r = x.shape[-2]
    codes = x.new_empty(r, c, dtype=torch.int8) if bits == 8 else x.new_empty(r, (c + 1) // 2, dtype=torch.uint8)
    return codes, x.new_empty(r, -(-c // block), dtype=torch.float32)


QUANTIZE = KernelOp(
    schema="quantize(Tensor x, int bits, int block) -> (Tensor, Tensor)",
    abstract=lambda x, bits, block: empty_codes(x, x.shape[1], bits, block),
    reference=_quantize_by_torch,
    dtypes=FLOATS,
    native=_quantize_natively,
    triton="_quantize_triton.quantize",
)
DEQUANTIZE_INTO = KernelOp(
    schema="dequantize_into(Tensor codes, Tensor scales, int bits, int block, Tensor(a!) out) -> ()",
    reference=_dequantize_by_torch,
    native=_dequantize_natively,
    triton="_quantize_triton.dequantize_into",
)
DEQUANTIZE = KernelOp(
    schema="dequantize(Tensor codes, Tensor scales, SymInt c, int bits, int block, ScalarType dtype) -> Tensor",
    abstract=lambda codes, scales, c, bits, block, dtype: scales.new_empty(codes.shape[0], c, dtype=dtype),
    reference=_dequantize,
)
DEQUANTIZE_SUM = KernelOp(
    schema="dequantize_sum(Tensor codes, Tensor scales, SymInt c, int bits, int block) -> Tensor",
    abstract=lambda codes, scales, c, bits, block: scales.new_empty(codes.shape[1], c),
    reference=_sum_by_torch,
    native=_sum_natively,
    triton="_quantize_triton.dequantize_sum",
)
DEQUANTIZE_SUM_QUANTIZE = KernelOp(
    schema="dequantize_sum_quantize(Tensor codes, Tensor scales, SymInt c, int bits, int block) -> (Tensor, Tensor)",
    abstract=lambda codes, scales, c, bits, block: empty_codes(scales, c, bits, block),
    reference=_sum_codes_by_torch,
    native=_sum_codes_natively,
    triton="_quantize_triton.dequantize_sum_quantize",
)
