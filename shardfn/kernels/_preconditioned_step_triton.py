"""Moving averages and Adam's step, in Triton."""

from typing import Any, no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._triton import ceil, launch

WIDTH = 1024


def moving_average(m: Tensor, x: Tensor, b: float) -> None:
    """Overwrites m, fp32, with the moving average of g."""
    launch(_average_kernel, ceil(m.numel(), WIDTH), m.device, m, x, b, 1 - b, m.numel(), WIDTH=WIDTH)


def preconditioned_step(p: Tensor, *rest: Any) -> Tensor:
    """Returns the step, fp32 of the shape of p."""
    out = torch.empty_like(p, memory_format=torch.contiguous_format)
    _launch_step(p, *rest, out, adds=False)
    return out


def preconditioned_step_(p: Tensor, *rest: Any) -> None:
    """Adds the step to p."""
    _launch_step(p, *rest, p, adds=True)


def _launch_step(p: Tensor, m: Tensor, nu: Tensor, *rest: Any, adds: bool) -> None:
    *numbers, eps, decay, out = rest
    n, (lr, c1, c2) = p.numel(), (p.new_ones(()) if x is None else x.to(p.device) for x in numbers)
    options = {"DECAYS": decay != 0, "ADDS": adds, "WIDTH": WIDTH}
    launch(_step_kernel, ceil(n, WIDTH), p.device, p, m, nu, lr, c1, c2, out, eps, decay, n, **options)


@triton.jit
@no_type_check
def _average_kernel(m, x, b, a, n, WIDTH: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * WIDTH + tl.arange(0, WIDTH)
    old = tl.load(m + at, mask=at < n, other=0.0)
    tl.store(m + at, old * b + tl.load(x + at, mask=at < n, other=0.0) * a, mask=at < n)


@triton.jit
@no_type_check
def _step_kernel(
    p, m, nu, lr, c1, c2, out, eps, decay, n, DECAYS: tl.constexpr, ADDS: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * WIDTH + tl.arange(0, WIDTH)
    mask, zeros = at < n, tl.full([WIDTH], 0.0, tl.float32)
    old = tl.load(p + at, mask=mask, other=0.0)
    d = tl.load(nu + at, mask=mask, other=1.0)
    d = tl.math.div_rn(tl.where(d <= 0.0, float("inf"), d), zeros + tl.load(c2))
    d = tl.math.sqrt_rn(d) + eps
    u = tl.math.div_rn(tl.math.div_rn(tl.load(m + at, mask=mask, other=0.0), zeros + tl.load(c1)), d)
    if DECAYS:
        u = u + decay * old
    u = u * -tl.load(lr)
    if ADDS:
        u = old + u
    tl.store(out + at, u, mask=mask)
