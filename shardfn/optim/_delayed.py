"""`delayed`: the update of the previous step, computed in parallel with the gradients of this step."""

import functools
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor

from shardfn import core
from shardfn._torch import FakeTensor, foreach_copy_
from shardfn.collectives import transforming

from . import _base as base
from ._leaves import check_shapes, check_state, leaves_like, spec_leaves, zero_count, zeros_like
from ._needs import bind_stats, join_needs, refuse_phases
from ._norm import dtype_of_squares, over_blocks
from ._pair import apply_updates, as_transformation, inplace


class DelayedState(NamedTuple):
    """State of an optimizer whose updates are delayed.

    Attributes:
        pending: tree like params: gradients of the last step, or zeros if no gradient waits.
        count: int32, 0-d: steps seen. Nothing waits while `count <= warmup`.
        inner: the state of the rule.
        measured: 0-d: sum of the values of `needs.measure` of the waiting gradients, or `()` for an optimizer without
            measure. float32, or float64 if a leaf is float64.
    """

    pending: core.PyTree
    count: Int[Tensor, ""]  # pyright: ignore[reportIncompatibleMethodOverride]  # as in all states
    inner: base.OptState
    measured: Any = ()


def delayed(tx: base.GradientTransformation | base.Pair, warmup: int = 0) -> base.GradientTransformation:
    """Steps along the gradients of the previous step: `p_{t+1} = p_t + tx(g_{t-1})`, `g_t` the gradient at `p_t`.

    The update of step t does not depend on the gradients of step t, so an optimizer on the host can run in parallel
    with forward and backward on the device. The first `warmup` steps are plain steps, `p_{t+1} = p_t + tx(g_t)`:
    gradients change fast at first. Step t = `warmup` moves nothing, inner counters included: g_{t-1} is spent (or there
    was none), and g_t begins to wait. So after T > `warmup` steps `tx` has run T - 1 times, and the last gradient is
    unused.

    Gradients that wait have the dtype of the parameters. Put clipping inside, for example
    `delayed(chain(clip_by_global_norm(c), adamw(lr)))`: then the norm is computed when gradients arrive, before the
    next step. In `chain(clip_by_global_norm(c), delayed(adamw(lr)))` a step waits for the norm of the same step's
    gradients.

    Args:
        tx: the wrapped optimizer.
        warmup: number of plain steps at first, >= 0.

    Returns:
        The corresponding `GradientTransformation`, with a `DelayedState` as state of constant structure.

    Raises:
        ValueError: `warmup` is not an int >= 0, or (on use) trees or the state do not match the params.

    Example:
        >>> from shardfn.optim import sgd
        >>> tx, w = delayed(sgd(0.5)), [torch.ones(1)]
        >>> state = tx.init(w)
        >>> for _ in range(3):  # the gradient of w^2 / 2 is w: 1, 1, then 1 - 0.5 * 1
        ...     w, state = inplace(tx)([w[0].clone()], state, w)
        >>> w, state.pending
        ([tensor([0.])], [tensor([0.5000])])

    References:
        Ren et al., ZeRO-Offload: Democratizing Billion-Scale Model Training, 2021, https://arxiv.org/abs/2101.06840
    """
    if isinstance(warmup, bool) or not isinstance(warmup, int) or warmup < 0:
        raise ValueError(f"delayed: warmup={warmup!r} must be an int >= 0.")
    rule = as_transformation(tx)
    refuse_phases("delayed", rule)
    return _Delayed(rule, warmup).rule()


@dataclass(frozen=True, eq=False)
class _Delayed:
    """The rule. For parts of the tree `whole`, if given, in a step with measures `stats`.

    Compared by identity: a tree of params has no equality.
    """

    tx: base.GradientTransformation
    warmup: int
    whole: base.Params = None
    stats: Tensor | None = None

    def rule(self) -> base.GradientTransformation:
        """Returns the optimizer as a `GradientTransformation`."""
        tx, measure = self.tx, self.measure
        needs = join_needs([tx], lambda rule: _Delayed(rule, self.warmup).rule())
        needs = needs._replace(bind_stats=self.bind, ascends=tx.needs.ascends)
        if measure is not None:
            ahead = measure._replace(ahead=lambda state: int(state.count) >= self.warmup)
            return base.GradientTransformation(self.init, self.update, self.apply, needs._replace(measure=ahead))
        granularity = (
            "tree" if tx.needs.measure is not None else needs.granularity
        )  # measures that do not add up are not kept
        return base.GradientTransformation(
            self.init, self.update, self.apply, needs._replace(granularity=granularity, measure=None)
        )

    def bind(self, params: base.Params, stats: Tensor | None, phase: base.Phase | None) -> base.GradientTransformation:
        del phase
        return replace(self, whole=params, stats=stats).rule()

    @functools.cached_property
    def measure(self) -> base.Measure | None:
        """Returns the measure of the inner rule, if only the sum over leaves is needed."""
        measure = self.tx.needs.measure
        return measure if measure is not None and measure.additive else None

    @functools.cached_property
    def own(self) -> base.GradientTransformation:
        """Returns the inner rule, without measures."""
        return self.tx if self.whole is None else bind_stats(self.tx, self.whole)

    def by(self, like: core.PyTree, total: Any) -> base.GradientTransformation:
        """Returns the inner rule for gradients with the sum of measures `total`."""
        if self.measure is None:
            return self.own
        return bind_stats(self.tx, like if self.whole is None else self.whole, total.view(1))

    def total(self, updates: base.Updates, specs: base.Specs) -> Tensor | None:
        """Returns the sum of the measures, or None if not known yet, or not needed."""
        if self.measure is None or (self.whole is not None and self.stats is None):
            return None
        return _sum_measures(self.measure, updates, specs) if self.stats is None else self.stats.sum()

    def init(self, params: base.Params) -> DelayedState:
        wide = dtype_of_squares(core.tree_leaves(params))
        kept = torch.zeros((), dtype=wide, device=zero_count(params).device) if self.measure else ()
        return DelayedState(zeros_like(params), zero_count(params), self.own.init(params), kept)

    def update(
        self, updates: base.Updates, state: base.OptState, params: base.Params = None, *, specs: base.Specs = None
    ) -> tuple[base.Updates, base.OptState]:
        gs, waiting = _leaf_columns(updates, state, "updates")
        # Both outcomes of each branch are computed: the counter cannot be read under a transform.
        plain, moves, now = state.count < self.warmup, state.count != self.warmup, self.total(updates, specs)
        used = [torch.where(plain, g.to(w.dtype), w) for g, w in zip(gs, waiting, strict=True)]
        norm = state.measured if now is None else torch.where(plain, now, state.measured)
        like = core.tree_flatten(updates)[1]
        us, inner = self.by(updates, norm).update(core.tree_unflatten(like, used), state.inner, params, specs=specs)
        us = core.tree_map(lambda u: torch.where(moves, u, 0.0).to(u.dtype), us)
        inner = core.tree_map(lambda new, old: torch.where(moves, new, old), inner, state.inner)
        kept = [torch.where(plain, 0.0, g).to(w.dtype) for g, w in zip(gs, waiting, strict=True)]
        after = state.measured if now is None else torch.where(plain, 0.0, now).to(state.measured.dtype)
        return us, DelayedState(core.tree_unflatten(like, kept), state.count + 1, inner, after)

    @torch.no_grad()
    def apply(
        self, grads: base.Updates, state: base.OptState, params: base.Params, *, specs: base.Specs = None
    ) -> tuple[base.Params, base.OptState]:
        if transforming() or isinstance(getattr(state, "count", None), FakeTensor):
            return _apply_update(self.update, grads, state, params, specs)  # the counter cannot be read
        # The rule spends the waiting gradients before this step's gradients are stored.
        gs, waiting = _leaf_columns(grads, state, "grads")
        inner, count, now = state.inner, int(state.count), self.total(grads, specs)
        if count < self.warmup:
            params, inner = inplace(self.by(grads, now))(grads, inner, params, specs=specs)
        elif count > self.warmup:
            params, inner = inplace(self.by(grads, state.measured))(state.pending, inner, params, specs=specs)
        if count >= self.warmup and gs:
            foreach_copy_(waiting, gs)
        if count >= self.warmup and now is not None:
            state.measured.copy_(now)
        return params, DelayedState(state.pending, state.count.add_(1), inner, state.measured)


def _sum_measures(measure: base.Measure, updates: base.Updates, specs: base.Specs) -> Tensor:
    leaves = core.tree_leaves(updates)
    if not leaves:
        return torch.zeros(())
    local = torch.stack([measure.of(g) for g in leaves])
    return (local if specs is None else over_blocks(local, spec_leaves(specs, updates))).sum()


def _leaf_columns(tree: base.Updates, state: base.OptState, name: str) -> tuple[list[Any], list[Any]]:
    check_state("delayed", state, DelayedState)
    leaves, treedef = core.tree_flatten(tree)
    waiting = leaves_like(state.pending, treedef, "state.pending", name)
    check_shapes(treedef, leaves, pending=waiting)
    return leaves, waiting


def _apply_update(
    update: Any, grads: base.Updates, state: base.OptState, params: base.Params, specs: base.Specs
) -> tuple[base.Params, base.OptState]:
    updates, new = update(grads, state, params, specs=specs)
    stepped = core.tree_leaves(apply_updates(params, updates))
    for old, fresh in zip(core.tree_leaves((params, state)), [*stepped, *core.tree_leaves(new)], strict=True):
        old.copy_(fresh)
    return params, state
