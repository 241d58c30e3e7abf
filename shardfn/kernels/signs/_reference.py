"""Signs as bits: the definition."""

import torch
from torch import Tensor


def pack_signs(x: Tensor) -> Tensor:
    """Maps [r, c] to uint8 [r, c / 8]."""
    weights = torch.tensor([128, 64, 32, 16, 8, 4, 2, 1], device=x.device)
    return ((x >= 0).reshape(x.shape[0], -1, 8) * weights).sum(-1).to(torch.uint8) if x.numel() else _empty_bits(x)


def unpack_signs(bits: Tensor, scale: Tensor, out: Tensor) -> None:
    """Writes +-scale of each row: uint8 [r, b], fp32 [r] into fp32 [r, 8 b]."""
    shifts = torch.arange(7, -1, -1, device=bits.device)
    ones = (bits[..., None].long() >> shifts & 1).bool().reshape(out.shape)
    out.copy_(torch.where(ones, scale[:, None], -scale[:, None]))


def _empty_bits(x: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], x.shape[1] // 8, dtype=torch.uint8)
