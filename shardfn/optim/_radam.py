"""RAdam: Adam with a rectified step while the second moment is the mean of few gradients."""

from typing import Any

import torch
from torch import Tensor

from shardfn.core import explains_keywords

from ._adam import ScaleByAdamState, bias_corrections, corrected_mean, corrected_root, moments
from ._base import GradientTransformation
from ._chain import chain
from ._checks import check_decay_rate, check_not_negative
from ._elementwise import elementwise, keep_zeros
from ._learning_rate import check_rate, scale_by_learning_rate
from ._types import LearningRate, Number
from ._unsupported import MEANT


def scale_by_radam(
    b1: Number = 0.9,
    b2: Number = 0.999,
    eps: Number = 1e-8,
    eps_root: Number = 0.0,
    threshold: Number = 5.0,
    *,
    nesterov: bool = False,
) -> GradientTransformation:
    """Rectified Adam: `u = r * mu_hat / (sqrt(nu_hat + eps_root) + eps)`, and `u = mu_hat` at the first steps.

    With `rho_inf = 2 / (1 - b2) - 1` and `rho = rho_inf - 2 t b2^t / (1 - b2^t)`, the factor is `r^2 = (rho - 4) (rho -
    2) rho_inf / ((rho_inf - 4) (rho_inf - 2) rho)`. The first steps are the steps with `rho < threshold`. The moments
    are as in `scale_by_adam`.

    Args:
        b1: rate of the mean, in [0, 1).
        b2: rate of the squares, in [0, 1).
        eps: outside the root, >= 0.
        eps_root: inside the root, >= 0.
        threshold: threshold of rho, >= 0. RAdam needs more than 4.
        nesterov: whether the mean looks one step ahead.

    Returns:
        A rule with a `ScaleByAdamState`.

    Raises:
        ValueError: a number is out of range.

    Example:
        >>> tx = scale_by_radam()
        >>> tx.update([torch.tensor([0.5])], tx.init([torch.zeros(1)]))[0]
        [tensor([0.5000])]

    References:
        Liu et al., On the Variance of the Adaptive Learning Rate and Beyond, 2019, https://arxiv.org/abs/1908.03265
    """
    check_decay_rate("scale_by_radam", b1=b1, b2=b2)
    check_not_negative("scale_by_radam", eps=eps, eps_root=eps_root, threshold=threshold)

    def corrections_at(count: Tensor) -> dict[str, Any]:
        c1, c2 = bias_corrections(count, b1, b2)
        ahead = bias_corrections(count + 1, b1, b2)[0] if nesterov else None
        most = 2 / (1 - b2) - 1
        rho = most - 2 * count * (1 - c2) / c2
        # At the first steps the factor is not used, and has no root.
        x = torch.where(rho >= threshold, rho, most)
        r = ((x - 4) * (x - 2) * most / ((most - 4) * (most - 2) * x)).sqrt()
        more = {"c1": c1, "c2": c2, "ahead": ahead, "rho": rho, "r": r}
        return {"b1": b1, "b2": b2, "eps": eps, "eps_root": eps_root, "threshold": threshold} | more

    return elementwise(
        "scale_by_radam", ScaleByAdamState, _leaf_direction, {"mu": keep_zeros, "nu": keep_zeros}, corrections_at
    )


@explains_keywords(**MEANT)
def radam(
    learning_rate: LearningRate,
    b1: Number = 0.9,
    b2: Number = 0.999,
    eps: Number = 1e-8,
    eps_root: Number = 0.0,
    threshold: Number = 5.0,
    *,
    nesterov: bool = False,
) -> GradientTransformation:
    """RAdam: `p = p - lr * u`. See `scale_by_radam`. No warm-up of the learning rate is needed.

    Args:
        learning_rate: a number >= 0, or a schedule.
        b1: rate of the mean, in [0, 1).
        b2: rate of the squares, in [0, 1).
        eps: outside the root, >= 0.
        eps_root: inside the root, >= 0.
        threshold: the length of the average from which the step is rectified, >= 0.
        nesterov: whether the mean looks one step ahead.

    Returns:
        A rule.

    Raises:
        ValueError: a number is out of range.

    Example:
        >>> tx = radam(0.1)
        >>> tx.update([torch.ones(1)], tx.init([torch.zeros(1)]))[0]
        [tensor([-0.1000])]

    References:
        Liu et al., On the Variance of the Adaptive Learning Rate and Beyond, 2019, https://arxiv.org/abs/1908.03265
    """
    check_rate("radam", learning_rate)
    direction = scale_by_radam(b1, b2, eps, eps_root, threshold, nesterov=nesterov)
    return chain(direction, scale_by_learning_rate(learning_rate))


def _leaf_direction(
    g: Tensor, mu: Tensor, nu: Tensor, b1: Number, b2: Number, eps: Number, eps_root: Number, c1: Tensor, c2: Tensor,
    ahead: Tensor | None, rho: Tensor, threshold: Number, r: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Returns the update of a leaf, and the next moments."""
    dtype = nu.dtype
    mu, nu = moments(g, mu, nu, b1, b2)
    mean = corrected_mean(g, mu, b1, c1, ahead)
    rectified = r * mean / (corrected_root(nu, c2, eps_root) + eps)
    return torch.where(rho >= threshold, rectified, mean).to(dtype), mu.to(dtype), nu.to(dtype)
