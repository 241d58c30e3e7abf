"""ADOPT: Adam whose second moment does not contain the current gradient, so that it converges for every `b2`."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shardfn.core import explains_keywords

from ._adam import ScaleByAdamState
from ._base import GradientTransformation
from ._chain import chain
from ._checks import check_decay_rate, check_positive
from ._decay import add_decayed_weights
from ._elementwise import elementwise, keep_zeros
from ._hyper import safe_root
from ._learning_rate import check_rate, scale_by_learning_rate
from ._leaves import wide
from ._types import LearningRate, Mask, Number
from ._unsupported import MEANT

ClipValue = Callable[[Any], Any]


def fourth_root(count: Tensor) -> Tensor:
    """Returns `count^(1/4)`, the paper's bound of a normalised gradient.

    Example:
        >>> fourth_root(torch.tensor(16))
        tensor(2., dtype=torch.float64)
    """
    return count.double().pow(0.25)


def scale_by_adopt(
    b1: Number = 0.9,
    b2: Number = 0.9999,
    eps: Number = 1e-6,
    *,
    nesterov: bool = False,
    clip_value_fn: ClipValue | None = fourth_root,
) -> GradientTransformation:
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
        A rule with a `ScaleByAdamState`.

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
        "scale_by_adopt", ScaleByAdamState, _leaf_direction, {"mu": keep_zeros, "nu": torch.clone}, numbers_at
    )


@explains_keywords(**MEANT)
def adopt(
    learning_rate: LearningRate,
    b1: Number = 0.9,
    b2: Number = 0.9999,
    eps: Number = 1e-6,
    *,
    nesterov: bool = False,
    clip_value_fn: ClipValue | None = fourth_root,
    weight_decay: Number = 0.0,
    mask: Mask = None,
) -> GradientTransformation:
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
        A rule.

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


def _leaf_direction(
    g: Tensor, mu: Tensor, nu: Tensor, b1: Tensor, b2: Tensor, eps: Number, bound: Any, nesterov: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the update of a leaf, and the next moments."""
    kept, dtype = nu.dtype, wide(nu).dtype
    g, old = g.to(dtype), nu.to(dtype)
    c = g / safe_root(old).clamp(min=eps)
    c = torch.minimum(torch.maximum(c, torch.as_tensor(-bound).to(c)), torch.as_tensor(bound).to(c))
    mu = b1 * mu.to(dtype) + (1 - b1) * c
    u = b1 * mu + (1 - b1) * c if nesterov else mu
    return u.to(kept), mu.to(kept), (b2 * old + (1 - b2) * g.square()).to(kept)
