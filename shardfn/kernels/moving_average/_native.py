"""A moving average in place, on a CPU, in C++."""

from torch import Tensor

from shardfn.kernels._build import call


def moving_average(m: Tensor, x: Tensor, b: float) -> None:
    """Overwrites m. All tensors are flat fp32 [n]."""
    call("moving_average", m, x, m.numel(), float(b), float(1 - b))
