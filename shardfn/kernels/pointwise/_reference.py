"""Activations of single elements: the definition. Each operation is rounded once."""

import math

import torch
from torch import Tensor

from shardfn.kernels._exponential import exponential, fused

LINEAR = 2 * math.sqrt(2 / math.pi)
CUBIC = 0.044715 * LINEAR


def gated_silu(gate: Tensor, up: Tensor) -> Tensor:
    """From tensors of one shape to that shape."""
    return _multiply_sigmoid(gate, gate) * up


def gelu(x: Tensor) -> Tensor:
    """From any shape to that shape."""
    factor = fused(x * x, x.new_tensor(CUBIC), x.new_tensor(LINEAR))
    return _multiply_sigmoid(x, x * factor)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """From [t, h, k], and [t, k] twice, to [t, h, k]."""
    a, b = x.chunk(2, dim=-1)
    return x * cos[:, None] + torch.cat((-b, a), dim=-1) * sin[:, None]


def _multiply_sigmoid(x: Tensor, a: Tensor) -> Tensor:
    """X / (1 + e^-a), by e^-|a| alone."""
    e = exponential(-a.abs())
    return x * torch.where(a < 0, e, 1.0) / (1 + e)
