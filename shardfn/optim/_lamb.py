"""LAMB: Adam's direction, with each leaf scaled by the ratio of the norms of parameter and update."""

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from shardfn import core
from shardfn._torch import foreach_add_, foreach_addcmul_, foreach_copy_, foreach_div, foreach_mul_, foreach_sqrt

from . import _base as base
from ._adam import bias_corrections, moments, moments_like, scale_by_adam
from ._chain import chain, check_chain
from ._checks import MEANT, check_decay_rate, check_not_negative
from ._decide import resolve_prefix
from ._elementwise import as_number, is_zero, map_leaves, safe_root
from ._learning_rate import add_decayed_weights, check_rate, decay_flags, next_rate, scale_by_learning_rate
from ._leaves import (
    check_shapes,
    check_state,
    is_any,
    leaves_like,
    spec_leaves,
    split_columns,
    stage_columns,
    unstage_columns,
    zero_count,
    zeros_like,
)
from ._trust_ratio import scale_by_trust_ratio, trust_ratios


class ScaleByMomentRatioState(NamedTuple):
    """Moments.

    Attributes:
        mu: tree like params: mean of the gradients.
        nu: tree like params: mean of the squared gradients.
    """

    mu: core.PyTree
    nu: core.PyTree


class ScaleByBiasCorrectionState(NamedTuple):
    """Number of steps that the moments average over.

    Attributes:
        count: int32, 0-d: steps taken.
    """

    count: Int[Tensor, ""]  # pyright: ignore[reportIncompatibleMethodOverride]  # optax's name


def scale_by_moment_ratio(
    b1: base.Number = 0.9, b2: base.Number = 0.999, eps: base.Number = 1e-8
) -> base.GradientTransformation:
    """Adam's direction before bias correction: `u = mu / (sqrt(nu) + eps)`.

    Args:
        b1: rate of the mean, in [0, 1).
        b2: rate of the squares, in [0, 1).
        eps: constant outside the root, >= 0.

    Returns:
        The corresponding `GradientTransformation`, with a `ScaleByMomentRatioState` as state.

    Raises:
        ValueError: a number is out of range.

    Example:
        >>> tx = scale_by_moment_ratio(0.5, 0.75)
        >>> tx.update([torch.tensor([4.0])], tx.init([torch.zeros(1)]))[0]
        [tensor([1.])]
    """
    check_decay_rate("scale_by_moment_ratio", b1=b1, b2=b2)
    check_not_negative("scale_by_moment_ratio", eps=eps)

    def init_fn(params: base.Params) -> ScaleByMomentRatioState:
        return ScaleByMomentRatioState(zeros_like(params), zeros_like(params))

    def update_fn(
        updates: base.Updates, state: base.OptState, params: base.Params = None, *, specs: base.Specs = None
    ) -> tuple[base.Updates, base.OptState]:
        del params
        check_state("scale_by_moment_ratio", state, ScaleByMomentRatioState)
        us, mu, nu = map_leaves(
            _leaf_direction, 3, updates, of={"mu": state.mu, "nu": state.nu}, specs=specs, b1=b1, b2=b2, eps=eps
        )
        return us, ScaleByMomentRatioState(mu, nu)

    return base.GradientTransformation(init_fn, update_fn, needs=base.Needs("element", ascends=True))


def scale_by_bias_correction(b1: base.Number = 0.9, b2: base.Number = 0.999) -> base.GradientTransformation:
    """Adam's two corrections as one factor: `u = g * sqrt(1 - b2^t) / (1 - b1^t)`.

    Args:
        b1: rate of the mean, in [0, 1).
        b2: rate of the squares, in [0, 1).

    Returns:
        The corresponding `GradientTransformation`, with a count of steps as state.

    Raises:
        ValueError: a rate is outside [0, 1).

    Example:
        >>> tx = scale_by_bias_correction(0.5, 0.75)
        >>> tx.update([torch.ones(1)], tx.init([torch.zeros(1)]))[0]
        [tensor([1.])]
    """
    check_decay_rate("scale_by_bias_correction", b1=b1, b2=b2)

    def init_fn(params: base.Params) -> ScaleByBiasCorrectionState:
        return ScaleByBiasCorrectionState(zero_count(params))

    def update_fn(
        updates: base.Updates, state: base.OptState, params: base.Params = None, *, specs: base.Specs = None
    ) -> tuple[base.Updates, base.OptState]:
        del params
        check_state("scale_by_bias_correction", state, ScaleByBiasCorrectionState)
        count = state.count + 1
        by = bias_factor(count, b1, b2)
        [us] = map_leaves(lambda g, by: ((g * by).to(g.dtype),), 1, updates, of={}, specs=specs, by=by)
        return us, ScaleByBiasCorrectionState(count)

    return base.GradientTransformation(init_fn, update_fn, needs=base.Needs("element", ascends=True))


@core.explains_keywords(**MEANT)
def lamb(
    learning_rate: base.LearningRate,
    b1: base.Number = 0.9,
    b2: base.Number = 0.999,
    eps: base.Number = 1e-8,
    weight_decay: base.Number = 0.0,
    mask: base.Mask = None,
    *,
    eps_root: base.Number = 0.0,
    min_coeff: float | int = 0.01,
    max_coeff: float | int = 10.0,
    bias_correction: Literal["step", "moments"] = "step",
) -> base.GradientTransformation:
    """LAMB: `u = mu / (sqrt(nu) + eps) + weight_decay * p`, `p = p - lr * sqrt(1 - b2^t) / (1 - b1^t) * c * u`.

    The trust ratio c is computed as by `scale_by_trust_ratio`. As in the common fused kernels, bias correction scales
    the whole step, including decay. The paper corrects the moments inside u, as does `bias_correction="moments"`. The
    rule of `optax.lamb(lr)` is `lamb(lr, eps=1e-6, bias_correction="moments", min_coeff=0.0, max_coeff=math.inf)`.

    Args:
        learning_rate: a number >= 0, or a schedule.
        b1: rate of the mean, in [0, 1).
        b2: rate of the squares, in [0, 1).
        eps: constant outside the root, >= 0.
        weight_decay: factor of the decay inside u, >= 0.
        mask: leaves that decay: a tree (or prefix) of bools, or a function from params to such a tree. None: all.
        eps_root: constant inside the root, >= 0. Only with `bias_correction="moments"`.
        min_coeff: lower bound of the trust ratio.
        max_coeff: upper bound of the trust ratio, possibly infinite.
        bias_correction: "step" corrects the whole step by a factor. "moments" corrects each moment, before the trust
            ratio.

    Returns:
        The corresponding `GradientTransformation`.

    Raises:
        ValueError: a number is out of range, or `eps_root` would have no effect, or (on use) the mask or the state does
            not match the params.

    Example:
        >>> tx = lamb(0.1)
        >>> tx.update([torch.ones(1)], tx.init([torch.ones(1)]), [torch.ones(1)])[0]
        [tensor([-0.0316])]

    References:
        You et al., Large Batch Optimization for Deep Learning: Training BERT in 76 minutes, 2019,
        https://arxiv.org/abs/1904.00962
    """
    check_rate("lamb", learning_rate)
    _check_correction(bias_correction, eps_root)
    if bias_correction == "moments":
        direction, decay = scale_by_adam(b1, b2, eps, eps_root), add_decayed_weights(weight_decay, mask)
        trust = scale_by_trust_ratio(min_coeff, max_coeff)
        return chain(direction, decay, trust, scale_by_learning_rate(learning_rate))
    pure = chain(
        scale_by_moment_ratio(b1, b2, eps),
        add_decayed_weights(weight_decay, mask),
        scale_by_trust_ratio(min_coeff, max_coeff),
        scale_by_bias_correction(b1, b2),
        scale_by_learning_rate(learning_rate),
    )
    step = lamb_in_place(learning_rate, b1, b2, eps, weight_decay, mask, min_coeff, max_coeff)

    def apply_fn(
        grads: base.Updates, state: base.OptState, params: base.Params, *, specs: base.Specs = None
    ) -> tuple[base.Params, base.OptState]:
        return step(grads, state, params, specs=specs)[:2]

    def decide_decay(params: base.Params) -> base.GradientTransformation:
        on = resolve_prefix(mask, params, bool, "mask")
        return lamb(learning_rate, b1, b2, eps, weight_decay, on, min_coeff=min_coeff, max_coeff=max_coeff)

    return base.GradientTransformation(pure.init, pure.update, apply_fn, base.Needs("leaf", resolve_masks=decide_decay))


def _check_correction(bias_correction: str, eps_root: base.Number) -> None:
    if bias_correction not in ("step", "moments"):
        raise ValueError(f'lamb: bias_correction={bias_correction!r} must be "step" or "moments".')
    if bias_correction == "step" and not is_zero(eps_root):
        raise ValueError(f'lamb: eps_root={eps_root!r} has no effect without bias_correction="moments".')


@core.explains_keywords(**MEANT)
def lamb_in_place(
    learning_rate: base.LearningRate,
    b1: base.Number,
    b2: base.Number,
    eps: base.Number,
    weight_decay: base.Number,
    mask: base.Mask,
    min_coeff: float | int,
    max_coeff: float | int,
    corrected: bool = True,
) -> Callable[..., tuple[base.Params, base.OptState, Float[Tensor, " num_leaves"]]]:
    """Returns an `apply` of `lamb` that also returns trust ratios.

    Without correction the chain has one rule less.
    """
    flags = decay_flags(weight_decay, mask)

    @torch.no_grad()
    def apply_fn(grads: base.Updates, state: base.OptState, params: base.Params, *, specs: base.Specs = None) -> Any:
        check_chain("lamb", state, 5 if corrected else 4)
        check_state("lamb", state[0], ScaleByMomentRatioState)
        ps, treedef = core.tree_flatten(params)
        gs = leaves_like(grads, treedef, "grads", "params")
        check_shapes(treedef, ps, grads=gs)
        (p, mu, nu, g), copies = stage_columns([ps, *moments_like(state[0], ps, treedef, "params"), gs], widen=is_any)
        on = flags(params, ps, treedef, specs)
        # Counters advance here: the correction and the rate each have a counter.
        rate = next_rate(learning_rate, state[-1])
        rate = rate * bias_factor(state[3].count.add_(1), b1, b2) if corrected else rate
        ratios = torch.zeros(0)
        if ps:
            u = _leaf_directions(mu, nu, g, as_number(b1), as_number(b2), as_number(eps))
            _add_decay(u, p, on, as_number(weight_decay))
            leaf_specs = None if specs is None else spec_leaves(specs, params)
            ratios = trust_ratios(p, u, leaf_specs, min_coeff, max_coeff)
            _descend_leaves(p, u, rate, ratios)
        unstage_columns(copies)
        return params, state, ratios

    return apply_fn


def bias_factor(
    count: Int[Tensor, ""], b1: base.Number, b2: base.Number, since: Int[Tensor, ""] | None = None
) -> Float[Tensor, ""]:
    """Returns `sqrt(1 - b2^t) / (1 - b1^t)`. A variance that is frozen since step `since` has that t."""
    c1, c2 = bias_corrections(count, b1, b2)
    c2 = c2 if since is None else bias_corrections(since, b1, b2)[1]
    return c2.sqrt() / c1


def _leaf_direction(
    g: Tensor, mu: Tensor, nu: Tensor, b1: base.Number, b2: base.Number, eps: base.Number
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the update of a leaf, and the next moments in the stored dtype."""
    dtype = mu.dtype
    mu, nu = moments(g, mu, nu, b1, b2)
    return (mu / (safe_root(nu) + eps)).to(dtype), mu.to(dtype), nu.to(dtype)


def _leaf_directions(
    mu: list[Tensor], nu: list[Tensor], g: list[Tensor], b1: float, b2: float, eps: float
) -> list[Tensor]:
    u = [torch.empty_like(x) for x in mu]
    # Piece by piece: the temporaries of a chain of kernels stay in the cache.
    for m, v, d, out in split_columns([mu, nu, g, u]):
        foreach_mul_(m, b1)
        foreach_add_(m, d, alpha=1 - b1)
        foreach_mul_(v, b2)
        foreach_addcmul_(v, d, d, 1 - b2)
        root = foreach_sqrt(v)
        foreach_add_(root, eps)
        foreach_copy_(out, foreach_div(m, root))
    return u


def _add_decay(u: list[Tensor], p: list[Tensor], flags: Sequence[bool], weight_decay: float) -> None:
    decayed = [(x, y) for x, y, on in zip(u, p, flags, strict=True) if on]
    if decayed:
        foreach_add_([x for x, _ in decayed], [y for _, y in decayed], alpha=weight_decay)


def _descend_leaves(p: list[Tensor], u: list[Tensor], rate: Any, ratios: Float[Tensor, " num_leaves"]) -> None:
    rates = (rate * ratios).unbind()
    if ratios.dtype == torch.float64:  # other leaves step independently of float64 leaves
        narrow = (rate * ratios.float()).unbind()
        rates = [r if x.dtype == torch.float64 else n for x, r, n in zip(u, rates, narrow, strict=True)]
    foreach_mul_(u, [-r.to(x.device) for x, r in zip(u, rates, strict=True)])
    foreach_add_(p, u)
