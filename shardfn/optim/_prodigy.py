"""Prodigy: Adam that estimates its learning rate from the distance to the first parameters."""

from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from shardfn import core

from . import _base as base
from ._adam import bias_corrections
from ._checks import MEANT, check_decay_rate, check_not_negative, check_positive
from ._decide import resolve_prefix
from ._elementwise import vary_number
from ._learning_rate import check_rate, decay_flags, evaluate_schedule
from ._leaves import check_params, check_shapes, check_state, leaves_like, spec_leaves, wide, zero_count, zeros_like
from ._norm import dtype_of_squares, over_blocks


class ProdigyState(NamedTuple):
    """State of Prodigy.

    Attributes:
        exp_avg: tree like params: mean of the scaled gradients.
        exp_avg_sq: tree like params: mean of their squares.
        grad_sum: tree like params: weighted sum of the scaled gradients.
        params0: tree like params: first parameters.
        estim_lr: 0-d: estimate of the distance to a solution, used as the learning rate.
        numerator_weighted: 0-d: weighted sum of the products of gradients and distances.
        count: int32, 0-d: steps taken.
    """

    exp_avg: core.PyTree
    exp_avg_sq: core.PyTree
    grad_sum: core.PyTree
    params0: core.PyTree
    estim_lr: Float[Tensor, ""]
    numerator_weighted: Float[Tensor, ""]
    count: Int[Tensor, ""]  # pyright: ignore[reportIncompatibleMethodOverride]  # optax's name


@core.explains_keywords(**MEANT)
def prodigy(
    learning_rate: base.LearningRate = 1.0,
    betas: tuple[float, float] = (0.9, 0.999),
    beta3: float | None = None,
    eps: float = 1e-8,
    estim_lr0: float = 1e-6,
    estim_lr_coef: float = 1.0,
    weight_decay: float = 0.0,
    safeguard_warmup: bool = False,
    mask: base.Mask = None,
) -> base.GradientTransformation:
    """Prodigy: Adam with a learning rate d that is estimated, and only grows.

    With `b1, b2 = betas`, `l = d learning_rate sqrt(1 - b2^t) / (1 - b1^t)` and the first parameters p0,

        r = beta3 r + (d / d0) l <g, p0 - p>;   s = beta3 s + l (d / d0) g
        m = b1 m + (1 - b1) d g;   v = b2 v + (1 - b2) (d g)^2
        d = max(d, estim_lr_coef r / |s|_1);   p = p - l (m / (sqrt(v) + d eps) + weight_decay p)

    The product and the norm are over the whole tree and all ranks, summed over the axes that cut a leaf. So a step
    needs all leaves at once: the state must be on the device. The names and defaults are optax's.

    Args:
        learning_rate: factor of the estimate, >= 0, or a schedule. 1 is usual, with a schedule that decays.
        betas: rates of the mean and of the squares, in [0, 1).
        beta3: rate of r and s, in [0, 1). None: root of the rate of the squares.
        eps: constant outside the root, >= 0.
        estim_lr0: first estimate d0, > 0.
        estim_lr_coef: factor of new estimates, > 0.
        weight_decay: factor of the decoupled decay, >= 0.
        safeguard_warmup: whether s has `d (d / d0) g` in place of `l (d / d0) g`, for schedules with a warm-up.
        mask: leaves that decay: a tree (or prefix) of bools, or a function from params to such a tree. None: all.

    Returns:
        The corresponding `GradientTransformation`, with a `ProdigyState` as state.

    Raises:
        ValueError: a number is out of range, or (on use) the mask or the state does not match the params.

    Example:
        >>> tx, w = prodigy(estim_lr0=0.1), [torch.ones(1)]
        >>> tx.update([torch.ones(1)], tx.init(w), w)[0]
        [tensor([-0.1000])]

    References:
        Mishchenko & Defazio, Prodigy: An Expeditiously Adaptive Parameter-Free Learner, 2023,
        https://arxiv.org/abs/2306.06101
    """
    b1, b2 = betas
    check_rate("prodigy", learning_rate)
    check_decay_rate("prodigy", beta1=b1, beta2=b2, **({} if beta3 is None else {"beta3": beta3}))
    check_not_negative("prodigy", eps=eps, weight_decay=weight_decay)
    check_positive("prodigy", estim_lr0=estim_lr0, estim_lr_coef=estim_lr_coef)
    b3, flags = b2**0.5 if beta3 is None else beta3, decay_flags(weight_decay, mask)

    def init_fn(params: base.Params) -> ProdigyState:
        count = zero_count(params)
        d = torch.full((), estim_lr0, dtype=dtype_of_squares(core.tree_leaves(params)), device=count.device)
        first = core.tree_map(lambda p: p.detach().clone(), params)
        m, v, s = (zeros_like(params) for _ in range(3))
        return ProdigyState(m, v, s, first, d, torch.zeros_like(d), count)

    def update_fn(
        updates: base.Updates, state: base.OptState, params: base.Params = None, *, specs: base.Specs = None
    ) -> tuple[base.Updates, base.OptState]:
        check_params("prodigy", params)
        check_state("prodigy", state, ProdigyState)
        ps, treedef = core.tree_flatten(params)
        gs = leaves_like(updates, treedef, "updates", "params")
        ms, vs, ss, firsts = (
            leaves_like(getattr(state, name), treedef, f"state.{name}", "params") for name in ProdigyState._fields[:4]
        )
        check_shapes(treedef, ps, updates=gs, exp_avg=ms, exp_avg_sq=vs, grad_sum=ss, params0=firsts)
        rate = evaluate_schedule(learning_rate, state.count) if callable(learning_rate) else learning_rate
        c1, c2 = bias_corrections(state.count + 1, b1, b2)
        d = state.estim_lr
        l = (d * rate * (c2.sqrt() / c1)).to(d)
        weight = (d if safeguard_warmup else l) * (d / estim_lr0)
        table = zip(gs, ps, ms, vs, ss, firsts, strict=True)
        rows = [_ProdigyLeaf.of(x, b1, b2, b3, d.to(x[0].device), weight.to(x[0].device)) for x in table]
        products, sizes = (_sum_over_tree([getattr(r, name) for r in rows], specs, params, d) for name in ("dot", "l1"))
        r = b3 * state.numerator_weighted + (d / estim_lr0) * l * products
        some = sizes > 0
        new = torch.maximum(d, torch.where(some, estim_lr_coef * r / torch.where(some, sizes, 1.0), 0.0))
        on = flags(params, ps, treedef, specs)
        steps = zip(rows, ps, on, vary_number(ps, l, params, specs), vary_number(ps, new, params, specs), strict=True)
        us = [row.update(p, weight_decay if decays else 0.0, rate, d, eps) for row, p, decays, rate, d in steps]
        trees = (
            [x.to(p.dtype) for x, p in zip(col, ps, strict=True)] for col in zip(*(x.kept for x in rows), strict=True)
        )
        m, v, s = [core.tree_unflatten(treedef, col) for col in trees] if rows else [state.exp_avg] * 3
        return core.tree_unflatten(treedef, us), ProdigyState(m, v, s, state.params0, new, r, state.count + 1)

    def decide_decay(params: base.Params) -> base.GradientTransformation:
        on = resolve_prefix(mask, params, bool, "mask")
        return prodigy(learning_rate, betas, beta3, eps, estim_lr0, estim_lr_coef, weight_decay, safeguard_warmup, on)

    rule = base.GradientTransformation(init_fn, update_fn)
    return rule._replace(needs=rule.needs._replace(resolve_masks=None if mask is None else decide_decay))


class _ProdigyLeaf(NamedTuple):
    """New moments of a leaf, in the dtype of the arithmetic, and this block's shares of the two sums."""

    m: Tensor
    v: Tensor
    s: Tensor
    dot: Tensor
    l1: Tensor

    @staticmethod
    def of(row: tuple[Tensor, ...], b1: float, b2: float, b3: float, d: Tensor, weight: Tensor) -> "_ProdigyLeaf":
        """Returns the step of a leaf from its gradient, parameter, three moments and first parameter."""
        g, p, m, v, s, first = (wide(x) for x in row)
        dg = d.to(g) * g
        s = b3 * s + weight.to(g) * g
        dot = (g.double() * (first - p).double()).sum()
        return _ProdigyLeaf(
            b1 * m + (1 - b1) * dg, b2 * v + (1 - b2) * dg.square(), s, dot, s.abs().sum(dtype=dot.dtype)
        )

    @property
    def kept(self) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the parts that are states."""
        return self.m, self.v, self.s

    def update(self, p: Tensor, decay: float, rate: Any, d: Any, eps: float) -> Tensor:
        """Returns the update of the leaf. An element without any gradient so far does not move."""
        below = self.v.sqrt() + d.to(self.v) * eps
        u = self.m / torch.where(below > 0, below, 1.0)
        return (-rate.to(u) * (u + decay * wide(p))).to(p.dtype)


def _sum_over_tree(shares: list[Tensor], specs: base.Specs, tree: core.PyTree, like: Tensor) -> Tensor:
    """Returns the sum over the leaves of the tree, and over the blocks of each leaf."""
    if not shares:
        return torch.zeros_like(like)
    local = torch.stack([x.to(like.device) for x in shares])
    return (local if specs is None else over_blocks(local, spec_leaves(specs, tree))).sum().to(like)
