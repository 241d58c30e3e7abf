"""Activations of single elements: the definition. Each operation is rounded once."""

import math

from torch import Tensor

from shardfn.kernels._exponential import exponential, fused

LINEAR = 2 * math.sqrt(2 / math.pi)
CUBIC = 0.044715 * LINEAR


def gated_silu(gate: Tensor, up: Tensor) -> Tensor:
    """From fp32 of one shape to fp32 of that shape."""
    return gate / (1 + exponential(-gate)) * up


def gelu(x: Tensor) -> Tensor:
    """From fp32 to fp32 of that shape."""
    factor = fused(x * x, x.new_tensor(CUBIC), x.new_tensor(LINEAR))
    return x / (1 + exponential(-(x * factor)))
