"""Tokens drawn from logits: the definition. All arithmetic is float64, each operation rounded once.

Log probabilities are in the dtype of the logits.
"""

import math

import torch
from torch import Tensor

from shardfn.kernels._exponential import WIDE_HIGH, WIDE_LOW, exponential

from ._values import COLDEST, check_values

# Weights are added up in blocks, each by 8 lanes over its 8 rows and a tree over the lanes.
LANES, BLOCK = 8, 64
ODD_TERMS = 14
# Words of threefry2x32.
MASK, PARITY = 0xFFFFFFFF, 0x1BD11BDA
ROTATIONS = (13, 15, 26, 6), (17, 29, 16, 24)


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
    arguments = uniform, temperature, top_k, top_p, min_p
    check_values(logits.shape[1], *arguments, targets)
    given = torch.full_like(top_k, -1) if targets is None else targets
    tokens, logprobs = [], []
    for row, *how in zip(logits, *arguments, given, strict=True):
        token, logprob = _draw_row(row, *(x.item() for x in how))
        tokens.append(token)
        logprobs.append(logprob)
    return torch.tensor(tokens, dtype=torch.int64, device=logits.device), logits.new_tensor(logprobs)


def top_logprobs(logits: Tensor, num: int) -> tuple[Tensor, Tensor]:
    """Returns the most probable tokens of logits [r, v], and the log probabilities [r, num]."""
    tokens = torch.full((len(logits), num), -1, dtype=torch.int64)
    logprobs = torch.full((len(logits), num), math.nan, dtype=logits.dtype)
    for i, row in enumerate(logits.cpu()):
        shifted = row.double() - float(row.max())
        if math.isfinite(float(row.max())):
            tokens[i] = row.sort(descending=True, stable=True).indices[:num]
            logprobs[i] = shifted[tokens[i]] - logarithm(_sum_blocks(exponential(shifted))[-1])
    return tokens.to(logits.device), logprobs.to(logits.device)


def draw_uniforms(keys: Tensor, places: Tensor) -> Tensor:
    """Numbers in [0, 1) of keys and places, int64 [r]."""
    k0, k1 = keys >> 32 & MASK, keys & MASK
    ks = k0, k1, k0 ^ k1 ^ PARITY
    x0, x1 = (places >> 32 & MASK) + k0 & MASK, (places & MASK) + k1 & MASK
    for i in range(5):
        for r in ROTATIONS[i % 2]:
            x0 = x0 + x1 & MASK
            x1 = (x1 << r | x1 >> 32 - r) & MASK ^ x0
        x0, x1 = x0 + ks[(i + 1) % 3] & MASK, x1 + ks[(i + 2) % 3] + i + 1 & MASK
    return (x0 << 21 | x1 >> 11).double() * 2.0**-53


def _draw_row(
    row: Tensor, u: float, temperature: float, top_k: int, top_p: float, min_p: float, target: int
) -> tuple[int, float]:
    x = row.double()
    most = float(x.max())
    if not math.isfinite(most):  # also a NaN as the maximum
        return -1, math.nan
    shifted = x - most
    sums = _sum_blocks(exponential(shifted))
    if target >= 0:
        token = target
    elif temperature < COLDEST:
        token = int((row == row.max()).nonzero()[0])
    else:
        # An excluded logit at an infinite temperature is NaN, and has no weight.
        weights = exponential(shifted / temperature).nan_to_num(0.0)
        token = _find_token(_filter_weights(weights, row, top_k, top_p, min_p), u)
    return token, float(shifted[token]) - logarithm(sums[-1])


def _filter_weights(weights: Tensor, row: Tensor, top_k: int, top_p: float, min_p: float) -> Tensor:
    """Returns the weights, with zeros where the filters leave a token out."""
    order = row.sort(descending=True, stable=True).indices.tolist()
    order = order[:top_k] if top_k else order
    if top_p < 1:
        left = torch.zeros_like(weights)
        left[order] = weights[order]
        values, wanted, so_far, num = weights.tolist(), top_p * _sum_blocks(left)[-1], 0.0, 0
        while num < len(order) and (num == 0 or so_far < wanted):
            so_far += values[order[num]]
            num += 1
        order = order[:num]
    kept = torch.zeros_like(weights)
    kept[order] = weights[order]
    return torch.where(kept >= min_p, kept, 0.0)


def _find_token(weights: Tensor, u: float) -> int:
    """Returns the first token at which the sum of weights is above `u` times the total.

    Else returns the last token with a weight.
    """
    sums = _sum_blocks(weights)
    target = u * sums[-1]
    at = next((i for i, end in enumerate(sums[1:]) if end > target), None)
    if at is None:
        return int(weights.nonzero()[-1])
    so_far, last = sums[at], -1
    for i, weight in enumerate(weights[at * BLOCK : (at + 1) * BLOCK].tolist()):
        so_far += weight
        last = at * BLOCK + i if weight > 0 else last
        if weight > 0 and so_far > target:
            break
    return last


def _sum_blocks(weights: Tensor) -> list[float]:
    """Returns, for each block, the sum of all earlier blocks, and at the end the total."""
    x = torch.nn.functional.pad(weights, (0, -len(weights) % BLOCK)).view(-1, BLOCK // LANES, LANES)
    lanes = x[:, 0]
    for i in range(1, x.shape[1]):
        lanes = lanes + x[:, i]
    while lanes.shape[1] > 1:
        lanes = lanes[:, : lanes.shape[1] // 2] + lanes[:, lanes.shape[1] // 2 :]
    sums = [0.0]
    for block in lanes[:, 0].tolist():
        sums.append(sums[-1] + block)
    return sums


def logarithm(x: float) -> float:
    """Returns the logarithm of a normal number, by x = m 2^e and the series of the inverse hyperbolic tangent."""
    m, e = math.frexp(x)
    if m < 0.7071067811865476:
        m, e = m * 2, e - 1
    f = (m - 1) / (m + 1)
    square, y = f * f, 0.0
    for i in range(ODD_TERMS, -1, -1):
        y = y * square + 1 / (2 * i + 1)
    return e * WIDE_LOW + (2 * f * y) + e * WIDE_HIGH
