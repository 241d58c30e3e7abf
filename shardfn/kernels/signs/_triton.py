"""Signs as bits, in Triton."""

from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from shardfn.kernels._triton import added, ceil, launch, signs_of

BYTES = 128
WIDTH = 1024


def pack_signs(x: Tensor) -> Tensor:
    """Maps [r, c] to uint8 [r, c / 8]."""
    bits = x.new_empty(x.shape[0], x.shape[1] // 8, dtype=torch.uint8)
    launch(_pack_kernel, ceil(bits.numel(), BYTES), x.device, x, bits, bits.numel(), BYTES=BYTES)
    return bits


def unpack_signs(bits: Tensor, scale: Tensor, out: Tensor) -> None:
    """Writes +-scale of each row: uint8 [r, b], fp32 [r] into fp32 [r, 8 b]."""
    num, c = out.numel(), out.shape[1]
    launch(_unpack_kernel, ceil(num, WIDTH), out.device, bits, scale, out, num, c, WIDTH=WIDTH)


@triton.jit
@no_type_check
def _pack_kernel(x, bits, num, BYTES: tl.constexpr):
    byte = tl.program_id(0).to(tl.int64) * BYTES + tl.arange(0, BYTES)
    place = tl.arange(0, 8)
    value = tl.load(x + byte[:, None] * 8 + place[None, :], mask=byte[:, None] < num, other=0.0)
    packed = tl.reduce((value >= 0).to(tl.int32) << (7 - place[None, :]), 1, added)
    tl.store(bits + byte, packed.to(tl.uint8), mask=byte < num)


@triton.jit
@no_type_check
def _unpack_kernel(bits, scale, out, num, c, WIDTH: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * WIDTH + tl.arange(0, WIDTH)
    inside = tl.where(at < num, at, 0)  # an index within the tensor, never an empty tensor
    tl.store(out + at, signs_of(bits, inside, tl.load(scale + inside // c)), mask=at < num)
