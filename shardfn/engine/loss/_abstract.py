"""Abstract states: leaves without data, for which steps are lowered."""

from typing import Any

import torch

from shardfn._torch import FAKE, FakeTensor, dispatch_mode
from shardfn.capture import fakes
from shardfn.core import PyTree, tree_flatten, tree_unflatten


def is_abstract(leaves: list[Any]) -> bool:
    """Returns whether any of these tensors has no data, or torch's fake mode is on, in which no tensor has."""
    active = dispatch_mode(FAKE) is not None
    return active or any(isinstance(x, FakeTensor) or x.device.type == "meta" for x in leaves)


def abstract_leaves(tree: PyTree, device: torch.device) -> PyTree:
    """Returns the tree, with its tensors replaced by tensors without data.

    Tensors on "meta" count as being on `device`.
    """
    leaves, treedef = tree_flatten(tree)
    return tree_unflatten(treedef, fakes(leaves, device))
