"""Compression to 1 bit per element, in Triton."""

from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._fixed_bits import LANES, SPAN, root_mean, sum_halves
from ._triton import added, ceil, launch, signs_of, tile

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


def sign_compress(x: Tensor, error: Tensor, whole: bool) -> tuple[Tensor, Tensor]:
    """Maps flat [n], fp32 [r, c] with n <= r c to uint8 [r, c / 8], fp32 [r]. Overwrites the error."""
    r, c = error.shape
    y = error.view(1, r * c) if whole else error
    lanes = y.new_empty(y.shape[0], ceil(y.shape[1], SPAN), LANES, dtype=torch.float64)
    sizes, width = (x.numel(), y.shape[1], lanes.shape[1]), tile(y.device)
    launch(_add_kernel, lanes.numel() // width, y.device, x, y, lanes, *sizes, LANES=LANES, SPAN=SPAN, TILE=width)
    scale = root_mean(sum_halves(sum_halves(lanes)), y.shape[1])
    return subtract_signs(y, scale).view(r, c // 8), scale.expand(r).contiguous()


def subtract_signs(y: Tensor, scale: Tensor) -> Tensor:
    """Subtracts the row's +-scale from y [r, c], and returns the bits of y >= 0, uint8 [r, c / 8]."""
    bits = torch.empty(y.shape[0], y.shape[1] // 8, dtype=torch.uint8, device=y.device)
    num = bits.numel()
    launch(_subtract_kernel, ceil(num, BYTES), y.device, y, scale, bits, num, bits.shape[1], BYTES=BYTES)
    return bits


@triton.jit
@no_type_check
def _add_kernel(x, y, lanes, n, c, num_spans, LANES: tl.constexpr, SPAN: tl.constexpr, TILE: tl.constexpr):
    program = tl.program_id(0).to(tl.int64)
    span = program // (LANES // TILE)
    lane = program % (LANES // TILE) * TILE + tl.arange(0, TILE)
    row, first = span // num_spans, span % num_spans * SPAN
    squares = tl.full([TILE], 0.0, tl.float64)
    for start in range(first, tl.where(first + SPAN < c, first + SPAN, c), LANES):
        column = start + lane
        at = row * c + column
        value = tl.load(y + at, mask=column < c, other=0.0)
        value = tl.load(x + at, mask=(column < c) & (at < n), other=0.0).to(tl.float32) + value
        tl.store(y + at, value, mask=column < c)
        squares += value.to(tl.float64) * value.to(tl.float64)
    tl.store(lanes + span * LANES + lane, squares)


@triton.jit
@no_type_check
def _subtract_kernel(y, scale, bits, num, b, BYTES: tl.constexpr):
    byte = tl.program_id(0).to(tl.int64) * BYTES + tl.arange(0, BYTES)
    place = tl.arange(0, 8)
    at, mask = byte[:, None] * 8 + place[None, :], byte[:, None] < num
    value = tl.load(y + at, mask=mask, other=0.0)
    step = tl.load(scale + byte // b, mask=byte < num, other=0.0)[:, None]
    tl.store(y + at, value - tl.where(value >= 0, step, -step), mask=mask)
    packed = tl.reduce((value >= 0).to(tl.int32) << (7 - place[None, :]), 1, added)
    tl.store(bits + byte, packed.to(tl.uint8), mask=byte < num)


def sign_mean(bits: Tensor, scale: Tensor, error: Tensor) -> tuple[Tensor, Tensor]:
    """Maps uint8 [k, b], fp32 [k], fp32 [8 b] to uint8 [b], fp32 [1]. Overwrites the error."""
    k, b = bits.shape
    lanes = error.new_empty(ceil(8 * b, SPAN), LANES, dtype=torch.float64)
    width = tile(error.device)
    num = lanes.numel() // width
    launch(_add_mean, num, error.device, bits, scale, error, lanes, k, b, LANES=LANES, SPAN=SPAN, TILE=width)
    root = root_mean(sum_halves(sum_halves(lanes)), 8 * b).view(1)
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
