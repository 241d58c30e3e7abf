"""Decodes the blocks of GGUF files to float32, kind by kind, as ggml's `dequantize_row_*` define them.

A block has a fixed number of elements of a row, 32 or 256, and a fixed number of bytes: scales, and codes of 2 to 8
bits. Each decoder below takes blocks as uint8 of shape (blocks, bytes of a block), and returns float32 of shape
(blocks, elements of a block). All of them are written with torch operations, so that they run on any device.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class BlockKind(NamedTuple):
    """Kind of blocks of a GGUF file.

    Attributes:
        name: name in ggml, such as "Q4_1".
        size: number of elements of a block.
        bytes: number of bytes of a block.
        decode: function from blocks, uint8 (n, bytes), to elements, float32 (n, size).
    """

    name: str
    size: int
    bytes: int
    decode: Callable[[Tensor], Tensor]


def gguf_kind(number: int) -> BlockKind:
    """Returns the kind of blocks of a number in a file.

    Raises:
        ValueError: the kind is not known, or its blocks are not decoded here.
    """
    if number not in _KINDS:
        known = ", ".join(x.name for x in _KINDS.values())
        raise ValueError(f"is of kind {number}, and the known kinds are {known}.")
    return _KINDS[number]


def decode_gguf_blocks(blocks: Tensor, kind: BlockKind) -> Tensor:
    """Returns the elements of rows of blocks.

    Args:
        blocks: bytes of rows, uint8 of shape (rows, bytes of a row).
        kind: kind of the blocks.

    Returns:
        Elements in float32, of shape (rows, elements of a row).

    Example:
        >>> decode_gguf_blocks(torch.tensor([[0, 60] + [2] * 32], dtype=torch.uint8), gguf_kind(8))[0, :3]
        tensor([2., 2., 2.])
    """
    rows = blocks.shape[0]
    if not blocks.numel():
        return torch.empty(rows, blocks.shape[-1] // kind.bytes * kind.size)
    return kind.decode(blocks.reshape(-1, kind.bytes)).reshape(rows, -1)


def _halves(blocks: Tensor, first: int, num: int = 1) -> Tensor:
    """Returns float16 numbers at a byte of each block, as float32."""
    return blocks[:, first : first + 2 * num].contiguous().view(torch.float16).float()


def _nibbles(q: Tensor) -> Tensor:
    """Returns the low halves of bytes, then the high halves, along the last dim."""
    return torch.cat([q & 15, q >> 4], -1)


def _fifth_bits(blocks: Tensor, first: int) -> Tensor:
    """Returns 32 bits at a byte of each block, each as 16 or 0."""
    return _bits(blocks[:, first : first + 4]).flatten(1) << 4


def _bits(q: Tensor) -> Tensor:
    """Returns the bits of bytes, the least first, in a new last dim."""
    return (q.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8, device=q.device)) & 1


def _view(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    return lambda b: b.contiguous().view(dtype).float()


def _q4_0(b: Tensor) -> Tensor:
    return _halves(b, 0) * (_nibbles(b[:, 2:]).to(torch.int8) - 8).float()


def _q4_1(b: Tensor) -> Tensor:
    return _halves(b, 0) * _nibbles(b[:, 4:]).float() + _halves(b, 2)


def _q5_0(b: Tensor) -> Tensor:
    return _halves(b, 0) * ((_nibbles(b[:, 6:]) | _fifth_bits(b, 2)).to(torch.int8) - 16).float()


def _q5_1(b: Tensor) -> Tensor:
    return _halves(b, 0) * (_nibbles(b[:, 8:]) | _fifth_bits(b, 4)).float() + _halves(b, 2)


def _q8_0(b: Tensor) -> Tensor:
    return _halves(b, 0) * b[:, 2:].view(torch.int8).float()


def _two_bits(q: Tensor) -> Tensor:
    """Returns codes of two bits: of each 32 bytes the lowest pairs of bits first, shape (blocks, 256)."""
    q = q.reshape(len(q), -1, 1, 32)
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=q.device).view(1, 1, 4, 1)
    return ((q >> shifts) & 3).reshape(len(q), -1)


def _q2_k(b: Tensor) -> Tensor:
    scales, q = b[:, :16], _two_bits(b[:, 16:80]).view(len(b), 16, 16).float()
    d, least = _halves(b, 80), _halves(b, 82)
    return ((d * (scales & 15).float()).unsqueeze(-1) * q - (least * (scales >> 4).float()).unsqueeze(-1)).flatten(1)


def _q3_k(b: Tensor) -> Tensor:
    high, low, packed = b[:, :32], _two_bits(b[:, 32:96]), b[:, 96:108]
    # 16 scales of 6 bits: 4 low bits in 8 bytes, 2 high bits in 4 bytes.
    low_bits = _nibbles(packed[:, :8])
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=b.device).view(1, 4, 1)
    high_bits = ((packed[:, 8:].unsqueeze(1) >> shifts) & 3).flatten(1)
    scales = (low_bits | (high_bits << 4)).to(torch.int8) - 32
    # A bit of 0 subtracts 4. Bit k of 32 bytes belongs to the k-th 32 elements.
    third = _bits(high).transpose(1, 2).reshape(len(b), -1)
    q = low.to(torch.int8) - ((third ^ 1) << 2).to(torch.int8)
    scale = _halves(b, 108) * scales.float()
    return (scale.unsqueeze(-1) * q.view(len(b), 16, 16).float()).flatten(1)


def _scales_of_six_bits(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Returns 8 scales and 8 least values of 6 bits from 12 bytes."""
    first, second, third = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = torch.cat([first & 63, (third & 15) | ((first >> 6) << 4)], -1)
    least = torch.cat([second & 63, (third >> 4) | ((second >> 6) << 4)], -1)
    return scales.float(), least.float()


def _q4_k(b: Tensor) -> Tensor:
    scales, least = _scales_of_six_bits(b[:, 4:16])
    q = _nibbles(b[:, 16:].reshape(len(b), 4, 32)).view(len(b), 8, 32).float()
    return _by_scales(b, scales, least, q)


def _q5_k(b: Tensor) -> Tensor:
    scales, least = _scales_of_six_bits(b[:, 4:16])
    high = _bits(b[:, 16:48]).transpose(1, 2) << 4
    q = (_nibbles(b[:, 48:].reshape(len(b), 4, 32)).view(len(b), 8, 32) | high).float()
    return _by_scales(b, scales, least, q)


def _by_scales(b: Tensor, scales: Tensor, least: Tensor, q: Tensor) -> Tensor:
    d, m = _halves(b, 0), _halves(b, 2)
    return ((d * scales).unsqueeze(-1) * q - (m * least).unsqueeze(-1)).flatten(1)


def _q6_k(b: Tensor) -> Tensor:
    low, high = b[:, :128].reshape(len(b), 2, 64), b[:, 128:192].reshape(len(b), 2, 1, 32)
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=b.device).view(1, 1, 4, 1)
    q = _nibbles(low).view(len(b), 2, 4, 32) | (((high >> shifts) & 3) << 4)
    scale = _halves(b, 208) * b[:, 192:208].contiguous().view(torch.int8).float()
    return (scale.unsqueeze(-1) * (q.reshape(len(b), 16, 16).to(torch.int8) - 32).float()).flatten(1)


_KINDS = {
    0: BlockKind("F32", 1, 4, _view(torch.float32)),
    1: BlockKind("F16", 1, 2, _view(torch.float16)),
    2: BlockKind("Q4_0", 32, 18, _q4_0),
    3: BlockKind("Q4_1", 32, 20, _q4_1),
    6: BlockKind("Q5_0", 32, 22, _q5_0),
    7: BlockKind("Q5_1", 32, 24, _q5_1),
    8: BlockKind("Q8_0", 32, 34, _q8_0),
    10: BlockKind("Q2_K", 256, 84, _q2_k),
    11: BlockKind("Q3_K", 256, 110, _q3_k),
    12: BlockKind("Q4_K", 256, 144, _q4_k),
    13: BlockKind("Q5_K", 256, 176, _q5_k),
    14: BlockKind("Q6_K", 256, 210, _q6_k),
    30: BlockKind("BF16", 1, 2, _view(torch.bfloat16)),
}
