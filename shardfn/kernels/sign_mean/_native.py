"""The mean of signs plus the previous error, as signs and a scale, on a CPU, in C++."""

import numpy as np
import torch
from torch import Tensor

from shardfn.kernels._build import call, total
from shardfn.kernels._cpu_blocks import table
from shardfn.kernels._sums import LANES, SPAN, root_mean


def sign_mean(bits: Tensor, scale: Tensor, error: Tensor) -> tuple[Tensor, Tensor]:
    """Maps uint8 [k, b], fp32 [k], fp32 [8 b] to uint8 [b], fp32 [1]. Overwrites the error."""
    k, b = bits.shape
    lanes = torch.zeros(-(-8 * b // SPAN), LANES, dtype=torch.float64)
    call("add_mean", bits, k, b, np.stack([table(s) for s in scale.tolist()]), error, lanes)
    root, packed = root_mean(total(lanes), 8 * b), torch.empty(b, dtype=torch.uint8)
    call("subtract_signs", error, 8 * b, float(root), packed)
    return packed, root.reshape(1)
