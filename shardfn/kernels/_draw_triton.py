"""Tokens drawn from logits, in Triton: weights, and sums in the order of the definition. Torch sorts and selects.

Sums of blocks are added in order, as in the definition, in a program for each row.
"""

from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._draw import BLOCK, COLDEST, ODD_TERMS, check_values
from ._fixed_bits import LOG2E, WIDE_HIGH, WIDE_LOW, WIDE_MAGIC, WIDE_TERMS
from ._triton import ceil, launch, threefry

WIDTH = 1024


def draw(
    logits: Tensor,
    uniform: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    targets: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Tokens and log probabilities of logits [r, v]."""
    v = logits.shape[1]
    check_values(v, uniform, temperature, top_k, top_p, min_p, targets)
    given = torch.full_like(top_k, -1) if targets is None else targets
    largest, index = logits.amax(1), torch.arange(v, device=logits.device)
    first = torch.where(logits == largest[:, None], index, v).amin(1)
    most, draws = largest.double(), (temperature >= COLDEST) & (given < 0)
    total = _sum_blocks(_compute_weights(logits, most, torch.ones_like(temperature)))[:, -1]
    weights = _compute_weights(logits, most, torch.where(draws, temperature, 1.0))
    drawn = _find_tokens(_filter_weights(weights, logits, top_k, top_p, min_p), torch.where(draws, uniform, 0.0))
    tokens = torch.where(given >= 0, given, torch.where(draws, drawn, first))
    valid = largest.isfinite()
    tokens = torch.where(valid, tokens, -1)
    shifted = logits.gather(1, tokens.clamp(min=0)[:, None])[:, 0].double() - most
    return tokens, torch.where(valid, shifted - _compute_logarithm(total), torch.nan).float()


def top_logprobs(logits: Tensor, num: int) -> tuple[Tensor, Tensor]:
    """Returns the most probable tokens of logits [r, v], and the log probabilities [r, num]."""
    most = logits.amax(1).double()
    total = _sum_blocks(_compute_weights(logits, most, torch.ones_like(most)))[:, -1]
    tokens = logits.sort(dim=1, descending=True, stable=True).indices[:, :num]
    logprobs = (logits.gather(1, tokens).double() - most[:, None]) - _compute_logarithm(total)[:, None]
    valid = most.isfinite()[:, None]
    return torch.where(valid, tokens, -1), torch.where(valid, logprobs, torch.nan).float()


def draw_uniforms(keys: Tensor, places: Tensor) -> Tensor:
    """Numbers in [0, 1) of keys and places [r]."""
    keys, places = keys.view(torch.int64), places.to(torch.int64)
    out = torch.empty(keys.shape, dtype=torch.float64, device=keys.device)
    launch(_uniforms_kernel, ceil(len(keys), WIDTH), keys.device, keys, places, out, len(keys), WIDTH=WIDTH)
    return out


def _compute_weights(logits: Tensor, most: Tensor, temperature: Tensor) -> Tensor:
    """Weights [r, wide], with zeros up to whole blocks."""
    r, v = logits.shape
    wide = ceil(v, BLOCK) * BLOCK
    constants = [LOG2E, WIDE_MAGIC, WIDE_HIGH, WIDE_LOW]
    constants += [1 / i for i in range(WIDE_TERMS, 0, -1)]
    table = most.new_tensor(constants)
    weights, tiles, terms = most.new_empty(r, wide), ceil(wide, WIDTH), WIDE_TERMS
    launch(
        *(_weights_kernel, r * tiles, logits.device, logits, most, temperature, table, weights, v, wide, tiles),
        TERMS=terms,
        WIDTH=WIDTH,
    )
    return weights


def _sum_blocks(weights: Tensor) -> Tensor:
    """Returns, for each block of a row, the sum of all earlier blocks, and at the end the total."""
    r, blocks = weights.shape[0], weights.shape[1] // BLOCK
    parts, sums = weights.new_empty(r, blocks), weights.new_zeros(r, blocks + 1)
    launch(_block_sums_kernel, ceil(r * blocks, WIDTH), weights.device, weights, parts, r * blocks, WIDTH=WIDTH)
    launch(_running_sums_kernel, r, weights.device, parts, sums, blocks)
    return sums


def _filter_weights(weights: Tensor, logits: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Returns the weights, with zeros where the filters leave a token out."""
    v, place = logits.shape[1], torch.arange(logits.shape[1], device=logits.device)
    order = logits.sort(dim=1, descending=True, stable=True).indices
    limit = torch.where(top_k > 0, top_k, v)

    def keep_first(num: Tensor) -> Tensor:
        kept = torch.zeros_like(weights, dtype=torch.bool).scatter(1, order, place < num[:, None])
        return torch.where(kept, weights, 0.0)

    left = keep_first(limit)
    wanted, ordered, taken = top_p * _sum_blocks(left)[:, -1], left.gather(1, order), torch.empty_like(limit)
    launch(_nucleus_kernel, len(logits), logits.device, ordered, limit, wanted, taken, v)
    left = keep_first(torch.where(top_p < 1, taken, limit))
    return torch.where(left >= min_p[:, None], left, 0.0)


def _find_tokens(weights: Tensor, uniform: Tensor) -> Tensor:
    sums, index = _sum_blocks(weights), torch.arange(weights.shape[1], device=weights.device)
    target, blocks = uniform * sums[:, -1], weights.shape[1] // BLOCK
    at = torch.where(sums[:, 1:] > target[:, None], index[:blocks], blocks).amin(1)
    tokens = torch.where(weights > 0, index, -1).amax(1)  # if no sum is above
    launch(_find_in_block_kernel, len(weights), weights.device, weights, sums, target, at, tokens, blocks, BLOCK=BLOCK)
    return tokens


def _compute_logarithm(x: Tensor) -> Tensor:
    m, e = torch.frexp(x)
    low = m < 0.7071067811865476
    m, e = torch.where(low, m * 2, m), torch.where(low, e - 1, e).double()
    f = (m - 1) / (m + 1)
    square, y = f * f, torch.zeros_like(f)
    for i in range(ODD_TERMS, -1, -1):
        y = y * square
        y = y + 1 / (2 * i + 1)
    return e * WIDE_LOW + (2 * f * y) + e * WIDE_HIGH


@triton.jit
@no_type_check
def _weights_kernel(
    logits, most, temperature, table, weights, v, wide, tiles, TERMS: tl.constexpr, WIDTH: tl.constexpr
):
    # Constants come from memory, for a literal would be rounded to fp32.
    program = tl.program_id(0).to(tl.int64)
    row, at = program // tiles, program % tiles * WIDTH + tl.arange(0, WIDTH)
    x = tl.load(logits + row * v + at, mask=at < v, other=float("-inf")).to(tl.float64)
    x = (x - tl.load(most + row)) / tl.load(temperature + row)
    usual = x >= -708.0
    x = tl.where(usual, x, -708.0)
    total = x * tl.load(table) + tl.load(table + 1)
    whole = total - tl.load(table + 1)
    r = (x - whole * tl.load(table + 2)) - whole * tl.load(table + 3)
    y = r * 0.0 + 1.0
    for i in range(TERMS):
        y = y * r * tl.load(table + 4 + i) + 1.0
    power = ((total.to(tl.int64, bitcast=True) + 1023) << 52).to(tl.float64, bitcast=True)
    tl.store(weights + row * wide + at, tl.where(usual, y * power, 0.0), mask=at < wide)


@triton.jit
@no_type_check
def _block_sums_kernel(weights, parts, num, WIDTH: tl.constexpr):
    block = tl.program_id(0).to(tl.int64) * WIDTH + tl.arange(0, WIDTH)
    start, mask = weights + block * 64, block < num
    even = (_sum_lane(start, mask) + _sum_lane(start + 4, mask)) + (
        _sum_lane(start + 2, mask) + _sum_lane(start + 6, mask)
    )
    odd = (_sum_lane(start + 1, mask) + _sum_lane(start + 5, mask)) + (
        _sum_lane(start + 3, mask) + _sum_lane(start + 7, mask)
    )
    tl.store(parts + block, even + odd, mask=mask)


@triton.jit
@no_type_check
def _sum_lane(start, mask):
    total = tl.load(start, mask=mask, other=0.0)
    for i in range(1, 8):
        total += tl.load(start + i * 8, mask=mask, other=0.0)
    return total


@triton.jit
@no_type_check
def _running_sums_kernel(parts, sums, blocks):
    row = tl.program_id(0).to(tl.int64)
    total = tl.load(sums + row * (blocks + 1))  # 0
    for i in range(blocks):
        total += tl.load(parts + row * blocks + i)
        tl.store(sums + row * (blocks + 1) + 1 + i, total)


@triton.jit
@no_type_check
def _nucleus_kernel(ordered, limit, wanted, taken, v):
    row = tl.program_id(0).to(tl.int64)
    most, enough = tl.load(limit + row), tl.load(wanted + row)
    so_far, num = tl.load(ordered + row * v), most * 0 + 1
    more = tl.where(num < most, tl.where(so_far < enough, 1, 0), 0)
    while more == 1:
        so_far += tl.load(ordered + row * v + num)
        num += 1
        more = tl.where(num < most, tl.where(so_far < enough, 1, 0), 0)
    tl.store(taken + row, num)


@triton.jit
@no_type_check
def _find_in_block_kernel(weights, sums, target, at, tokens, blocks, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    block, wanted = tl.load(at + row), tl.load(target + row)
    if block < blocks:
        so_far = tl.load(sums + row * (blocks + 1) + block)
        last, searching = block * 0 - 1, block * 0 + 1
        for i in range(BLOCK):
            weight = tl.load(weights + (row * blocks + block) * BLOCK + i)
            so_far += weight
            found = tl.where(weight > 0.0, searching, 0)
            last = tl.where(found == 1, block * BLOCK + i, last)
            searching = tl.where(so_far > wanted, searching - found, searching)
        tl.store(tokens + row, last)


@triton.jit
@no_type_check
def _uniforms_kernel(keys, places, out, num, WIDTH: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * WIDTH + tl.arange(0, WIDTH)
    key, place = tl.load(keys + at, mask=at < num, other=0), tl.load(places + at, mask=at < num, other=0)
    k0, k1 = (key >> 32).to(tl.uint32), key.to(tl.uint32)
    x0, x1 = threefry(k0, k1, (place >> 32).to(tl.uint32), place.to(tl.uint32))
    number = (x0.to(tl.int64) << 21) | (x1.to(tl.int64) >> 11)
    tl.store(out + at, number.to(tl.float64) * (1.0 / 9007199254740992.0), mask=at < num)
