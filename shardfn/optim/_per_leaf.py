"""`per_leaf`: a rule with a separate state, and counters, for each leaf."""

from dataclasses import dataclass

import torch

from shardfn.core import PyTree, tree_flatten, tree_paths, tree_unflatten

from ._base import GradientTransformation
from ._inplace import inplace
from ._mask import multi_transform
from ._needs import refuse_phases, resolve_masks
from ._pair import as_transformation
from ._types import OptState, Pair, Params, Specs, Updates


def per_leaf(inner: GradientTransformation | Pair) -> GradientTransformation:
    """Applies `inner` to each leaf separately, with separate counters.

    So a leaf that is trained from the middle of a run on has a separate bias correction, and a separate warm-up if
    `inner` has a schedule. With a common counter, the new moments would be corrected too little. For a common schedule,
    put the schedule outside, for example `chain(per_leaf(scale_by_adam()), scale_by_learning_rate(schedule))`. A norm
    inside is the norm of each leaf. Kernels are launched for each leaf separately.

    Args:
        inner: the rule.

    Returns:
        A rule with a `MultiTransformState` by path.

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
    tx: GradientTransformation

    def rule(self) -> GradientTransformation:
        """Returns the rule as a `GradientTransformation`."""
        needs = multi_transform({"": self.tx}, "").needs._replace(resolve_masks=self.decide, bind_stats=None)
        return GradientTransformation(self.init, self.update, self.apply, needs)

    def on(self, tree: PyTree) -> GradientTransformation:
        """Returns the rule for one tree, with a label for each leaf."""
        paths, treedef = tree_paths(tree), tree_flatten(tree)[1]
        return multi_transform(dict.fromkeys(paths, self.tx), tree_unflatten(treedef, paths))

    def decide(self, params: Params) -> GradientTransformation:
        return resolve_masks(self.on(params), params)

    def init(self, params: Params) -> OptState:
        return self.on(params).init(params)

    def update(
        self, updates: Updates, state: OptState, params: Params = None, *, specs: Specs = None
    ) -> tuple[Updates, OptState]:
        return self.on(updates).update(updates, state, params, specs=specs)

    @torch.no_grad()
    def apply(self, grads: Updates, state: OptState, params: Params, *, specs: Specs = None) -> tuple[Params, OptState]:
        return inplace(self.on(params))(grads, state, params, specs=specs)
