"""Sophia: momentum divided by an estimate of the Hessian's diagonal, with a bound for each element."""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor

from shardfn import core
from shardfn.collectives import local

from . import _base as base
from ._adam import bias_corrections, moments_like
from ._chain import chain
from ._checks import MEANT, check_decay_rate, check_not_negative, check_num_steps, check_positive
from ._decide import resolve_prefix
from ._elementwise import vary_number
from ._learning_rate import add_decayed_weights, check_rate, scale_by_learning_rate
from ._leaves import check_params, check_state, leaves_like, wide, zero_count, zeros_like


class SophiaState(NamedTuple):
    """State of `sophia`.

    Attributes:
        count: int32, 0-d: steps that moved the parameters.
        hessian: int32, 0-d: 1 if the next gradient is for the estimate of the Hessian. Else 0.
        mu: tree like params: mean of the gradients.
        nu: tree like params: mean of the estimates of the Hessian's diagonal.
        rest: state of decay and learning rate.
    """

    count: Int[Tensor, ""]  # pyright: ignore[reportIncompatibleMethodOverride]  # optax's name
    hessian: Int[Tensor, ""]
    mu: core.PyTree
    nu: core.PyTree
    rest: base.OptState


@core.explains_keywords(**MEANT)
def sophia(
    learning_rate: base.LearningRate,
    b1: float = 0.965,
    b2: float = 0.99,
    eps: float = 1e-8,
    weight_decay: float = 1e-4,
    mask: base.Mask = None,
    *,
    gamma: float = 0.01,
    clip_threshold: float = 1.0,
    update_interval: int = 10,
    num_samples: int = 1,
) -> base.GradientTransformation:
    """Sophia-G: a clipped, diagonal Newton step, with the Hessian estimated by gradients of sampled labels.

        m = b1 m + (1 - b1) g;   u = clip(m / (1 - b1^t) / max(gamma h, eps), clip_threshold)
        p = p - lr (u + weight_decay p)

    After the first step, and then after each `update_interval` steps, a further gradient is for the estimate: of the
    same loss with labels that are drawn from the model's own distribution (Gauss-Newton-Bartlett). This gradient moves
    no parameter:

        h = b2 h + (1 - b2) num_samples g_sampled^2

    Both losses are steps with the same optimizer and the same state, so no part of a step knows of Sophia:
    `sf.switch_step(step, sampled_step)` makes the step of a batch, and before it the other where one is due.

    States are elementwise: every ZeRO stage and memory is possible. The names and defaults are optax's, except for
    `num_samples`.

    Args:
        learning_rate: a number >= 0, or a schedule.
        b1: rate of the mean, in [0, 1).
        b2: rate of the estimates, in [0, 1).
        eps: smallest denominator, > 0.
        weight_decay: factor of the decay, >= 0. It is multiplied by the learning rate.
        mask: leaves that decay: a tree (or prefix) of bools, or a function from params to such a tree. None: all.
        gamma: factor of the estimate, > 0. Larger values clip fewer elements.
        clip_threshold: bound of each element of u, > 0.
        update_interval: steps between two estimates.
        num_samples: number of sampled labels whose mean is the sampled loss, for example tokens in the global batch.

    Returns:
        The corresponding `GradientTransformation`, with a `SophiaState` as state.

    Raises:
        ValueError: a number is out of range, or (on use) the mask or the state does not match the params.

    Example:
        >>> tx, w = sophia(0.1, weight_decay=0.0), [torch.zeros(1)]
        >>> state = tx.update([torch.ones(1)], tx.init(w), w)[1]
        >>> is_hessian_step(state)
        True
        >>> updates, state = tx.update([torch.tensor([4.0])], state, w)
        >>> updates, state.nu
        ([tensor([0.])], [tensor([0.1600])])

    References:
        Liu et al., Sophia: A Scalable Stochastic Second-order Optimizer for Language Model Pre-training, 2023,
        https://arxiv.org/abs/2305.14342
    """
    check_rate("sophia", learning_rate)
    check_decay_rate("sophia", b1=b1, b2=b2)
    check_not_negative("sophia", weight_decay=weight_decay)
    check_positive("sophia", eps=eps, gamma=gamma, clip_threshold=clip_threshold)
    check_num_steps("sophia", update_interval=update_interval, num_samples=num_samples)
    numbers = _SophiaNumbers(b1, b2, eps, gamma, clip_threshold, update_interval, num_samples)
    return _Sophia(learning_rate, weight_decay, mask, numbers).rule()


def is_hessian_step(opt_state: base.OptState) -> bool:
    """Returns whether the next gradient of `sophia` is for the estimate of the Hessian. Reads the state on the host.

    Raises:
        ValueError: the state is not the state of `sophia`.

    Example:
        >>> is_hessian_step(sophia(0.1).init([torch.zeros(2)]))
        False
    """
    check_state("is_hessian_step", opt_state, SophiaState)
    return bool(local(opt_state.hessian))


class _SophiaNumbers(NamedTuple):
    b1: float
    b2: float
    eps: float
    gamma: float
    clip: float
    interval: int
    num: int


@dataclass(frozen=True)
class _Sophia:
    learning_rate: base.LearningRate
    weight_decay: float
    mask: base.Mask
    numbers: _SophiaNumbers

    def rule(self) -> base.GradientTransformation:
        """Returns the optimizer as a `GradientTransformation`."""
        decide = self.decide if callable(self.mask) or self.mask is not None else None
        return base.GradientTransformation(self.init, self.update, needs=base.Needs("element", resolve_masks=decide))

    def decide(self, params: base.Params) -> base.GradientTransformation:
        return replace(self, mask=resolve_prefix(self.mask, params, bool, "mask")).rule()

    @property
    def rest(self) -> base.GradientTransformation:
        """Returns decay and learning rate."""
        return chain(add_decayed_weights(self.weight_decay, self.mask), scale_by_learning_rate(self.learning_rate))

    def init(self, params: base.Params) -> SophiaState:
        count = zero_count(params)
        return SophiaState(count, count.clone(), zeros_like(params), zeros_like(params), self.rest.init(params))

    def update(
        self, updates: base.Updates, state: base.OptState, params: base.Params = None, *, specs: base.Specs = None
    ) -> tuple[base.Updates, base.OptState]:
        check_params("sophia", params)
        check_state("sophia", state, SophiaState)
        by, (ps, treedef) = self.numbers, core.tree_flatten(params)
        gs = leaves_like(updates, treedef, "updates", "params")
        mus, nus = moments_like(state, ps, treedef, "params")
        estimates = state.hessian > 0
        count = state.count + 1
        c1 = bias_corrections(count, by.b1, by.b2)[0]
        on = vary_number(ps, estimates, params, specs)
        rows = [_step_leaf(*row, c1, by) for row in zip(gs, mus, nus, on, strict=True)]
        us, mus, nus = (core.tree_unflatten(treedef, [row[k] for row in rows]) for k in range(3))
        us, rest = self.rest.update(us, state.rest, params, specs=specs)
        us = [
            torch.where(e, 0.0, u).to(u.dtype) for u, e in zip(leaves_like(us, treedef, "u", "params"), on, strict=True)
        ]
        rest = core.tree_map(lambda new, old: torch.where(estimates.to(new.device), old, new), rest, state.rest)
        due = ~estimates & (state.count % by.interval == 0)
        after = SophiaState(torch.where(estimates, state.count, count), due.to(torch.int32), mus, nus, rest)
        return core.tree_unflatten(treedef, us), after


def _step_leaf(
    g: Tensor, mu: Tensor, nu: Tensor, estimates: Any, c1: Tensor, by: _SophiaNumbers
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the direction of a leaf, and the next moments. One of the moments stays."""
    kept, dtype = mu.dtype, wide(mu).dtype
    g, mu, nu = (x.to(dtype) for x in (g, mu, nu))
    mean = by.b1 * mu + (1 - by.b1) * g
    u = (mean / c1 / (by.gamma * nu).clamp(min=by.eps)).clamp(-by.clip, by.clip)
    square = by.b2 * nu + (1 - by.b2) * by.num * g.square()
    return u.to(kept), torch.where(estimates, mu, mean).to(kept), torch.where(estimates, square, nu).to(kept)
