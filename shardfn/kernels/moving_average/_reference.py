"""A moving average in place: the definition."""

from torch import Tensor


def moving_average(m: Tensor, x: Tensor, b: float) -> None:
    """Overwrites m. All tensors are flat fp32 [n]."""
    m.mul_(b).add_((1 - b) * x)
