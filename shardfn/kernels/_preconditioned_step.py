"""Adam's step: along the mean of gradients, divided by the root of the mean of squared gradients."""

from typing import Any

import torch
from jaxtyping import Float32
from torch import Tensor

from shardfn.kernels._arguments import check_dtype, check_shape, check_written
from shardfn.kernels._dispatch import implementation
from shardfn.kernels._library import define


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
        eps: outside the root.
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
    return torch.ops.shardfn_kernels.preconditioned_step(p, m, nu, lr, c1, c2, eps, weight_decay)


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
        eps: outside the root.
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
    torch.ops.shardfn_kernels.preconditioned_step_(p, m, nu, lr, c1, c2, eps, weight_decay)


def _check_tensors(p: Tensor, **others: Tensor | None) -> None:
    check_dtype("p", p, torch.float32)
    for name, x in others.items():
        if x is not None:
            check_dtype(name, x, torch.float32)
            elementwise = name in ("m", "nu")
            check_shape(name, x, tuple(p.shape) if elementwise else (), "that of p" if elementwise else "one number")


def _run_step(p: Tensor, m: Tensor, nu: Tensor, *numbers: Any, out: Tensor) -> None:
    *tensors, eps, weight_decay = numbers
    step = implementation("preconditioned_step", "preconditioned_step", p.device)
    flat = (x.contiguous().view(-1) for x in (p, m, nu))
    step(*flat, tuple(tensors), eps, weight_decay, None if out is p else out.view(-1))


def _preconditioned_step(p: Tensor, *args: Any) -> Tensor:
    out = torch.empty_like(p, memory_format=torch.contiguous_format)
    _run_step(p, *args, out=out)
    return out


def _preconditioned_step_(p: Tensor, *args: Any) -> None:
    _run_step(p, *args, out=p)


_TAKES = "Tensor m, Tensor nu, Tensor lr, Tensor? c1, Tensor? c2, float eps, float weight_decay"

define(
    f"preconditioned_step(Tensor p, {_TAKES}) -> Tensor",
    _preconditioned_step,
    lambda p, *args: torch.empty_like(p, memory_format=torch.contiguous_format),
)
define(f"preconditioned_step_(Tensor(a!) p, {_TAKES}) -> ()", _preconditioned_step_, lambda *args: None)
