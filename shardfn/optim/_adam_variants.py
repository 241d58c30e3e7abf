"""Variants of Adam: AdEMAMix, ADOPT and RAdam.

AdEMAMix has a second, slow mean of the gradients. The second moment of ADOPT does not contain the current gradient, so
that ADOPT converges for every `b2`. RAdam rectifies steps while the second moment is the mean of few gradients.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor

from shardfn.core import PyTree, explains_keywords

from . import _base as base
from ._adam import ScaleByAdamState, bias_corrections, corrected_mean, corrected_root, moments
from ._chain import chain
from ._checks import MEANT, check_decay_rate, check_not_negative, check_positive
from ._elementwise import elementwise, keep_zeros, safe_root
from ._learning_rate import add_decayed_weights, check_rate, evaluate_schedule, scale_by_learning_rate
from ._leaves import wide


class ScaleByAdemamixState(NamedTuple):
    """Moments of AdEMAMix.

    Attributes:
        count: int32, 0-d: steps taken.
        m1: tree like params: fast mean of the gradients.
        m2: tree like params: slow mean of the gradients.
        nu: tree like params: mean of the squared gradients.
    """

    count: Int[Tensor, ""]  # pyright: ignore[reportIncompatibleMethodOverride]  # optax's name
    m1: PyTree
    m2: PyTree
    nu: PyTree


def scale_by_ademamix(
    b1: base.Number = 0.9,
    b2: base.Number = 0.999,
    b3: base.Number | base.Schedule = 0.9999,
    alpha: base.Number | base.Schedule = 6.0,
    eps: base.Number = 1e-8,
    eps_root: base.Number = 0.0,
) -> base.GradientTransformation:
    """Adds a slow mean to Adam's direction: `u = (m1_hat + alpha m2) / (sqrt(nu_hat + eps_root) + eps)`.

    As in Adam, `m1_hat = m1 / (1 - b1^t)` and `nu_hat = nu / (1 - b2^t)`.
    The means are `m1 = b1 m1 + (1 - b1) g` and `m2 = b3 m2 + (1 - b3) g`. The slow mean is not corrected for bias, so
    it fills up over thousands of steps. States are elementwise: every ZeRO stage and memory is possible.

    Args:
        b1: rate of the fast mean, in [0, 1).
        b2: rate of the squares, in [0, 1).
        b3: rate of the slow mean, in [0, 1), or a schedule. The paper lets `b3` grow from `b1` during training.
        alpha: weight of the slow mean, >= 0, or a schedule. The paper lets `alpha` grow from 0.
        eps: constant outside the root, >= 0.
        eps_root: constant inside the root, >= 0.

    Returns:
        The corresponding `GradientTransformation`, with a `ScaleByAdemamixState` as state.

    Raises:
        ValueError: a number is out of range.

    Example:
        >>> tx = scale_by_ademamix(b3=0.5, alpha=2.0)
        >>> tx.update([torch.tensor([0.5])], tx.init([torch.zeros(1)]))[0]
        [tensor([2.])]

    References:
        Pagliardini et al., The AdEMAMix Optimizer: Better, Faster, Older, 2024, https://arxiv.org/abs/2409.03137
    """
    who = "scale_by_ademamix"
    check_decay_rate(who, b1=b1, b2=b2, **({} if callable(b3) else {"b3": b3}))
    check_not_negative(who, eps=eps, eps_root=eps_root, **({} if callable(alpha) else {"alpha": alpha}))

    def numbers_at(count: Tensor) -> dict[str, Any]:
        c1, c2 = bias_corrections(count, b1, b2)
        slow, weight = (evaluate_schedule(x, count - 1) if callable(x) else x for x in (b3, alpha))
        return {"b1": b1, "b2": b2, "b3": slow, "alpha": weight, "eps": eps, "eps_root": eps_root, "c1": c1, "c2": c2}

    init_fns = {"m1": keep_zeros, "m2": torch.clone, "nu": torch.clone}
    return elementwise(who, ScaleByAdemamixState, _ademamix_direction, init_fns, numbers_at)


@explains_keywords(**MEANT)
def ademamix(
    learning_rate: base.LearningRate,
    b1: base.Number = 0.9,
    b2: base.Number = 0.999,
    b3: base.Number | base.Schedule = 0.9999,
    alpha: base.Number | base.Schedule = 5.0,
    eps: base.Number = 1e-8,
    eps_root: base.Number = 0.0,
    weight_decay: base.Number = 0.0,
    mask: base.Mask = None,
) -> base.GradientTransformation:
    """AdEMAMix: `p = p - lr * (u + weight_decay * p)`, with u of `scale_by_ademamix`.

    The names and defaults are optax's.

    Args:
        learning_rate: a number >= 0, or a schedule.
        b1: rate of the fast mean, in [0, 1).
        b2: rate of the squares, in [0, 1).
        b3: rate of the slow mean, in [0, 1), or a schedule.
        alpha: weight of the slow mean, >= 0, or a schedule.
        eps: constant outside the root, >= 0.
        eps_root: constant inside the root, >= 0.
        weight_decay: factor of the decay, >= 0. It is multiplied by the learning rate.
        mask: leaves that decay: a tree (or prefix) of bools, or a function from params to such a tree. None: all.

    Returns:
        The corresponding `GradientTransformation`.

    Raises:
        ValueError: a number is out of range, or (on use) the mask or the state does not match the params.

    Example:
        >>> tx = ademamix(0.1, b3=0.5, alpha=2.0)
        >>> tx.update([torch.ones(1)], tx.init([torch.zeros(1)]), [torch.zeros(1)])[0]
        [tensor([-0.2000])]

    References:
        Pagliardini et al., The AdEMAMix Optimizer: Better, Faster, Older, 2024, https://arxiv.org/abs/2409.03137
    """
    check_rate("ademamix", learning_rate)
    direction, decay = scale_by_ademamix(b1, b2, b3, alpha, eps, eps_root), add_decayed_weights(weight_decay, mask)
    return chain(direction, decay, scale_by_learning_rate(learning_rate))


def _ademamix_direction(
    g: Tensor,
    m1: Tensor,
    m2: Tensor,
    nu: Tensor,
    b1: base.Number,
    b2: base.Number,
    b3: base.Number,
    alpha: base.Number,
    eps: base.Number,
    eps_root: base.Number, c1: Tensor, c2: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Returns the update of a leaf, and the next moments."""
    kept, dtype = nu.dtype, wide(nu).dtype
    g = g.to(dtype)
    m1, m2 = b1 * m1.to(dtype) + (1 - b1) * g, b3 * m2.to(dtype) + (1 - b3) * g
    nu = b2 * nu.to(dtype) + (1 - b2) * g.square()
    u = (m1 / c1 + alpha * m2) / (corrected_root(nu, c2, eps_root) + eps)
    return u.to(kept), m1.to(kept), m2.to(kept), nu.to(kept)


ClipValue = Callable[[Any], Any]


def fourth_root(count: Tensor) -> Tensor:
    """Returns `count^(1/4)`, the paper's bound of a normalised gradient.

    Example:
        >>> fourth_root(torch.tensor(16))
        tensor(2., dtype=torch.float64)
    """
    return count.double().pow(0.25)


def scale_by_adopt(
    b1: base.Number = 0.9,
    b2: base.Number = 0.9999,
    eps: base.Number = 1e-6,
    *,
    nesterov: bool = False,
    clip_value_fn: ClipValue | None = fourth_root,
) -> base.GradientTransformation:
    """Averages gradients that are divided by the root of the squares before this step.

        c = clip(g / max(sqrt(nu), eps), -clip_value_fn(t), clip_value_fn(t))
        u = mu = b1 mu + (1 - b1) c;   nu = b2 nu + (1 - b2) g^2

    Here t is 0 at the first step. The first step only sets `nu = g^2`: with t = 0 the clipped gradient is 0. States are
    elementwise: every ZeRO stage and memory is possible.

    Args:
        b1: rate of the mean, in [0, 1).
        b2: rate of the squares, in [0, 1).
        eps: smallest root, > 0.
        nesterov: whether the update is one step ahead: `u = b1 mu + (1 - b1) c`.
        clip_value_fn: function from the int32 count of earlier steps to the bound of c. None: c has no bound, as in the
            first version of the paper.

    Returns:
        The corresponding `GradientTransformation`, with a `ScaleByAdamState` as state.

    Raises:
        ValueError: a number is out of range.

    Example:
        >>> tx = scale_by_adopt(b1=0.5)
        >>> state = tx.update([torch.tensor([0.5])], tx.init([torch.zeros(1)]))[1]
        >>> tx.update([torch.tensor([0.5])], state)[0]
        [tensor([0.5000])]

    References:
        Taniguchi et al., ADOPT: Modified Adam Can Converge with Any beta2 with the Optimal Rate, 2024,
        https://arxiv.org/abs/2411.02853
    """
    check_decay_rate("scale_by_adopt", b1=b1, b2=b2)
    check_positive("scale_by_adopt", eps=eps)

    def numbers_at(count: Tensor) -> dict[str, Any]:
        begun = (count > 1).double()
        bound = torch.inf if clip_value_fn is None else clip_value_fn(count - 1)
        rates = {"b1": 1 - begun * (1 - b1), "b2": begun * b2}  # 1 and 0 in the first step
        return rates | {"eps": eps, "bound": bound, "nesterov": nesterov}

    return elementwise(
        "scale_by_adopt", ScaleByAdamState, _adopt_direction, {"mu": keep_zeros, "nu": torch.clone}, numbers_at
    )


@explains_keywords(**MEANT)
def adopt(
    learning_rate: base.LearningRate,
    b1: base.Number = 0.9,
    b2: base.Number = 0.9999,
    eps: base.Number = 1e-6,
    *,
    nesterov: bool = False,
    clip_value_fn: ClipValue | None = fourth_root,
    weight_decay: base.Number = 0.0,
    mask: base.Mask = None,
) -> base.GradientTransformation:
    """ADOPT: `p = p - lr * (u + weight_decay * p)`, with u of `scale_by_adopt`.

    The names and defaults are optax's. The decay is an addition.

    Args:
        learning_rate: a number >= 0, or a schedule.
        b1: rate of the mean, in [0, 1).
        b2: rate of the squares, in [0, 1).
        eps: smallest root, > 0.
        nesterov: whether the update is one step ahead.
        clip_value_fn: function from the count of earlier steps to the bound of a normalised gradient. None: no bound.
        weight_decay: factor of the decoupled decay, >= 0. It is multiplied by the learning rate.
        mask: leaves that decay: a tree (or prefix) of bools, or a function from params to such a tree. None: all.

    Returns:
        The corresponding `GradientTransformation`.

    Raises:
        ValueError: a number is out of range, or (on use) the mask or the state does not match the params.

    Example:
        >>> tx = adopt(0.1)
        >>> tx.update([torch.ones(1)], tx.init([torch.zeros(1)]), [torch.zeros(1)])[0]
        [tensor([-0.])]

    References:
        Taniguchi et al., ADOPT: Modified Adam Can Converge with Any beta2 with the Optimal Rate, 2024,
        https://arxiv.org/abs/2411.02853
    """
    check_rate("adopt", learning_rate)
    direction = scale_by_adopt(b1, b2, eps, nesterov=nesterov, clip_value_fn=clip_value_fn)
    return chain(direction, add_decayed_weights(weight_decay, mask), scale_by_learning_rate(learning_rate))


def _adopt_direction(
    g: Tensor, mu: Tensor, nu: Tensor, b1: Tensor, b2: Tensor, eps: base.Number, bound: Any, nesterov: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the update of a leaf, and the next moments."""
    kept, dtype = nu.dtype, wide(nu).dtype
    g, old = g.to(dtype), nu.to(dtype)
    c = g / safe_root(old).clamp(min=eps)
    c = torch.minimum(torch.maximum(c, torch.as_tensor(-bound).to(c)), torch.as_tensor(bound).to(c))
    mu = b1 * mu.to(dtype) + (1 - b1) * c
    u = b1 * mu + (1 - b1) * c if nesterov else mu
    return u.to(kept), mu.to(kept), (b2 * old + (1 - b2) * g.square()).to(kept)


def scale_by_radam(
    b1: base.Number = 0.9,
    b2: base.Number = 0.999,
    eps: base.Number = 1e-8,
    eps_root: base.Number = 0.0,
    threshold: base.Number = 5.0,
    *,
    nesterov: bool = False,
) -> base.GradientTransformation:
    """Rectified Adam: `u = r * mu_hat / (sqrt(nu_hat + eps_root) + eps)`, and `u = mu_hat` at the first steps.

    With `rho_inf = 2 / (1 - b2) - 1` and `rho = rho_inf - 2 t b2^t / (1 - b2^t)`, the factor is `r^2 = (rho - 4) (rho -
    2) rho_inf / ((rho_inf - 4) (rho_inf - 2) rho)`. The first steps are the steps with `rho < threshold`. The moments
    are as in `scale_by_adam`.

    Args:
        b1: rate of the mean, in [0, 1).
        b2: rate of the squares, in [0, 1).
        eps: constant outside the root, >= 0.
        eps_root: constant inside the root, >= 0.
        threshold: threshold of rho, >= 0. RAdam needs more than 4.
        nesterov: whether the mean looks one step ahead.

    Returns:
        The corresponding `GradientTransformation`, with a `ScaleByAdamState` as state.

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
        "scale_by_radam", ScaleByAdamState, _radam_direction, {"mu": keep_zeros, "nu": keep_zeros}, corrections_at
    )


@explains_keywords(**MEANT)
def radam(
    learning_rate: base.LearningRate,
    b1: base.Number = 0.9,
    b2: base.Number = 0.999,
    eps: base.Number = 1e-8,
    eps_root: base.Number = 0.0,
    threshold: base.Number = 5.0,
    *,
    nesterov: bool = False,
) -> base.GradientTransformation:
    """RAdam: `p = p - lr * u`. See `scale_by_radam`. No warm-up of the learning rate is needed.

    Args:
        learning_rate: a number >= 0, or a schedule.
        b1: rate of the mean, in [0, 1).
        b2: rate of the squares, in [0, 1).
        eps: constant outside the root, >= 0.
        eps_root: constant inside the root, >= 0.
        threshold: the length of the average from which the step is rectified, >= 0.
        nesterov: whether the mean looks one step ahead.

    Returns:
        The corresponding `GradientTransformation`.

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


def _radam_direction(
    g: Tensor,
    mu: Tensor,
    nu: Tensor,
    b1: base.Number,
    b2: base.Number,
    eps: base.Number,
    eps_root: base.Number,
    c1: Tensor,
    c2: Tensor,
    ahead: Tensor | None, rho: Tensor, threshold: base.Number, r: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Returns the update of a leaf, and the next moments."""
    dtype = nu.dtype
    mu, nu = moments(g, mu, nu, b1, b2)
    mean = corrected_mean(g, mu, b1, c1, ahead)
    rectified = r * mean / (corrected_root(nu, c2, eps_root) + eps)
    return torch.where(rho >= threshold, rectified, mean).to(dtype), mu.to(dtype), nu.to(dtype)
