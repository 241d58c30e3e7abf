"""`per_leaf`: a rule that keeps a state, and counters, for each leaf by itself."""

from dataclasses import dataclass

import torch

from shardfn.core import PyTree, tree_flatten, tree_paths, tree_unflatten

from ._base import GradientTransformation
from ._inplace import inplace
from ._mask import multi_transform
from ._needs import decided, refuse_phases
from ._pair import as_transformation
from ._types import OptState, Pair, Params, Specs, Updates


def per_leaf(inner: GradientTransformation | Pair) -> GradientTransformation:
    """Applies `inner` to each leaf by itself, with counters of its own.

    So a leaf that is trained from the middle of a run on has its own bias correction, where a common counter would take
    its moments for old ones, and its own warm-up, if `inner` has a schedule. For a common schedule put that outside:
    `chain(per_leaf(scale_by_adam()), scale_by_learning_rate(schedule))`. A norm inside is that of each leaf. It costs
    the kernels of each leaf one by one.

    Args:
        inner: the rule.

    Returns:
        A rule whose state is a `MultiTransformState` by path.

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
        """As an optimizer."""
        needs = multi_transform({"": self.tx}, "").needs._replace(decide=self.decide, specialize=None)
        return GradientTransformation(self.init, self.update, self.apply, needs)

    def on(self, tree: PyTree) -> GradientTransformation:
        """Returns the rule for one tree, with a label for each leaf."""
        paths, treedef = tree_paths(tree), tree_flatten(tree)[1]
        return multi_transform(dict.fromkeys(paths, self.tx), tree_unflatten(treedef, paths))

    def decide(self, params: Params) -> GradientTransformation:
        return decided(self.on(params), params)

    def init(self, params: Params) -> OptState:
        return self.on(params).init(params)

    def update(
        self, updates: Updates, state: OptState, params: Params = None, *, specs: Specs = None
    ) -> tuple[Updates, OptState]:
        return self.on(updates).update(updates, state, params, specs=specs)

    @torch.no_grad()
    def apply(self, grads: Updates, state: OptState, params: Params, *, specs: Specs = None) -> tuple[Params, OptState]:
        return inplace(self.on(params))(grads, state, params, specs=specs)
