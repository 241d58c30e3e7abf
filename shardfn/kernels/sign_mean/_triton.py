"""The mean of signs plus the previous error, as signs and a scale, in Triton."""

from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from shardfn.kernels._sums import LANES, SPAN, halved, root_mean
from shardfn.kernels._triton import ceil, launch, signs_of, tile
from shardfn.kernels.sign_compress._triton import subtract_signs


def sign_mean(bits: Tensor, scale: Tensor, error: Tensor) -> tuple[Tensor, Tensor]:
    """Maps uint8 [k, b], fp32 [k], fp32 [8 b] to uint8 [b], fp32 [1]. Overwrites the error."""
    k, b = bits.shape
    lanes = error.new_empty(ceil(8 * b, SPAN), LANES, dtype=torch.float64)
    width = tile(error.device)
    num = lanes.numel() // width
    launch(_add_mean, num, error.device, bits, scale, error, lanes, k, b, LANES=LANES, SPAN=SPAN, TILE=width)
    root = root_mean(halved(halved(lanes)), 8 * b).view(1)
    return subtract_signs(error[None], root)[0], root


@triton.jit
@no_type_check
def _add_mean(bits, scale, z, lanes, k, b, LANES: tl.constexpr, SPAN: tl.constexpr, TILE: tl.constexpr):
    program = tl.program_id(0).to(tl.int64)
    span = program // (LANES // TILE)
    lane = program % (LANES // TILE) * TILE + tl.arange(0, TILE)
    first, c = span * SPAN, b * 8
    squares = tl.full([TILE], 0.0, tl.float64)
    for start in range(first, tl.where(first + SPAN < c, first + SPAN, c), LANES):
        at = start + lane
        inside = tl.where(at < c, at, 0)
        total = tl.full([TILE], 0.0, tl.float32)
        for i in range(k):
            total += signs_of(bits + (program * 0 + i) * b, inside, tl.load(scale + i))
        mean = tl.math.div_rn(total, tl.full([TILE], 0.0, tl.float32) + k)
        value = mean + tl.load(z + at, mask=at < c, other=0.0)
        value = tl.where(at < c, value, 0.0)
        tl.store(z + at, value, mask=at < c)
        squares += value.to(tl.float64) * value.to(tl.float64)
    tl.store(lanes + span * LANES + lane, squares)
