"""Activations of single elements: the definition. Each operation is rounded once."""

import math

import torch
from torch import Tensor

from shardfn.kernels._exponential import exponential, fused

LINEAR = 2 * math.sqrt(2 / math.pi)
CUBIC = 0.044715 * LINEAR


def gated_silu(gate: Tensor, up: Tensor) -> Tensor:
    """Maps tensors of equal shape to a tensor of the shape."""
    return _multiply_sigmoid(gate, gate) * up


def gelu(x: Tensor) -> Tensor:
    """Maps any shape to the same shape."""
    factor = fused(x * x, x.new_tensor(CUBIC), x.new_tensor(LINEAR))
    return _multiply_sigmoid(x, x * factor)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Maps [t, h, k], and [t, k] twice, to [t, h, k]."""
    a, b = x.chunk(2, dim=-1)
    return x * cos[:, None] + torch.cat((-b, a), dim=-1) * sin[:, None]


def _multiply_sigmoid(x: Tensor, a: Tensor) -> Tensor:
    """Returns x / (1 + e^-a), by only e^-|a|."""
    e = exponential(-a.abs())
    return x * torch.where(a < 0, e, 1.0) / (1 + e)
