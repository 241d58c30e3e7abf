"""Master weights: parameters kept in 16 bits, updated in 32.

A bfloat16 number has 8 significant bits, so an update below 2^-9 of the parameter is rounded away, for example 0.001 at
a parameter of 1. The copy in the optimizer's state accumulates such updates. Micikevicius et al., Mixed Precision
Training, 2017, https://arxiv.org/abs/1710.03740
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardfn import core
from shardfn._torch import foreach_copy_
from shardfn.collectives import GlobalTensor

from . import _base as base
from ._decide import Resolved, resolve_per_leaf, resolve_prefix
from ._leaves import check_params, check_state, leaves_like
from ._needs import Views, join_needs
from ._pair import apply_updates, as_transformation, inplace


class MasterState(NamedTuple):
    """State of `master_weights`.

    Attributes:
        master: tree like params: the wide copies, or None at leaves without one.
        inner: the state of the inner rule.
    """

    master: core.PyTree
    inner: base.OptState


def master_weights(
    inner: base.GradientTransformation | base.Pair,
    dtype: torch.dtype = torch.float32,
    *,
    param_dtypes: core.PyTree = None,
) -> base.GradientTransformation:
    """Applies `inner` to a wide copy of narrow parameters: `m' = m + u(g, m)`, `p' = cast(m')`.

    A leaf that is as wide as `dtype` has no copy, and is stepped by `inner` directly.

    Args:
        inner: the wrapped optimizer. Moments are in `dtype`, because the rule gets only the copies.
        dtype: dtype of the copies.
        param_dtypes: dtype of each leaf in `update` and `apply`: a dtype, a tree (or prefix) of dtypes, or a function
            from params to such a tree. None: the dtypes that `init` is given. With `param_dtypes`, `init` may be given
            wider leaves, so that the copies start from values that were never rounded.

    Returns:
        The corresponding `GradientTransformation`, with a `MasterState` as state. Updates are `p' - p`, exact in
        float64. `apply` writes p'.

    Raises:
        ValueError: (on use) trees do not match.

    Example:
        >>> from shardfn.optim import sgd
        >>> tx = master_weights(sgd(1.0))
        >>> w, small = [torch.ones(1, dtype=torch.bfloat16)], [torch.full((1,), 2.0**-10)]
        >>> state = tx.init(w)
        >>> for _ in range(8):
        ...     w, state = tx.apply(small, state, w)
        >>> w, state.master
        ([tensor([0.9922], dtype=torch.bfloat16)], [tensor([0.9922])])

    References:
        Micikevicius et al., Mixed Precision Training, 2017, https://arxiv.org/abs/1710.03740
    """
    return _MasterWeights(as_transformation(inner), dtype, param_dtypes).rule()


@dataclass(frozen=True, eq=False)
class _MasterWeights:
    """The rule. Compared by identity, because `kept` may be a tree."""

    tx: base.GradientTransformation
    dtype: torch.dtype
    kept: core.PyTree

    def rule(self) -> base.GradientTransformation:
        """Returns the optimizer as a `GradientTransformation`."""
        needs = join_needs(
            [self.tx],
            lambda rule: replace(self, tx=rule).rule(),
            states=lambda state: (state.inner,),
            sees=self.sees,
            own=None if self.kept is None or isinstance(self.kept, Resolved) else self.decided,
        )._replace(ascends=self.tx.needs.ascends)
        return base.GradientTransformation(self.init, self.update, self.apply, needs)

    def decided(self, params: base.Params) -> base.GradientTransformation:
        return replace(self, kept=resolve_prefix(self.kept, params, torch.dtype, "param_dtypes")).rule()

    def sees(self, params: base.Params, stats: Tensor | None) -> Views:
        """Returns the tree that the inner rule gets: wide."""
        ps, treedef = core.tree_flatten(params)
        own = [self.dtype if self._is_narrow(d) else d for d in self._master_dtypes(params, ps, treedef)]
        return [(core.tree_unflatten(treedef, [_abstract_leaf(p, d) for p, d in zip(ps, own, strict=True)]), stats)]

    @functools.cached_property
    def _resolve_inner(self) -> Callable[..., Sequence[torch.dtype]]:
        return resolve_per_leaf(self.kept, torch.dtype, "param_dtypes")

    def _is_narrow(self, dtype: torch.dtype) -> bool:
        return dtype.itemsize < self.dtype.itemsize

    def _master_dtypes(self, params: base.Params, ps: list[Any], treedef: Any) -> Sequence[torch.dtype]:
        return [p.dtype for p in ps] if self.kept is None else self._resolve_inner(params, ps, treedef)

    def init(self, params: base.Params) -> MasterState:
        ps, treedef = core.tree_flatten(params)
        own = self._master_dtypes(params, ps, treedef)
        narrow = [self._is_narrow(d) for d in own]
        # A copy even of wide values: the copy must not share the memory of a parameter that is written.
        seen = [p.to(self.dtype if n else d, copy=n) for p, d, n in zip(ps, own, narrow, strict=True)]
        masters = [x if n else None for x, n in zip(seen, narrow, strict=True)]
        return MasterState(core.tree_unflatten(treedef, masters), self.tx.init(core.tree_unflatten(treedef, seen)))

    def _leaf_columns(
        self, state: base.OptState, ps: list[Tensor], treedef: Any
    ) -> tuple[list[Tensor | None], list[Tensor]]:
        """Returns the master copy of each leaf (or None), and the parameters that the inner optimizer receives."""
        check_state("master_weights", state, MasterState)
        narrow = [self._is_narrow(p.dtype) for p in ps]
        like = core.tree_structure(core.tree_unflatten(treedef, [0 if n else None for n in narrow]))
        copies = iter(leaves_like(state.master, like, "state.master", "params"))
        masters = [next(copies) if n else None for n in narrow]
        return masters, [p if m is None else m for p, m in zip(ps, masters, strict=True)]

    def update(
        self, updates: base.Updates, state: base.OptState, params: base.Params = None, *, specs: base.Specs = None
    ) -> tuple[base.Updates, base.OptState]:
        check_params("master_weights", params)
        ps, treedef = core.tree_flatten(params)
        masters, seen = self._leaf_columns(state, ps, treedef)
        old = core.tree_unflatten(treedef, seen)
        us, inside = self.tx.update(updates, state.inner, old, specs=specs)
        new = core.tree_leaves(apply_updates(old, us))
        # In float64 the difference of two narrow numbers is exact, and so is the sum that restores p'.
        out = [
            u if m is None else x.to(p.dtype).double() - p.double()
            for u, m, x, p in zip(leaves_like(us, treedef, "updates", "params"), masters, new, ps, strict=True)
        ]
        wides = [None if m is None else x for m, x in zip(masters, new, strict=True)]
        return core.tree_unflatten(treedef, out), MasterState(core.tree_unflatten(treedef, wides), inside)

    @functools.cached_property
    def _inner_step(self) -> Callable[..., tuple[base.Params, base.OptState]]:
        return inplace(self.tx)

    @torch.no_grad()
    def apply(
        self, grads: base.Updates, state: base.OptState, params: base.Params, *, specs: base.Specs = None
    ) -> tuple[base.Params, base.OptState]:
        ps, treedef = core.tree_flatten(params)
        masters, seen = self._leaf_columns(state, ps, treedef)
        new, inside = self._inner_step(grads, state.inner, core.tree_unflatten(treedef, seen), specs=specs)
        rows = list(zip(ps, masters, leaves_like(new, treedef, "params", "params"), strict=True))
        narrow = [(p, x) for p, m, x in rows if m is not None]
        if narrow:
            foreach_copy_([p for p, _ in narrow], [x for _, x in narrow])
        out = [x if m is None else p for p, m, x in rows]
        wides = [None if m is None else x for _, m, x in rows]
        return core.tree_unflatten(treedef, out), MasterState(core.tree_unflatten(treedef, wides), inside)


def _abstract_leaf(x: Tensor | GlobalTensor, dtype: torch.dtype) -> Tensor | GlobalTensor:
    """Returns a leaf without data, in another dtype."""
    if isinstance(x, GlobalTensor):
        block = torch.empty(x.local.shape, dtype=dtype, device="meta")
        return x.with_block(block)
    return torch.empty(x.shape, dtype=dtype, device="meta")
