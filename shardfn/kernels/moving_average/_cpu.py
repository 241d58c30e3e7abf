"""A moving average in place, on a CPU."""

import numpy as np
from torch import Tensor

from shardfn.kernels._cpu_blocks import array, cuts, room


def moving_average(m: Tensor, x: Tensor, b: float) -> None:
    """Overwrites m. All tensors are flat fp32 [n]."""
    average, more, spare = array(m), array(x), room(m.numel(), np.float32)
    for lo, hi in cuts(m.numel()):
        part = average[lo:hi]
        np.multiply(part, np.float32(b), out=part)
        np.add(part, np.multiply(more[lo:hi], np.float32(1 - b), out=spare[: hi - lo]), out=part)
