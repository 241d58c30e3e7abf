"""The widest copy of each parameter of a state."""

from typing import Any

from shardfn.core import PyTree, tree_entries, tree_flatten, tree_leaves, tree_unflatten
from shardfn.optim import MasterState

from ._state import TrainState


def widest(state: TrainState) -> PyTree:
    """Returns the parameters of a state, each as its master copy where the optimizer keeps one."""
    nodes = tree_leaves(state.opt_state, is_leaf=lambda x: isinstance(x, MasterState))
    wide: dict[Any, Any] = {}
    for node in nodes:
        if isinstance(node, MasterState):
            wide |= dict(zip(tree_entries(node.master), tree_leaves(node.master), strict=True))
    leaves, treedef = tree_flatten(state.params)
    pairs = zip(tree_entries(state.params), leaves, strict=True)
    return tree_unflatten(treedef, [wide.get(path, x) for path, x in pairs])
