"""`apply_if_finite`: steps are skipped where a gradient is not finite."""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from shardfn._torch import FakeTensor
from shardfn.collectives import transforming
from shardfn.core import tree_flatten, tree_leaves, tree_map, tree_unflatten

from ._base import GradientTransformation, Measure, Phase
from ._hyper import vary_number
from ._inplace import apply_updates, inplace
from ._leaves import check_state, spec_leaves, zero_count
from ._needs import bind_stats, join_needs, refuse_phases
from ._norm import over_blocks
from ._pair import as_transformation
from ._types import OptState, Pair, Params, Specs, Updates


class ApplyIfFiniteState(NamedTuple):
    """Counts of gradients that were not finite.

    Attributes:
        notfinite_count: int32, 0-d: consecutive gradients until now that were not finite.
        last_finite: bool, 0-d: whether the last gradient was finite.
        total_notfinite: int32, 0-d: all gradients that were not finite.
        inner_state: the state of the rule.
    """

    notfinite_count: Int[Tensor, ""]
    last_finite: Bool[Tensor, ""]
    total_notfinite: Int[Tensor, ""]
    inner_state: OptState


def apply_if_finite(inner: GradientTransformation | Pair, max_consecutive_errors: int) -> GradientTransformation:
    """Skips a step, including the state of `inner`, if an element of the gradient is infinite or NaN.

    After `max_consecutive_errors` skipped steps in a row, the next step is made nevertheless, so that a failed run
    fails visibly. For example, with 2 the third bad step in a row is made. All ranks decide equally: elements that are
    not finite are counted over all blocks. Put a clip inside. A clip before the rule skips the same steps, because the
    norm makes every element NaN.

    `sharded_step(skip_nonfinite=True)` also tests the loss, skips any number of steps, and counts no steps.

    Args:
        inner: the rule.
        max_consecutive_errors: number of consecutive steps that may be skipped, >= 0.

    Returns:
        A rule with an `ApplyIfFiniteState`.

    Raises:
        ValueError: the number is not an int >= 0, or the rule averages gradients for itself.

    Example:
        >>> from shardfn.optim import sgd
        >>> tx, w = apply_if_finite(sgd(1.0), max_consecutive_errors=1), [torch.zeros(1)]
        >>> bad, state = [torch.tensor([torch.nan])], tx.init(w)
        >>> first, state = tx.update(bad, state, w)
        >>> first, tx.update(bad, state, w)[0]
        ([tensor([0.])], [tensor([nan])])
    """
    most = max_consecutive_errors
    if isinstance(most, bool) or not isinstance(most, int) or most < 0:
        raise ValueError(f"apply_if_finite: max_consecutive_errors={most!r} must be an int >= 0.")
    tx = as_transformation(inner)
    refuse_phases("apply_if_finite", tx)
    return _ApplyIfFinite(tx, most).rule()


def count_not_finite(block: Tensor) -> Tensor:
    """Returns the number of elements of a block that are infinite or NaN."""
    return (~block.isfinite()).sum().float()


@dataclass(frozen=True, eq=False)
class _ApplyIfFinite:
    """The rule, in a step where `bad` elements of all gradients are not finite. None: not counted yet.

    Compared by identity, because tensors cannot be compared.
    """

    tx: GradientTransformation
    most: int
    bad: Tensor | None = None

    def rule(self) -> GradientTransformation:
        """Returns the rule as a `GradientTransformation`."""
        needs = join_needs([self.tx], lambda tx: replace(self, tx=tx).rule(), states=lambda s: (s.inner_state,))
        needs = needs._replace(ascends=self.tx.needs.ascends, bind_stats=self.given)
        if self.tx.needs.measure is None:
            needs = needs._replace(measure=Measure(count_not_finite, additive=True))
        else:  # two values would be measured
            needs = needs._replace(measure=None, granularity="tree")
        return GradientTransformation(self.init, self.update, self.apply, needs)

    def given(self, params: Params, stats: Tensor | None, phase: Phase | None) -> GradientTransformation:
        bad = None if stats is None else stats.sum()
        return replace(self, tx=bind_stats(self.tx, params, None, phase), bad=bad).rule()

    def init(self, params: Params) -> ApplyIfFiniteState:
        count = zero_count(params)
        finite = torch.ones((), dtype=torch.bool, device=count.device)
        return ApplyIfFiniteState(count, finite, count.clone(), self.tx.init(params))

    def update(
        self, updates: Updates, state: OptState, params: Params = None, *, specs: Specs = None
    ) -> tuple[Updates, OptState]:
        finite, steps, counts = self._count_step(updates, state, specs)
        us, inner = self.tx.update(updates, state.inner_state, params, specs=specs)
        leaves, treedef = tree_flatten(us)
        rows = zip(leaves, vary_number(leaves, steps, us, specs), strict=True)
        us = tree_unflatten(treedef, [torch.where(s, u, 0.0).to(u.dtype) for u, s in rows])
        inner = tree_map(lambda new, old: torch.where(steps, new, old), inner, state.inner_state)
        return us, ApplyIfFiniteState(counts[0], finite, counts[1], inner)

    @torch.no_grad()
    def apply(self, grads: Updates, state: OptState, params: Params, *, specs: Specs = None) -> tuple[Params, OptState]:
        finite, steps, counts = self._count_step(grads, state, specs)
        inner = state.inner_state
        if transforming() or isinstance(steps, FakeTensor) or steps.is_meta:  # the value cannot be read
            params, inner = self._select_updates(grads, state, params, specs)
        elif bool(steps):
            params, inner = inplace(self.tx)(grads, inner, params, specs=specs)
        old = (state.notfinite_count, state.last_finite, state.total_notfinite)
        for x, new in zip(old, (counts[0], finite, counts[1]), strict=True):
            x.copy_(new)
        return params, state._replace(inner_state=inner)

    def _select_updates(self, grads: Updates, state: OptState, params: Params, specs: Specs) -> tuple[Params, OptState]:
        """Returns the pure update, written into the buffers that were given."""
        us, new = self.update(grads, state, params, specs=specs)
        fresh = tree_leaves((apply_updates(params, us), new.inner_state))
        for x, y in zip(tree_leaves((params, state.inner_state)), fresh, strict=True):
            x.copy_(y)
        return params, state.inner_state

    def _count_step(
        self, grads: Updates, state: OptState, specs: Specs
    ) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
        """Returns whether the gradients are finite, whether the step is made, and the new counts."""
        check_state("apply_if_finite", state, ApplyIfFiniteState)
        bad = self._count_nonfinite(grads, specs) if self.bad is None else self.bad
        finite = (bad == 0).to(state.notfinite_count.device)
        row = torch.where(finite, 0, state.notfinite_count + 1)
        total = state.total_notfinite + (~finite).to(torch.int32)
        return finite, finite | (row > self.most), (row, total)

    def _count_nonfinite(self, grads: Updates, specs: Specs) -> Tensor:
        leaves: list[Any] = tree_leaves(grads)
        if not leaves:
            return torch.zeros(())
        local = torch.stack([count_not_finite(g) for g in leaves])
        return (local if specs is None else over_blocks(local, spec_leaves(specs, grads))).sum()
