"""A step along a mean, divided by the root of a variance, on a CPU, in C++."""

from torch import Tensor

from shardfn.kernels._build import call

from ._reference import Numbers


def preconditioned_step(
    p: Tensor, m: Tensor, nu: Tensor, numbers: Numbers, eps: float, weight_decay: float, out: Tensor | None
) -> None:
    """Computes flat fp32 [n], with lr, c1 and c2 as fp32 []. Writes `out`, or adds to p without `out`."""
    lr, c1, c2 = (1.0 if x is None else x.item() for x in numbers)  # division by 1 keeps all bits
    call("preconditioned_step", p, m, nu, p.numel(), -lr, c1, c2, float(eps), float(weight_decay), out)
