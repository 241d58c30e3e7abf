"""Norms of rows: the definition. Each operation is rounded once."""

import numpy as np
import torch
from torch import Tensor

from shardfn.kernels._exponential import fused
from shardfn.kernels._sums import halved

LANES = 64


def row_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, centered: bool) -> Tensor:
    """Maps [r, d] to [r, d]."""
    d = x.shape[1]
    c = x
    if centered:
        c = x - (halved(_sum_lanes(x)) / d)[:, None]
    square = halved(_sum_squares(c)) / d + x.new_tensor(eps)
    # Numpy's roots are the numbers next to the true roots, but torch's not always.
    root = torch.from_numpy(np.sqrt(square.double().cpu().numpy())).to(square)
    y = c * (1 / root)[:, None]
    return y * weight if bias is None else fused(y, weight.expand_as(y), bias.expand_as(y))


def _sum_lanes(x: Tensor) -> Tensor:
    """Returns the sums of the lanes, [r, 64]."""
    total = x.new_zeros(x.shape[0], LANES)
    for part in _split_parts(x):
        total = total + part
    return total


def _sum_squares(x: Tensor) -> Tensor:
    """Returns the sums of the lanes' squares, [r, 64]."""
    total = x.new_zeros(x.shape[0], LANES)
    for part in _split_parts(x):
        total = fused(part, part, total)
    return total


def _split_parts(x: Tensor) -> tuple[Tensor, ...]:
    return torch.nn.functional.pad(x, (0, -x.shape[1] % LANES)).unflatten(1, (-1, LANES)).unbind(1)
