"""Leaves that several functions of a loss use, such as tied embeddings: each function has a separate tensor of a leaf.

On several ranks of a pipeline a rank sums the gradients of the rank's functions over all microbatches, and then ranks
add up. On one device autograd adds the gradients of all functions in each microbatch. So the bits differ. With
canonical sums the uses are separate on any number of ranks:

    gradient of a leaf = sum over the chunks of `first` + sum over the chunks of `last`
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

from shardfn.core import Ambient, PyTree, tree_map

# Numbers of the functions of a pipeline. Function i of a list has number i + 1.
FIRST, LAYERS, LAST = 0, 1, -1

# By number of a function, from the `id` of a leaf of the loss to the tensor for the function.
LeavesByUse = Mapping[int, Mapping[int, Any]]


class LeafUses(NamedTuple):
    """The functions that may use a leaf.

    Attributes:
        functions: numbers of the functions, in the order in which their gradients are added.
        here: whether this rank runs the function.
        refused: numbers of functions that must not use the leaf, since ranks run different parts of them.
    """

    functions: tuple[int, ...] = (FIRST,)
    here: tuple[bool, ...] = (True,)
    refused: tuple[int, ...] = ()


_SEPARATE = Ambient[LeavesByUse]("separate tensors of leaves that several functions use", by_thread=True)


def separating(leaves: LeavesByUse) -> AbstractContextManager[Any]:
    """Gives each function separate tensors of leaves, while the context is open."""
    return _SEPARATE.bound(leaves)


def is_separating() -> bool:
    """Returns whether functions get separate tensors of leaves."""
    return _SEPARATE.innermost() is not None


def leaves_for(function: int, tree: PyTree) -> PyTree:
    """Returns a tree of leaves with the tensors for a function. Outside of `separating`, returns the tree.

    Example:
        >>> leaves_for(LAST, {"w": 1.0})
        {'w': 1.0}
    """
    bound = _SEPARATE.innermost()
    own = None if bound is None else bound.get(function)
    return tree_map(lambda x: own.get(id(x), x), tree) if own else tree
