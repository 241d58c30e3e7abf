"""RMSProp and Adagrad: the gradient over the root of its mean, or summed, square."""

from typing import Any, NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor

from shardfn.core import PyTree, explains_keywords

from . import _base as base
from ._adam import bias_corrections
from ._chain import chain
from ._checks import MEANT, check_decay_rate, check_not_negative
from ._elementwise import elementwise, fill_zeros, is_zero, keep_zeros, safe_root
from ._learning_rate import check_rate, scale_by_learning_rate
from ._leaves import wide
from ._momentum import trace


class ScaleByRmsState(NamedTuple):
    """Moments of RMSProp.

    Attributes:
        nu: tree like params: mean of the squares of the gradients.
        mu: tree like params: mean of the gradients. `()` unless the rule is centered.
        count: int32, 0-d: steps taken. `()` unless the rule corrects the bias of the moments.
    """

    nu: PyTree
    mu: PyTree = ()
    count: Int[Tensor, ""] | tuple[()] = ()  # pyright: ignore[reportIncompatibleMethodOverride]  # optax's name


class ScaleByRssState(NamedTuple):
    """Sums of Adagrad.

    Attributes:
        sum_of_squares: tree like params: of the gradients of all steps.
    """

    sum_of_squares: PyTree


def scale_by_rms(
    decay: base.Number = 0.9,
    eps: base.Number = 1e-8,
    initial_scale: base.Number = 0.0,
    eps_in_sqrt: bool = True,
    bias_correction: bool = False,
) -> base.GradientTransformation:
    """Divides the gradient by the root mean square: `nu = decay nu + (1 - decay) g^2; u = g / sqrt(nu + eps)`.

    Args:
        decay: rate of the squares, in [0, 1).
        eps: constant in the denominator, >= 0.
        initial_scale: the first value of `nu`, >= 0.
        eps_in_sqrt: whether `eps` is added inside the root. If not, `u = g / (sqrt(nu) + eps)`, as in torch.
        bias_correction: whether `nu` is divided by `1 - decay^t`.

    Returns:
        The corresponding `GradientTransformation`, with a `ScaleByRmsState` as state.

    Raises:
        ValueError: a number is out of range.

    Example:
        >>> tx = scale_by_rms(decay=0.75)
        >>> tx.update([torch.tensor([4.0])], tx.init([torch.zeros(1)]))[0]
        [tensor([2.])]

    References:
        Hinton et al., Overview of mini-batch gradient descent, 2012,
        https://www.cs.toronto.edu/~tijmen/csc321/slides/lecture_slides_lec6.pdf
    """
    return _scale_by_moments("scale_by_rms", decay, eps, initial_scale, eps_in_sqrt, bias_correction, centered=False)


def scale_by_stddev(
    decay: base.Number = 0.9,
    eps: base.Number = 1e-8,
    initial_scale: base.Number = 0.0,
    eps_in_sqrt: bool = True,
    bias_correction: bool = False,
) -> base.GradientTransformation:
    """Divides the gradient by the standard deviation: `u = g / sqrt(nu - mu^2 + eps)`.

    The moments are `mu = decay mu + (1 - decay) g` and `nu = decay nu + (1 - decay) g^2`. A `nu - mu^2` that is
    negative by rounding counts as 0.

    Args:
        decay: rate of both moments, in [0, 1).
        eps: constant in the denominator, >= 0.
        initial_scale: the first value of `nu`, >= 0.
        eps_in_sqrt: whether `eps` is added inside the root. If not, `eps` is added to the root, as in torch.
        bias_correction: whether the moments are divided by `1 - decay^t`.

    Returns:
        The corresponding `GradientTransformation`, with a `ScaleByRmsState` as state.

    Raises:
        ValueError: a number is out of range.

    Example:
        >>> tx = scale_by_stddev(decay=0.5)
        >>> tx.update([torch.tensor([4.0])], tx.init([torch.zeros(1)]))[0]
        [tensor([2.])]

    References:
        Graves, Generating Sequences With Recurrent Neural Networks, 2013, https://arxiv.org/abs/1308.0850
    """
    return _scale_by_moments("scale_by_stddev", decay, eps, initial_scale, eps_in_sqrt, bias_correction, centered=True)


def _scale_by_moments(
    who: str,
    decay: base.Number,
    eps: base.Number,
    initial_scale: base.Number,
    eps_in_sqrt: bool,
    corrects: bool,
    centered: bool,
) -> base.GradientTransformation:
    check_decay_rate(who, decay=decay)
    check_not_negative(who, eps=eps, initial_scale=initial_scale)

    def bias_correction_at(count: Any) -> dict[str, Any]:
        c = bias_corrections(count, decay, decay)[0] if corrects else 1.0
        return {"decay": decay, "eps": eps, "c": c}

    def scale_leaf(
        g: Tensor, nu: Tensor, decay: base.Number, eps: base.Number, c: Any, mu: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        dtype = nu.dtype
        g, nu = g.to(wide(nu).dtype), wide(nu)
        new, rest = decay * nu + (1 - decay) * g.square(), []
        square = new / c
        if mu is not None:
            mean = decay * wide(mu) + (1 - decay) * g
            square, rest = (square - (mean / c).square()).clamp(min=0), [mean.to(dtype)]
        below = safe_root(square + eps) if eps_in_sqrt else safe_root(square) + eps
        return ((g / below).to(dtype), new.to(dtype), *rest)

    init_fns = {"nu": fill_zeros(initial_scale)} | ({"mu": keep_zeros} if centered else {})
    return elementwise(who, ScaleByRmsState, scale_leaf, init_fns, bias_correction_at, corrects)


@explains_keywords(**MEANT)
def rmsprop(
    learning_rate: base.LearningRate,
    decay: base.Number = 0.9,
    eps: base.Number = 1e-8,
    initial_scale: base.Number = 0.0,
    eps_in_sqrt: bool = True,
    centered: bool = False,
    momentum: base.Number | None = None,
    nesterov: bool = False,
    bias_correction: bool = False,
) -> base.GradientTransformation:
    """RMSProp: `t = -lr * g / sqrt(nu + eps) + momentum * t; p = p + t`. See `scale_by_rms`.

    The defaults are optax's. `rmsprop(lr, 0.99, eps_in_sqrt=False)` takes the steps of `torch.optim.RMSprop(lr=lr)`.

    Args:
        learning_rate: a number >= 0, or a schedule.
        decay: rate of the squares, in [0, 1).
        eps: constant in the denominator, >= 0.
        initial_scale: the first value of `nu`, >= 0.
        eps_in_sqrt: whether `eps` is added inside the root.
        centered: whether the gradient is divided by the standard deviation. See `scale_by_stddev`.
        momentum: momentum in [0, 1). None keeps no trace.
        nesterov: whether the trace looks one step ahead. Needs momentum.
        bias_correction: whether the moments are divided by `1 - decay^t`.

    Returns:
        The corresponding `GradientTransformation`.

    Raises:
        ValueError: a number is out of range, or `nesterov` is given without momentum.

    Example:
        >>> tx = rmsprop(0.1, decay=0.75)
        >>> tx.update([torch.ones(1)], tx.init([torch.zeros(1)]))[0]
        [tensor([-0.2000])]

    References:
        Hinton et al., Overview of mini-batch gradient descent, 2012,
        https://www.cs.toronto.edu/~tijmen/csc321/slides/lecture_slides_lec6.pdf
    """
    check_rate("rmsprop", learning_rate)
    if nesterov and is_zero(momentum):
        raise ValueError(f"rmsprop: nesterov=True has no effect with momentum={momentum!r}. Give a momentum > 0.")
    scale = scale_by_stddev if centered else scale_by_rms
    rules = [scale(decay, eps, initial_scale, eps_in_sqrt, bias_correction), scale_by_learning_rate(learning_rate)]
    return chain(*rules, *([] if momentum is None else [trace(momentum, nesterov)]))


def scale_by_rss(initial_accumulator_value: base.Number = 0.1, eps: base.Number = 1e-7) -> base.GradientTransformation:
    """Divides by the root of the sum of squared gradients: `s = s + g^2; u = g / sqrt(s + eps)`, 0 where s is 0.

    Args:
        initial_accumulator_value: the first value of s, >= 0.
        eps: constant inside the root, >= 0.

    Returns:
        The corresponding `GradientTransformation`, with a `ScaleByRssState` as state.

    Raises:
        ValueError: a number is out of range.

    Example:
        >>> tx = scale_by_rss(0.0)
        >>> tx.update([torch.tensor([4.0])], tx.init([torch.zeros(1)]))[0]
        [tensor([1.])]

    References:
        Duchi et al., Adaptive Subgradient Methods for Online Learning and Stochastic Optimization, 2011,
        https://jmlr.org/papers/v12/duchi11a.html
    """
    check_not_negative("scale_by_rss", initial_accumulator_value=initial_accumulator_value, eps=eps)

    def scale_leaf(g: Tensor, sum_of_squares: Tensor, eps: base.Number) -> tuple[Tensor, Tensor]:
        dtype = sum_of_squares.dtype
        g = g.to(wide(sum_of_squares).dtype)
        new = wide(sum_of_squares) + g.square()
        u = g / safe_root(torch.where(new > 0, new + eps, 1.0))  # where s is 0, g is 0 too
        return u.to(dtype), new.to(dtype)

    init_fns = {"sum_of_squares": fill_zeros(initial_accumulator_value)}
    return elementwise("scale_by_rss", ScaleByRssState, scale_leaf, init_fns, lambda count: {"eps": eps}, counts=False)


@explains_keywords(**MEANT)
def adagrad(
    learning_rate: base.LearningRate, initial_accumulator_value: base.Number = 0.1, eps: base.Number = 1e-7
) -> base.GradientTransformation:
    """Adagrad: `s = s + g^2; p = p - lr * g / sqrt(s + eps)`. See `scale_by_rss`.

    The defaults are optax's. Torch's Adagrad begins with s = 0, and adds eps outside the root.

    Args:
        learning_rate: a number >= 0, or a schedule.
        initial_accumulator_value: the first value of s, >= 0.
        eps: constant inside the root, >= 0.

    Returns:
        The corresponding `GradientTransformation`.

    Raises:
        ValueError: a number is out of range.

    Example:
        >>> tx = adagrad(0.1, initial_accumulator_value=3.0)
        >>> tx.update([torch.ones(1)], tx.init([torch.zeros(1)]))[0]
        [tensor([-0.0500])]

    References:
        Duchi et al., Adaptive Subgradient Methods for Online Learning and Stochastic Optimization, 2011,
        https://jmlr.org/papers/v12/duchi11a.html
    """
    check_rate("adagrad", learning_rate)
    return chain(scale_by_rss(initial_accumulator_value, eps), scale_by_learning_rate(learning_rate))
