"""A step along a mean, divided by the root of a variance: the definition."""

import math

import torch
from torch import Tensor

Numbers = tuple[Tensor, Tensor | None, Tensor | None]


def preconditioned_step(
    p: Tensor, m: Tensor, nu: Tensor, numbers: Numbers, eps: float, weight_decay: float, out: Tensor | None
) -> None:
    """Computes flat fp32 [n], with lr, c1 and c2 as fp32 []. Writes `out`, or adds to p without `out`."""
    lr, c1, c2 = numbers
    d = torch.where(nu <= 0, math.inf, nu)
    # torch's roots of fp32 numbers are not always the nearest numbers. Rounded roots of fp64 are.
    d = (d if c2 is None else d / c2).double().sqrt().float() + eps
    u = (m if c1 is None else m / c1) / d
    u = (u + weight_decay * p if weight_decay else u) * -lr
    p.add_(u) if out is None else out.copy_(u)
