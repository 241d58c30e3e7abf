"""A step along a mean, divided by the root of a variance, on a CPU."""

import numpy as np
from torch import Tensor

from shardfn.kernels._cpu_blocks import array, cuts, room

from ._reference import Numbers


def preconditioned_step(
    p: Tensor, m: Tensor, nu: Tensor, numbers: Numbers, eps: float, weight_decay: float, out: Tensor | None
) -> None:
    """Computes flat fp32 [n], with lr, c1 and c2 as fp32 []. Writes `out`, or adds to p without `out`."""
    rate, c1, c2 = -np.float32(numbers[0].item()), *(None if x is None else np.float32(x.item()) for x in numbers[1:])
    old, new, scale, spare = array(p), array(p if out is None else out), *(room(p.numel(), np.float32) for _ in "du")
    with np.errstate(all="ignore"):
        for lo, hi in cuts(p.numel()):
            d, u = scale[: hi - lo], spare[: hi - lo]
            np.copyto(d, array(nu[lo:hi]))
            np.copyto(d, np.float32(np.inf), where=d <= 0)
            np.sqrt(d if c2 is None else np.divide(d, c2, out=d), out=d)
            np.add(d, np.float32(eps), out=d)
            mean = array(m[lo:hi])
            np.divide(mean if c1 is None else np.divide(mean, c1, out=u), d, out=u)
            if weight_decay:
                np.add(u, np.multiply(old[lo:hi], np.float32(weight_decay), out=d), out=u)
            np.multiply(u, rate, out=u if out is None else new[lo:hi])
            if out is None:
                np.add(old[lo:hi], u, out=new[lo:hi])
