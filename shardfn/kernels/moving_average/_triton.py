"""A moving average in place, in Triton."""

from typing import no_type_check

import triton
import triton.language as tl
from torch import Tensor

from shardfn.kernels._triton import ceil, launch

WIDTH = 1024


def moving_average(m: Tensor, x: Tensor, b: float) -> None:
    """Overwrites m. All tensors are flat fp32 [n]."""
    launch(_average_kernel, ceil(m.numel(), WIDTH), m.device, m, x, b, 1 - b, m.numel(), WIDTH=WIDTH)


@triton.jit
@no_type_check
def _average_kernel(m, x, b, a, n, WIDTH: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * WIDTH + tl.arange(0, WIDTH)
    old = tl.load(m + at, mask=at < n, other=0.0)
    tl.store(m + at, old * b + tl.load(x + at, mask=at < n, other=0.0) * a, mask=at < n)
