"""Checks of the collectives' arguments, before any message.

Every rank fails in the same way, and no rank is left waiting.
"""

from collections.abc import Callable
from typing import Any

from jaxtyping import Shaped
from torch import Tensor

from shardfn.core import PyTree, raise_all, tree_flatten, tree_map, tree_paths

from ._axis_group import AxisGroup


def map_tensors(op: str, f: Callable[[Tensor], Tensor], tree: PyTree) -> PyTree:
    """Returns the tree of `f` of each leaf.

    Raises:
        TypeError: names every leaf that is not a tensor.
    """
    if isinstance(tree, Tensor):
        return f(tree)
    leaves: list[Any] = tree_flatten(tree)[0]
    if not all(isinstance(leaf, Tensor) for leaf in leaves):
        pairs = zip(tree_paths(tree, "x"), leaves, strict=True)
        bad = [f"{path} is {leaf!r}. Wrap it in torch.tensor" for path, leaf in pairs if not isinstance(leaf, Tensor)]
        raise_all(TypeError, f"{op} takes tensors:", bad)
    return tree_map(f, tree)


def tensor_dim(op: str, x: Shaped[Tensor, "..."], dim: int, name: str = "dim") -> int:
    """Returns `dim` counted from the front.

    Raises:
        ValueError: `x` has no dim `dim`.
    """
    if -x.ndim <= dim < x.ndim:
        return dim % x.ndim
    remedy = f"Use {-x.ndim} to {x.ndim - 1}" if x.ndim else "Unsqueeze it first"
    raise ValueError(f"{op}: {name}={dim} is out of range for x of shape {tuple(x.shape)}. {remedy}.")


def joined_size(op: str, x: Shaped[Tensor, "..."], line: AxisGroup | None, dim: int, size: int | None) -> int:
    """Returns the global size along a dim on which blocks are joined.

    Without `size`, every block is as long as this one.

    Raises:
        ValueError: this rank's block is not of the length that follows from `size`.
    """
    n, index = (1, 0) if line is None else (line.size, line.index)
    if size is None:
        return n * x.shape[dim]
    want = size if line is None else line.lengths(size)[index]
    if x.shape[dim] != want:
        raise ValueError(
            f"{op}: size={size} over {n} rank{'s' * (n > 1)} gives index {index} a block of {want} along dim {dim}, but"
            f" got x of shape {tuple(x.shape)}. Pass the global size of that dim, or cut x as torch.chunk does."
        )
    return size
