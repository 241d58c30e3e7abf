"""A step along a mean, divided by the root of a variance, in Triton."""

from typing import no_type_check

import triton
import triton.language as tl
from torch import Tensor

from shardfn.kernels._triton import ceil, launch

from ._reference import Numbers

WIDTH = 1024


def preconditioned_step(
    p: Tensor, m: Tensor, nu: Tensor, numbers: Numbers, eps: float, weight_decay: float, out: Tensor | None
) -> None:
    """Computes flat fp32 [n], with lr, c1 and c2 as fp32 []. Writes `out`, or adds to p without `out`."""
    n = p.numel()
    lr, c1, c2 = (p.new_ones(()) if x is None else x.to(p.device) for x in numbers)
    options = {"DECAYS": weight_decay != 0, "ADDS": out is None, "WIDTH": WIDTH}
    into = p if out is None else out
    launch(_step_kernel, ceil(n, WIDTH), p.device, p, m, nu, lr, c1, c2, into, eps, weight_decay, n, **options)


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
