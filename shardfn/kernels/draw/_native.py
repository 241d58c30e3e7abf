"""Tokens drawn from logits, on a CPU, in C++."""

import torch
from torch import Tensor

from shardfn.kernels._build import call


def draw(
    logits: Tensor, uniform: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor
) -> tuple[Tensor, Tensor]:
    """Tokens and log probabilities of logits [r, v]."""
    (r, v), room = logits.shape, -logits.shape[1] % 64
    tokens, logprobs = logits.new_empty(r, dtype=torch.int64), logits.new_empty(r)
    # Weights, their running sums by block, and indices in order.
    weights = logits.new_empty(v + room, dtype=torch.float64)
    sums, order = logits.new_empty(weights.numel() // 64 + 1, dtype=torch.float64), tokens.new_empty(v)
    arguments = logits, uniform, temperature, top_k, top_p, min_p
    call("draw_rows", *arguments, r, v, weights, sums, order, tokens, logprobs)
    return tokens, logprobs
