"""A moving average in place: the definition."""

from torch import Tensor


def moving_average(m: Tensor, x: Tensor, b: float) -> None:
    """Flat fp32 [n] each. Overwrites m."""
    m.mul_(b).add_((1 - b) * x)
