"""Rules for some leaves: `masked`, `freeze`, `multi_transform`.

A rule gets `None` in place of a leaf outside the mask. `None` means an absent leaf, so an inner rule keeps no state for
the leaf and needs no special case.

`per_leaf`: a rule with a separate state, and counters, for each leaf.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardfn import core

from . import _base as base
from ._decide import Resolved, resolve_per_leaf, resolve_prefix
from ._leaves import check_shapes, check_state, leaves_like, spec_leaves
from ._needs import Views, find_ascending, join_needs, refuse_phases, resolve_masks
from ._pair import as_transformation, inplace


class MultiTransformState(NamedTuple):
    """States of the inner rules.

    Attributes:
        inner: label -> state, over the leaves of the label.
    """

    inner: dict[str, base.OptState]


def set_to_zero() -> base.GradientTransformation:
    """Returns the rule without steps: `u = 0` for any gradient, including NaN.

    Example:
        >>> set_to_zero().update([torch.tensor([3.0])], ())[0]
        [tensor([0.])]
    """

    def init_fn(params: base.Params) -> base.EmptyState:
        del params
        return base.EmptyState()

    def update_fn(
        updates: base.Updates, state: base.OptState, params: base.Params = None, *, specs: base.Specs = None
    ) -> tuple[base.Updates, base.OptState]:
        del params, specs
        return core.tree_map(torch.zeros_like, updates), state

    def apply_fn(
        grads: base.Updates, state: base.OptState, params: base.Params, *, specs: base.Specs = None
    ) -> tuple[base.Params, base.OptState]:
        del grads, specs
        return params, state

    return base.GradientTransformation(init_fn, update_fn, apply_fn, base.Needs("element"))


def masked(inner: base.GradientTransformation | base.Pair, mask: base.Mask) -> base.GradientTransformation:
    """Applies `inner` where the mask is True. Elsewhere the update is unchanged: `u = g`.

    For example, `masked(adamw(1e-3), mask)` would add gradients to all other leaves, and so raise the loss. `step.init`
    refuses such a rule. To leave the other leaves unchanged, add `freeze` of the opposite mask in a `chain`, or pass
    `sharded_step(trainable=mask)`. To train the other leaves by another rule, use `multi_transform`.

    Args:
        inner: the wrapped optimizer.
        mask: a tree (or prefix) of bools, or a function from params to such a tree, of structure and shapes only.

    Returns:
        The corresponding `GradientTransformation`, with a `MultiTransformState` as state. `inner` gets `None` in place
        of the other leaves.

    Raises:
        ValueError: (on use) the mask does not match the params.

    Example:
        >>> tx = masked(set_to_zero(), {"a": True, "b": False})
        >>> params = {"a": torch.ones(1), "b": torch.ones(1)}
        >>> tx.update(params, tx.init(params))[0]
        {'a': tensor([0.]), 'b': tensor([1.])}
    """
    return _ByLabel({True: as_transformation(inner)}, mask, bool, "mask").rule()


def freeze(mask: base.Mask) -> base.GradientTransformation:
    """Holds the leaves still where the mask is True: `masked(set_to_zero(), mask)`. Put the rule last in a `chain`.

    A frozen leaf has no cost if the optimizer gets `None`. See `multi_transform`.

    Example:
        >>> from shardfn.optim import chain, sgd
        >>> tx = chain(sgd(1.0), freeze({"a": True, "b": False}))
        >>> params = {"a": torch.ones(1), "b": torch.ones(1)}
        >>> tx.update(params, tx.init(params))[0]
        {'a': tensor([0.]), 'b': tensor([-1.])}
    """
    return masked(set_to_zero(), mask)


def multi_transform(
    transforms: Mapping[str, base.GradientTransformation | base.Pair], labels: base.Mask
) -> base.GradientTransformation:
    """Applies to each leaf the rule that the leaf's label names.

    Args:
        transforms: label -> rule, such as {"matrices": muon(0.02), "others": adamw(3e-4)}.
        labels: a tree (or prefix) of labels, or a function from params to such a tree, of structure and shapes only.

    Returns:
        The corresponding `GradientTransformation`, with a `MultiTransformState` as state. Each inner rule gets `None`
        in place of other rules' leaves.

    Raises:
        ValueError: (on use) a label has no rule, or the labels do not match the params.

    Example:
        >>> from shardfn.optim import sgd
        >>> tx = multi_transform({"fast": sgd(1.0), "slow": sgd(0.1)}, {"a": "fast", "b": "slow"})
        >>> params = {"a": torch.ones(1), "b": torch.ones(1)}
        >>> tx.update(params, tx.init(params))[0]
        {'a': tensor([-1.]), 'b': tensor([-0.1000])}
    """
    return _ByLabel({k: as_transformation(tx) for k, tx in transforms.items()}, labels, str, "labels").rule()


def partition(
    transforms: Mapping[str, base.GradientTransformation | base.Pair], param_labels: base.Mask
) -> base.GradientTransformation:
    """Returns `multi_transform`, under optax's current name. Unrelated to `shardfn.partition`.

    Args:
        transforms: label -> rule, such as {"matrices": muon(0.02), "others": adamw(3e-4)}.
        param_labels: a tree (or prefix) of labels, or a function from params to such a tree, of structure and shapes
            only.

    Returns:
        The corresponding `GradientTransformation`, with a `MultiTransformState` as state.

    Raises:
        ValueError: (on use) a label has no rule, or the labels do not match the params.

    Example:
        >>> from shardfn.optim import sgd
        >>> tx = partition({"train": sgd(1.0), "keep": set_to_zero()}, {"a": "train", "b": "keep"})
        >>> params = {"a": torch.ones(1), "b": torch.ones(1)}
        >>> tx.update(params, tx.init(params))[0]
        {'a': tensor([-1.]), 'b': tensor([0.])}
    """
    return multi_transform(transforms, param_labels)


@dataclass(frozen=True, eq=False)
class _ByLabel:
    """Rules by label. Leaves with a label that has no rule get `u = g`.

    Compared by identity, because labels may be a tree.
    """

    rules: dict[Any, base.GradientTransformation]
    labels: base.Mask
    kind: type
    name: str

    def rule(self) -> base.GradientTransformation:
        """Returns the optimizer as a `GradientTransformation`."""
        refuse_phases(self.name, *self.rules.values())
        needs = join_needs(
            self.rules.values(),
            lambda *inner: replace(self, rules=dict(zip(self.rules, inner, strict=True))).rule(),
            sees=self.sees,
            own=None if isinstance(self.labels, Resolved) else self.decided,
            in_turn=False,
        )._replace(ascends=self.ascends)
        return base.GradientTransformation(self.init, self.update, self.apply, needs)

    @property
    def ascends(self) -> bool | Callable[[base.Params], Sequence[bool]]:
        """Returns a single value if all rules and leaves without a rule agree, else a function with values by leaf."""
        all_ascend = [rule.needs.ascends for rule in self.rules.values()] + [True] * (self.kind is bool)
        alike = bool(all_ascend) and isinstance(all_ascend[0], bool) and all(x is all_ascend[0] for x in all_ascend)
        return all_ascend[0] if alike else self.ascending

    def ascending(self, params: base.Params) -> list[bool]:
        """Returns the value of each leaf's rule. Without a rule, the update is the gradient."""
        leaves, treedef, names = self.labelled(params)
        rows = {
            k: iter(find_ascending(rule, _select_leaves(leaves, treedef, names, k))) for k, rule in self.rules.items()
        }
        return [next(rows[k]) if k in rows else True for k in names]

    def decided(self, params: base.Params) -> base.GradientTransformation:
        return replace(self, labels=resolve_prefix(self.labels, params, self.kind, self.name)).rule()

    def sees(self, params: base.Params, stats: Tensor | None) -> Views:
        leaves, treedef, names = self.labelled(params)
        rows = {k: None if stats is None else stats[[i for i, n in enumerate(names) if n == k]] for k in self.rules}
        return [(_select_leaves(leaves, treedef, names, k), rows[k]) for k in self.rules]

    @functools.cached_property
    def resolve(self) -> Callable[..., tuple[Any, ...]]:
        """Returns a function from a tree to a label a leaf."""
        return resolve_per_leaf(self.labels, self.kind, self.name)

    def labelled(self, tree: core.PyTree, specs: base.Specs = None) -> tuple[list[Any], Any, tuple[Any, ...]]:
        """Returns the leaves, the structure, and the labels."""
        leaves, treedef = core.tree_flatten(tree)
        names = self.resolve(tree, leaves, treedef, specs)
        if self.kind is str:
            _check_labels(tree, names, self.rules)
        return leaves, treedef, names

    def init(self, params: base.Params) -> MultiTransformState:
        leaves, treedef, names = self.labelled(params)
        inner = {str(k): rule.init(_select_leaves(leaves, treedef, names, k)) for k, rule in self.rules.items()}
        return MultiTransformState(inner)

    def update(
        self, updates: base.Updates, state: base.OptState, params: base.Params = None, *, specs: base.Specs = None
    ) -> tuple[base.Updates, base.OptState]:
        check_state(self.name, state, MultiTransformState)
        us, treedef, names = self.labelled(updates, specs)
        ps = None if params is None else leaves_like(params, treedef, "params", "updates")
        ss = None if specs is None else spec_leaves(specs, updates)
        out, states = list(us), {}
        for k, rule in self.rules.items():
            u, p, s = (_select_leaves(x, treedef, names, k) for x in (us, ps, ss))
            new, states[str(k)] = rule.update(u, state.inner[str(k)], p, specs=s)
            _merge_leaves(out, core.tree_leaves(new), names, k)
        return core.tree_unflatten(treedef, out), MultiTransformState(states)

    @torch.no_grad()
    def apply(
        self, grads: base.Updates, state: base.OptState, params: base.Params, *, specs: base.Specs = None
    ) -> tuple[base.Params, base.OptState]:
        check_state(self.name, state, MultiTransformState)
        ps, treedef, names = self.labelled(params, specs)
        gs = leaves_like(grads, treedef, "grads", "params")
        check_shapes(treedef, ps, grads=gs)
        ss = None if specs is None else spec_leaves(specs, params)
        out, states = list(ps), {}
        for k, rule in self.rules.items():
            g, p, s = (_select_leaves(x, treedef, names, k) for x in (gs, ps, ss))
            new, states[str(k)] = inplace(rule)(g, state.inner[str(k)], p, specs=s)
            _merge_leaves(out, core.tree_leaves(new), names, k)
        rest = [(p, g) for p, g, k in zip(ps, gs, names, strict=True) if k not in self.rules]
        for p, g in rest:
            p.add_(g)
        return core.tree_unflatten(treedef, out), MultiTransformState(states)


def _select_leaves(leaves: list[Any] | None, treedef: Any, names: tuple[Any, ...], label: Any) -> core.PyTree:
    if leaves is None:
        return None
    return core.tree_unflatten(treedef, [x if k == label else None for x, k in zip(leaves, names, strict=True)])


def _merge_leaves(out: list[Tensor], new: list[Tensor], names: tuple[Any, ...], label: Any) -> None:
    index = [i for i, k in enumerate(names) if k == label]
    for i, x in zip(index, new, strict=True):
        out[i] = x


def _check_labels(tree: core.PyTree, names: tuple[Any, ...], rules: dict[Any, base.GradientTransformation]) -> None:
    if not set(names) <= rules.keys():
        rows = zip(core.tree_paths(tree, "params"), names, strict=True)
        wrong = [f"{path} is labelled {k!r}.{core.did_you_mean(k, rules)}" for path, k in rows if k not in rules]
        core.raise_all(ValueError, f"there are rules for {sorted(rules)} only:", wrong)


def per_leaf(inner: base.GradientTransformation | base.Pair) -> base.GradientTransformation:
    """Applies `inner` to each leaf separately, with separate counters.

    So a leaf that is trained from the middle of a run on has a separate bias correction, and a separate warm-up if
    `inner` has a schedule. With a common counter, the new moments would be corrected too little. For a common schedule,
    put the schedule outside, for example `chain(per_leaf(scale_by_adam()), scale_by_learning_rate(schedule))`. A norm
    inside is the norm of each leaf. Kernels are launched for each leaf separately.

    Args:
        inner: the wrapped optimizer.

    Returns:
        The corresponding `GradientTransformation`, with a `MultiTransformState` as state, whose labels are the paths.

    Raises:
        ValueError: the rule averages gradients for itself.

    Example:
        >>> from shardfn.optim import adam
        >>> tx = per_leaf(adam(0.1))
        >>> sorted(tx.init({"a": torch.ones(1), "b": torch.ones(1)}).inner)
        ["['a']", "['b']"]
    """
    tx = as_transformation(inner)
    refuse_phases("per_leaf", tx)
    return _PerLeaf(tx).rule()


@dataclass(frozen=True)
class _PerLeaf:
    tx: base.GradientTransformation

    def rule(self) -> base.GradientTransformation:
        """Returns the optimizer as a `GradientTransformation`."""
        needs = multi_transform({"": self.tx}, "").needs._replace(resolve_masks=self.decide, bind_stats=None)
        return base.GradientTransformation(self.init, self.update, self.apply, needs)

    def on(self, tree: core.PyTree) -> base.GradientTransformation:
        """Returns the rule for one tree, with a label for each leaf."""
        paths, treedef = core.tree_paths(tree), core.tree_flatten(tree)[1]
        return multi_transform(dict.fromkeys(paths, self.tx), core.tree_unflatten(treedef, paths))

    def decide(self, params: base.Params) -> base.GradientTransformation:
        return resolve_masks(self.on(params), params)

    def init(self, params: base.Params) -> base.OptState:
        return self.on(params).init(params)

    def update(
        self, updates: base.Updates, state: base.OptState, params: base.Params = None, *, specs: base.Specs = None
    ) -> tuple[base.Updates, base.OptState]:
        return self.on(updates).update(updates, state, params, specs=specs)

    @torch.no_grad()
    def apply(
        self, grads: base.Updates, state: base.OptState, params: base.Params, *, specs: base.Specs = None
    ) -> tuple[base.Params, base.OptState]:
        return inplace(self.on(params))(grads, state, params, specs=specs)
