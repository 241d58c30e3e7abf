"""Penalties on logits: the definition. Arithmetic is float64, each operation rounded once.

Results have the dtype of the logits.
"""

import torch
from torch import Tensor

from ._values import check_values


def penalise(
    logits: Tensor, history: Tensor, prompts: Tensor, repetition: Tensor, presence: Tensor, frequency: Tensor
) -> Tensor:
    """Maps logits [r, v] and history [r, w] to logits [r, v]."""
    (r, v), width = logits.shape, history.shape[1]
    check_values(v, history, prompts, repetition, presence, frequency)
    ids = torch.where(history < 0, v, history).long()  # the place after all tokens, dropped
    output = torch.arange(width, device=history.device) >= prompts[:, None]
    counts = logits.new_zeros(r, v + 1, dtype=torch.float64)
    seen = counts.scatter_add(1, ids, torch.ones_like(ids, dtype=torch.float64))[:, :v]
    drawn = counts.scatter_add(1, ids, output.double())[:, :v]
    x = logits.double()
    repeated = torch.where(x > 0, x / repetition[:, None], x * repetition[:, None])
    y = torch.where(seen > 0, repeated, x)
    lowered = (y - frequency[:, None] * drawn) - presence[:, None]
    y = torch.where(drawn > 0, lowered, y)
    neutral = (repetition == 1) & (presence == 0) & (frequency == 0)
    return torch.where(neutral[:, None] | (seen == 0), logits, y.to(logits.dtype))
