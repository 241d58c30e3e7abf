"""Passes of an optimizer over memory: moving averages, and Adam's step by the averages.

The step goes along the mean of gradients, divided by the root of the mean of squared gradients.
"""

import math
from typing import Any

import torch
from jaxtyping import Float32
from torch import Tensor

from ._arguments import check_dtype, check_shape, check_written
from ._build import call
from ._op import KernelOp


def moving_average_(m: Float32[Tensor, "*shape"], x: Float32[Tensor, "*shape"], b: float) -> None:
    """Computes `m = b m + (1 - b) x` in a single pass over memory, each operation rounded once.

    Args:
        m: the average, contiguous, overwritten.
        x: the new value.
        b: the rate of decay.

    Raises:
        TypeError: for other dtypes.
        ValueError: if shapes differ, or m is not contiguous.

    Example:
        >>> m = torch.tensor([1.0, 2.0])
        >>> moving_average_(m, torch.tensor([3.0, 2.0]), 0.5)
        >>> m
        tensor([2., 2.])
    """
    check_dtype("m", m, torch.float32)
    check_dtype("x", x, torch.float32)
    check_shape("x", x, tuple(m.shape), "that of m")
    check_written("m", m)
    MOVING_AVERAGE_(m, x, b)


def preconditioned_step(
    p: Float32[Tensor, "*shape"],
    m: Float32[Tensor, "*shape"],
    nu: Float32[Tensor, "*shape"],
    lr: Float32[Tensor, ""],
    c1: Float32[Tensor, ""] | None = None,
    c2: Float32[Tensor, ""] | None = None,
    *,
    eps: float,
    weight_decay: float = 0.0,
) -> Float32[Tensor, "*shape"]:
    """Returns Adam's step, computed from the two moments in a single pass over memory.

        d = sqrt(nu / c2) + eps                    infinite where nu <= 0: such an element has no scale to step by
        u = -lr (m / c1 / d + weight_decay p)

    Computed in fp32 in the given order, each operation, the root too, rounded once. Without weight decay the term is
    left out.

    Args:
        p: parameters.
        m: the mean of gradients.
        nu: mean of the squared gradients.
        lr: learning rate.
        c1: the bias correction of m, `1 - b1^t`. None: 1.
        c2: the bias correction of nu, `1 - b2^t`. None: 1.
        eps: constant outside the root.
        weight_decay: factor of the decoupled decay.

    Returns:
        The update u, to be added to p.

    Raises:
        TypeError: for other dtypes.
        ValueError: if shapes differ.

    Example:
        >>> preconditioned_step(torch.ones(2), torch.ones(2), torch.tensor([4.0, 0.0]), torch.tensor(0.1), eps=0.0)
        tensor([-0.0500, -0.0000])

    References:
        Kingma and Ba: Adam: A Method for Stochastic Optimization, 2014, https://arxiv.org/abs/1412.6980
    """
    _check_tensors(p, m=m, nu=nu, lr=lr, c1=c1, c2=c2)
    return PRECONDITIONED_STEP(p, m, nu, lr, c1, c2, eps, weight_decay)


def preconditioned_step_(
    p: Float32[Tensor, "*shape"],
    m: Float32[Tensor, "*shape"],
    nu: Float32[Tensor, "*shape"],
    lr: Float32[Tensor, ""],
    c1: Float32[Tensor, ""] | None = None,
    c2: Float32[Tensor, ""] | None = None,
    *,
    eps: float,
    weight_decay: float = 0.0,
) -> None:
    """Adds `preconditioned_step` to a contiguous p, with the bits of `p + u`.

    Args:
        p: parameters, overwritten.
        m: see `preconditioned_step`, like the following.
        nu: the mean of squares.
        lr: learning rate.
        c1: the bias correction of m.
        c2: the bias correction of nu.
        eps: constant outside the root.
        weight_decay: factor of the decoupled decay.

    Raises:
        TypeError: for other dtypes.
        ValueError: if shapes differ, or p is not contiguous.

    Example:
        >>> p = torch.tensor([1.0, 1.0])
        >>> preconditioned_step_(p, torch.ones(2), torch.tensor([4.0, 0.0]), torch.tensor(0.1), eps=0.0)
        >>> p
        tensor([0.9500, 1.0000])
    """
    _check_tensors(p, m=m, nu=nu, lr=lr, c1=c1, c2=c2)
    check_written("p", p)
    PRECONDITIONED_STEP_(p, m, nu, lr, c1, c2, eps, weight_decay)


def _check_tensors(p: Tensor, **others: Tensor | None) -> None:
    check_dtype("p", p, torch.float32)
    for name, x in others.items():
        if x is not None:
            check_dtype(name, x, torch.float32)
            elementwise = name in ("m", "nu")
            check_shape(name, x, tuple(p.shape) if elementwise else (), "that of p" if elementwise else "one number")


def _average_by_torch(m: Tensor, x: Tensor, b: float) -> None:
    m.mul_(b).add_((1 - b) * x)


def _average_natively(m: Tensor, x: Tensor, b: float) -> None:
    call("moving_average", m, x, m.numel(), float(b), float(1 - b))


def _step_by_torch(
    p: Tensor, m: Tensor, nu: Tensor, lr: Tensor, c1: Tensor | None, c2: Tensor | None, eps: float, weight_decay: float
) -> Tensor:
    d = torch.where(nu <= 0, math.inf, nu)
    # torch's roots of fp32 numbers are not always the nearest numbers. Rounded roots of fp64 are.
    d = (d if c2 is None else d / c2).double().sqrt().float() + eps
    u = (m if c1 is None else m / c1) / d
    return (u + weight_decay * p if weight_decay else u) * -lr


def _add_step_by_torch(p: Tensor, *rest: Any) -> None:
    p.add_(_step_by_torch(p, *rest))


def _step_natively(p: Tensor, m: Tensor, nu: Tensor, *numbers: Any) -> Tensor:
    out = torch.empty_like(p, memory_format=torch.contiguous_format)
    _call_step(p, m, nu, *numbers, out)
    return out


def _call_step(p: Tensor, m: Tensor, nu: Tensor, *rest: Any) -> None:
    """Calls C++, which writes `out`, or adds to p without `out`."""
    *numbers, eps, weight_decay, out = rest
    lr, c1, c2 = (1.0 if x is None else x.item() for x in numbers)  # division by 1 keeps all bits
    call("preconditioned_step", p, m, nu, p.numel(), -lr, c1, c2, float(eps), float(weight_decay), out)


MOVING_AVERAGE_ = KernelOp(
    schema="moving_average_(Tensor(a!) m, Tensor x, float b) -> ()",
    reference=_average_by_torch,
    native=_average_natively,
    triton="_preconditioned_step_triton.moving_average",
)
_TAKES = "Tensor m, Tensor nu, Tensor lr, Tensor? c1, Tensor? c2, float eps, float weight_decay"
PRECONDITIONED_STEP = KernelOp(
    schema=f"preconditioned_step(Tensor p, {_TAKES}) -> Tensor",
    reference=_step_by_torch,
    native=_step_natively,
    triton="_preconditioned_step_triton.preconditioned_step",
)
PRECONDITIONED_STEP_ = KernelOp(
    schema=f"preconditioned_step_(Tensor(a!) p, {_TAKES}) -> ()",
    reference=_add_step_by_torch,
    native=lambda *args: _call_step(*args, None),
    triton="_preconditioned_step_triton.preconditioned_step_",
)
