"""Adam and AdamW."""

from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from shardfn._torch import fused_adamw_
from shardfn.core import PyTree, explains_keywords

from . import _base as base
from ._chain import chain
from ._checks import MEANT, check_decay_rate, check_float_dtype, check_not_negative
from ._decide import resolve_prefix
from ._elementwise import as_number, elementwise, is_zero, keep_zeros, safe_root
from ._fused import fused, pad_for_fused
from ._learning_rate import add_decayed_weights, check_rate, decay_flags, next_rate, on_device, scale_by_learning_rate
from ._leaves import (
    Columns,
    check_shapes,
    leaves_like,
    wide,
)


class ScaleByAdamState(NamedTuple):
    """Moments of Adam.

    Attributes:
        count: int32, 0-d: steps taken.
        mu: tree like params: mean of the gradients.
        nu: tree like params: mean of the squared gradients.
    """

    count: Int[Tensor, ""]  # pyright: ignore[reportIncompatibleMethodOverride]  # optax's name
    mu: PyTree
    nu: PyTree


def scale_by_adam(
    b1: base.Number = 0.9,
    b2: base.Number = 0.999,
    eps: base.Number = 1e-8,
    eps_root: base.Number = 0.0,
    mu_dtype: torch.dtype | None = None,
    *,
    nesterov: bool = False,
) -> base.GradientTransformation:
    """Divides the mean gradient by its root mean square: `u = mu_hat / (sqrt(nu / (1 - b2^t) + eps_root) + eps)`.

    The moments are `mu = b1 mu + (1 - b1) g` and `nu = b2 nu + (1 - b2) g^2`. The moments have the dtype of the
    parameters. Arithmetic is in float32 at least. The mean is `mu_hat = mu / (1 - b1^t)`, or with Nesterov's momentum
    `b1 mu / (1 - b1^(t + 1)) + (1 - b1) g / (1 - b1^t)`.

    Args:
        b1: rate of the mean, in [0, 1). Like all rates, a number or a 0-d tensor.
        b2: rate of the squares, in [0, 1).
        eps: constant outside the root, >= 0.
        eps_root: constant inside the root, >= 0. Needed to differentiate through an update whose gradient was always 0.
        mu_dtype: dtype of `mu` between steps. None: dtype of the parameters.
        nesterov: whether the mean looks one step ahead.

    Returns:
        The corresponding `GradientTransformation`, with a `ScaleByAdamState` as state.

    Raises:
        ValueError: a number is out of range, or `mu_dtype` is not a dtype of floating point.

    Example:
        >>> tx = scale_by_adam()
        >>> tx.update([torch.tensor([0.5])], tx.init([torch.zeros(1)]))[0]
        [tensor([1.])]

    References:
        Kingma & Ba, Adam: A Method for Stochastic Optimization, 2014, https://arxiv.org/abs/1412.6980
        Dozat, Incorporating Nesterov Momentum into Adam, 2016, https://openreview.net/pdf?id=OM0jvwB8jIp57ZJjtNEZ
    """
    check_decay_rate("scale_by_adam", b1=b1, b2=b2)
    check_not_negative("scale_by_adam", eps=eps, eps_root=eps_root)
    check_float_dtype("scale_by_adam", mu_dtype=mu_dtype)

    def bias_corrections_at(count: Tensor) -> dict[str, Any]:
        c1, c2 = bias_corrections(count, b1, b2)
        ahead = bias_corrections(count + 1, b1, b2)[0] if nesterov else None
        return {"b1": b1, "b2": b2, "eps": eps, "eps_root": eps_root, "c1": c1, "c2": c2, "ahead": ahead}

    init_fns = {"mu": lambda zeros: zeros.to(mu_dtype or zeros.dtype), "nu": keep_zeros}
    return elementwise("scale_by_adam", ScaleByAdamState, _leaf_direction, init_fns, bias_corrections_at)


@explains_keywords(**MEANT)
def adam(
    learning_rate: base.LearningRate,
    b1: base.Number = 0.9,
    b2: base.Number = 0.999,
    eps: base.Number = 1e-8,
    eps_root: base.Number = 0.0,
    mu_dtype: torch.dtype | None = None,
    *,
    nesterov: bool = False,
) -> base.GradientTransformation:
    """Adam: `p = p - lr * mu_hat / (sqrt(nu_hat) + eps)`. See `scale_by_adam`.

    Args:
        learning_rate: a number >= 0, or a schedule.
        b1: rate of the mean, in [0, 1).
        b2: rate of the squares, in [0, 1).
        eps: constant outside the root, >= 0.
        eps_root: constant inside the root, >= 0.
        mu_dtype: dtype of the stored mean. None: dtype of the parameters.
        nesterov: whether the mean looks one step ahead (NAdam).

    Returns:
        The corresponding `GradientTransformation`. `apply` is one fused kernel per dtype, unless one of the last three
        arguments is given.

    Raises:
        ValueError: a number is out of range, or `mu_dtype` is not a dtype of floating point.

    Example:
        >>> tx = adam(0.1)
        >>> tx.update([torch.ones(1)], tx.init([torch.zeros(1)]))[0]
        [tensor([-0.1000])]

    References:
        Kingma & Ba, Adam: A Method for Stochastic Optimization, 2014, https://arxiv.org/abs/1412.6980
    """
    check_rate("adam", learning_rate)
    moments = scale_by_adam(b1, b2, eps, eps_root, mu_dtype, nesterov=nesterov)
    pure = chain(moments, scale_by_learning_rate(learning_rate))
    if not _is_plain(eps_root, mu_dtype, nesterov):
        return pure
    return _fused_rule(pure, 2, learning_rate, b1, b2, eps, 0.0, None)


@explains_keywords(**MEANT)
def adamw(
    learning_rate: base.LearningRate,
    b1: base.Number = 0.9,
    b2: base.Number = 0.999,
    eps: base.Number = 1e-8,
    weight_decay: base.Number = 0.01,
    mask: base.Mask = None,
    *,
    eps_root: base.Number = 0.0,
    mu_dtype: torch.dtype | None = None,
    nesterov: bool = False,
) -> base.GradientTransformation:
    """Adam with decoupled decay: `p = p - lr * (mu_hat / (sqrt(nu_hat) + eps) + weight_decay * p)`.

    The names are optax's. The default of `weight_decay` is torch's 0.01 (optax has 0.0001), so that a script for
    `torch.optim.AdamW` trains as before. The last three arguments are keywords only. Optax also takes `eps_root` and
    `mu_dtype` by position, before `weight_decay`.

    Args:
        learning_rate: a number >= 0, or a schedule.
        b1: rate of the mean, in [0, 1).
        b2: rate of the squares, in [0, 1).
        eps: constant outside the root, >= 0.
        weight_decay: factor of the decay, >= 0. It is multiplied by the learning rate.
        mask: leaves that decay: a tree (or prefix) of bools, or a function from params to such a tree. None: all.
        eps_root: constant inside the root, >= 0.
        mu_dtype: dtype of the stored mean. None: dtype of the parameters.
        nesterov: whether the mean looks one step ahead. See `nadamw`.

    Returns:
        The corresponding `GradientTransformation`. `apply` is one fused kernel per dtype and mask value, unless one of
        the last three arguments is given.

    Raises:
        ValueError: a number is out of range, or `mu_dtype` is not a dtype of floating point, or (on use) the mask or
            the state does not match the params.

    Example:
        >>> tx = adamw(0.1, mask=lambda params: {"w": True, "b": False})
        >>> params = {"w": torch.ones(1), "b": torch.ones(1)}
        >>> grads = {"w": torch.zeros(1), "b": torch.zeros(1)}
        >>> tx.apply(grads, tx.init(params), params)[0]
        {'w': tensor([0.9990]), 'b': tensor([1.])}

    References:
        Loshchilov & Hutter, Decoupled Weight Decay Regularization, 2017, https://arxiv.org/abs/1711.05101
    """
    check_rate("adamw", learning_rate)
    decay = add_decayed_weights(weight_decay, mask)
    moments = scale_by_adam(b1, b2, eps, eps_root, mu_dtype, nesterov=nesterov)
    pure = chain(moments, decay, scale_by_learning_rate(learning_rate))
    if not _is_plain(eps_root, mu_dtype, nesterov):
        return pure
    tx = _fused_rule(pure, 3, learning_rate, b1, b2, eps, weight_decay, mask)

    def decide_decay(params: base.Params) -> base.GradientTransformation:
        return adamw(learning_rate, b1, b2, eps, weight_decay, resolve_prefix(mask, params, bool, "mask"))

    return tx._replace(needs=base.Needs("element", resolve_masks=decide_decay))


@explains_keywords(**MEANT)
def nadamw(
    learning_rate: base.LearningRate,
    b1: base.Number = 0.9,
    b2: base.Number = 0.999,
    eps: base.Number = 1e-8,
    eps_root: base.Number = 0.0,
    mu_dtype: torch.dtype | None = None,
    weight_decay: base.Number = 1e-4,
    mask: base.Mask = None,
) -> base.GradientTransformation:
    """AdamW with Nesterov's momentum: `adamw(..., nesterov=True)`, with optax's order of arguments and default decay.

    `torch.optim.NAdam` differs: there `b1` changes from step to step, and weights do not decay by default.

    Args:
        learning_rate: a number >= 0, or a schedule.
        b1: rate of the mean, in [0, 1).
        b2: rate of the squares, in [0, 1).
        eps: constant outside the root, >= 0.
        eps_root: constant inside the root, >= 0.
        mu_dtype: dtype of the stored mean. None: dtype of the parameters.
        weight_decay: factor of the decay, >= 0. It is multiplied by the learning rate.
        mask: leaves that decay: a tree (or prefix) of bools, or a function from params to such a tree. None: all.

    Returns:
        The corresponding `GradientTransformation`.

    Raises:
        ValueError: a number is out of range, or `mu_dtype` is not a dtype of floating point, or (on use) the mask or
            the state does not match the params.

    Example:
        >>> tx = nadamw(0.1, weight_decay=0.0)
        >>> tx.update([torch.ones(1)], tx.init([torch.zeros(1)]), [torch.zeros(1)])[0]
        [tensor([-0.1474])]

    References:
        Dozat, Incorporating Nesterov Momentum into Adam, 2016, https://openreview.net/pdf?id=OM0jvwB8jIp57ZJjtNEZ
    """
    more = {"eps_root": eps_root, "mu_dtype": mu_dtype, "nesterov": True}
    return adamw(learning_rate, b1, b2, eps, weight_decay, mask, **more)


def _is_plain(eps_root: base.Number, mu_dtype: torch.dtype | None, nesterov: bool) -> bool:
    """Returns whether torch's fused kernel computes the rule."""
    return is_zero(eps_root) and mu_dtype is None and not nesterov


def _leaf_direction(
    g: Tensor,
    mu: Tensor,
    nu: Tensor,
    b1: base.Number,
    b2: base.Number,
    eps: base.Number,
    eps_root: base.Number,
    c1: Tensor,
    c2: Tensor,
    ahead: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the update of a leaf, and the next moments in the stored dtypes."""
    kept, dtype = mu.dtype, nu.dtype
    mu, nu = moments(g, mu, nu, b1, b2)
    u = corrected_mean(g, mu, b1, c1, ahead) / (corrected_root(nu, c2, eps_root) + eps)
    return u.to(dtype), mu.to(kept), nu.to(dtype)


def moments(g: Tensor, mu: Tensor, nu: Tensor, b1: base.Number, b2: base.Number) -> tuple[Tensor, Tensor]:
    """Returns the next moments, in the dtype of the arithmetic."""
    dtype = wide(nu).dtype
    g = g.to(dtype)
    return b1 * mu.to(dtype) + (1 - b1) * g, b2 * nu.to(dtype) + (1 - b2) * g.square()


def corrected_mean(g: Tensor, mu: Tensor, b1: base.Number, c1: Tensor, ahead: Tensor | None) -> Tensor:
    """Returns `mu` without bias, or Nesterov's mean if `ahead`, the correction of the next step, is given."""
    if ahead is None:
        return mu / c1
    return b1 * (mu / ahead) + (1 - b1) * (g.to(mu.dtype) / c1)


def corrected_root(nu: Tensor, c2: Tensor, eps_root: base.Number) -> Tensor:
    """Returns the root of `nu` without bias."""
    return safe_root(nu / c2 if is_zero(eps_root) else nu / c2 + eps_root)


def bias_corrections(
    count: Int[Tensor, ""], b1: base.Number, b2: base.Number
) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
    """Returns `1 - b1^t` and `1 - b2^t` in float64. In float32, `1 - b2^t` loses four digits at t = 1."""
    t = count.double()
    wide = [b.double().to(t.device) if isinstance(b, Tensor) else float(b) for b in (b1, b2)]
    return 1 - torch.pow(wide[0], t), 1 - torch.pow(wide[1], t)


def moments_like(
    state: base.OptState, leaves: list[Tensor], treedef: Any, like: str
) -> tuple[list[Tensor], list[Tensor]]:
    """Returns the leaves of `state.mu` and `state.nu`, which must match the tree of parameters or gradients."""
    mus = leaves_like(state.mu, treedef, "state.mu", like)
    nus = leaves_like(state.nu, treedef, "state.nu", like)
    check_shapes(treedef, leaves, mu=mus, nu=nus)
    return mus, nus


def _fused_rule(
    pure: base.GradientTransformation,
    num: int,
    learning_rate: base.LearningRate,
    b1: base.Number,
    b2: base.Number,
    eps: base.Number,
    weight_decay: base.Number,
    mask: base.Mask,
) -> base.GradientTransformation:
    def advance(state: base.OptState) -> tuple[Tensor, Any]:
        # The rule's counter and the rate's counter: each rule of the chain has a counter, advanced once a step.
        return state[0].count.add_(1).float(), next_rate(learning_rate, state[-1])

    def step_leaves(columns: Columns, decays: bool, device: torch.device, numbers: tuple[Tensor, Any]) -> None:
        step, lr = numbers
        for p, mu, nu, g in pad_for_fused(columns):
            fused_adamw_(
                p, g, mu, nu, [], [step.to(device)] * len(p), lr=on_device(lr, device), beta1=as_number(b1),
                beta2=as_number(b2), weight_decay=as_number(weight_decay) if decays else 0.0, eps=as_number(eps),
                amsgrad=False, maximize=False,
            )  # fmt: skip

    apply_fn = fused(
        "adam", step_leaves, advance, num=num, kind=ScaleByAdamState, fields=("mu", "nu"),
        flags=decay_flags(weight_decay, mask), narrow=True,
    )  # fmt: skip
    return base.GradientTransformation(pure.init, pure.update, apply_fn, base.Needs("element"))
