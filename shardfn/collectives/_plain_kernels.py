"""Plain forms of the kernels that compressors call."""

import torch
from torch import Tensor


def pack_signs(x: Tensor) -> Tensor:
    weights = torch.tensor([128, 64, 32, 16, 8, 4, 2, 1], dtype=torch.uint8, device=x.device)
    bits = (x >= 0).view(x.shape[0], -1, 8)
    return (bits * weights).sum(-1, dtype=torch.uint8)


def unpack_signs(bits: Tensor, scale: Tensor) -> Tensor:
    shifts = torch.tensor([7, 6, 5, 4, 3, 2, 1, 0], dtype=torch.uint8, device=bits.device)
    ones = ((bits.unsqueeze(-1) >> shifts) & 1).view(bits.shape[0], -1).float()
    return (ones * 2 - 1) * scale.unsqueeze(1)


def rms(x: Tensor, whole: bool) -> Tensor:
    squares = x.double().square()
    mean = squares.mean().expand(x.shape[0]) if whole else squares.mean(1)
    return mean.sqrt().float()


def quantize(x: Tensor, bits: int, block: int) -> tuple[Tensor, Tensor]:
    r, c = x.shape
    blocks = -(-c // block)
    padded = torch.nn.functional.pad(x.float(), (0, blocks * block - c)).view(r, blocks, block)
    top = padded.abs().amax(-1)
    scale = torch.where(top == 0, torch.ones_like(top), top * (2.0 / 2**bits))
    half = 2 ** (bits - 1)
    codes = torch.round(padded * (1.0 / scale).unsqueeze(-1)).clamp(-half, half - 1).to(torch.int8).view(r, -1)[:, :c]
    if bits == 8:
        return codes.contiguous(), scale
    even = torch.nn.functional.pad(codes, (0, c % 2)).view(torch.uint8) & 15
    return (even[:, ::2] << 4) | even[:, 1::2], scale


def dequantize(codes: Tensor, scales: Tensor, c: int, bits: int, block: int, dtype: torch.dtype) -> Tensor:
    if bits == 4:
        both = torch.stack([codes >> 4, codes & 15], -1).view(codes.shape[0], -1)[:, :c]
        codes = torch.where(both > 7, both.to(torch.int8) - 16, both.to(torch.int8))
    each = scales.repeat_interleave(block, 1)[:, :c]
    return (codes.float() * each).to(dtype)
