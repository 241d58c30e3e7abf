"""Blocks of a row in codes of 8 or 4 bits: the definition."""

import torch
from torch import Tensor

TINY = 2.0**-110  # a block with a smaller maximum counts as zero: the scale would not be a normal number


def num_codes(c: int, bits: int) -> int:
    """Bytes of the codes of c elements."""
    return c if bits == 8 else (c + 1) // 2


def quantize(x: Tensor, bits: int, block: int) -> tuple[Tensor, Tensor]:
    """Maps [r, c] to int8 [r, c] or uint8 [r, ceil(c / 2)], and fp32 [r, ceil(c / block)]."""
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
    return (codes.contiguous() if bits == 8 else pack_nibbles(codes)), scales


def pack_nibbles(codes: Tensor) -> Tensor:
    """Packs int8 [r, c] of 4-bit values to uint8 [r, ceil(c / 2)], the first of two in the high nibble."""
    r, c = codes.shape
    pairs = torch.nn.functional.pad(codes.to(torch.int16), (0, c % 2)).reshape(r, (c + 1) // 2, 2)
    return ((pairs[..., 0] & 15) << 4 | (pairs[..., 1] & 15)).to(torch.uint8)


def unpack_nibbles(codes: Tensor, c: int) -> Tensor:
    """Returns the inverse of `pack_nibbles`."""
    both = torch.stack([codes >> 4, codes & 15], -1).reshape(codes.shape[0], 2 * codes.shape[1])[:, :c]
    return ((both ^ 8).to(torch.int16) - 8).to(torch.int8)


def dequantize(codes: Tensor, scales: Tensor, c: int, bits: int, block: int) -> Tensor:
    """Returns the inverse of `quantize`, fp32 [r, c]."""
    values = (codes if bits == 8 else unpack_nibbles(codes, c)).float()
    return values * scales.repeat_interleave(block, 1)[:, :c]


def dequantize_into(codes: Tensor, scales: Tensor, bits: int, block: int, out: Tensor) -> None:
    """Writes the dequantized values, in the dtype of `out` [r, c]."""
    out.copy_(dequantize(codes, scales, out.shape[1], bits, block))
