"""`lookahead`: a fast rule steps, and every few steps slow parameters move a part of the way to the fast parameters."""

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor

from shardfn.core import PyTree, tree_flatten, tree_map, tree_unflatten

from ._base import GradientTransformation
from ._checks import check_num_steps, check_positive
from ._hyper import vary_number
from ._inplace import apply_updates
from ._leaves import check_params, check_state, leaves_like, wide, zero_count
from ._needs import join_needs, refuse_phases
from ._pair import as_transformation
from ._types import Number, OptState, Pair, Params, Specs, Updates


class LookaheadState(NamedTuple):
    """The slow parameters, and the state of the fast rule.

    Attributes:
        fast_state: the state of the fast rule.
        steps_since_sync: int32, 0-d: steps since slow and fast parameters were equal.
        slow: tree like params.
    """

    fast_state: OptState
    steps_since_sync: Int[Tensor, ""]
    slow: PyTree


def lookahead(
    fast_optimizer: GradientTransformation | Pair,
    sync_period: int,
    slow_step_size: Number,
    reset_state: bool = False,
) -> GradientTransformation:
    """Steps by a fast rule. Every `sync_period` steps `slow = slow + slow_step_size (p - slow)`, `p = slow`.

    Gradients are computed at the fast parameters, the parameters of the step. The slow parameters are a part of the
    optimizer's state (optax has pairs of parameters). `sf.eval_state(state)` is the state to evaluate and export. Put
    the rule outermost.

    Args:
        fast_optimizer: the rule.
        sync_period: number of fast steps for each step of the slow parameters, >= 1.
        slow_step_size: fraction of the way that the slow parameters move, > 0.
        reset_state: whether the state of the fast rule is reset after each slow step.

    Returns:
        A rule with a `LookaheadState`.

    Raises:
        ValueError: a number is out of range, or the rule averages gradients for itself.

    Example:
        >>> from shardfn.optim import inplace, sgd
        >>> tx, w = lookahead(sgd(1.0), sync_period=2, slow_step_size=0.5), [torch.zeros(1)]
        >>> state = tx.init(w)
        >>> for _ in range(2):
        ...     w, state = inplace(tx)([torch.ones(1)], state, w)
        >>> w, state.slow
        ([tensor([-1.])], [tensor([-1.])])

    References:
        Zhang et al., Lookahead Optimizer: k steps forward, 1 step back, 2019, https://arxiv.org/abs/1907.08610
    """
    check_num_steps("lookahead", sync_period=sync_period)
    check_positive("lookahead", slow_step_size=slow_step_size)
    tx = as_transformation(fast_optimizer)
    refuse_phases("lookahead", tx)
    return _Lookahead(tx, sync_period, slow_step_size, reset_state).rule()


@dataclass(frozen=True)
class _Lookahead:
    tx: GradientTransformation
    period: int
    size: Number
    reset: bool

    def rule(self) -> GradientTransformation:
        """Returns the rule as a `GradientTransformation`."""
        needs = join_needs([self.tx], lambda tx: replace(self, tx=tx).rule(), states=lambda s: (s.fast_state,))
        return GradientTransformation(self.init, self.update, needs=needs._replace(ascends=self.tx.needs.ascends))

    def init(self, params: Params) -> LookaheadState:
        return LookaheadState(self.tx.init(params), zero_count(params), tree_map(lambda p: p.detach().clone(), params))

    def update(
        self, updates: Updates, state: OptState, params: Params = None, *, specs: Specs = None
    ) -> tuple[Updates, OptState]:
        check_params("lookahead", params)
        check_state("lookahead", state, LookaheadState)
        ps, treedef = tree_flatten(params)
        slow = leaves_like(state.slow, treedef, "state.slow", "params")
        updates, fast = self.tx.update(updates, state.fast_state, params, specs=specs)
        syncs = state.steps_since_sync == self.period - 1
        if self.reset:
            fast = tree_map(lambda new, first: torch.where(syncs, first, new), fast, self.tx.init(params))
        new = tree_flatten(apply_updates(params, updates))[0]
        us = leaves_like(updates, treedef, "updates", "params")
        out, after = list[Tensor](), list[Tensor]()
        for p, u, x, s, size in zip(ps, us, new, slow, vary_number(ps, self.size, params, specs), strict=True):
            step = wide(s) + size * (wide(x) - wide(s))
            after.append(torch.where(syncs, step, wide(s)).to(s.dtype))
            # In a dtype that holds the difference exactly, so that fast and slow parameters are equal afterwards.
            out.append(torch.where(syncs, step.to(s.dtype).double() - p.double(), u.double()))
        count = (state.steps_since_sync + 1) % self.period
        return tree_unflatten(treedef, out), LookaheadState(fast, count, tree_unflatten(treedef, after))
