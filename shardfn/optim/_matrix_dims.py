"""Finds the leaves that are matrices, and the dims of the matrices."""

import re
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from shardfn.core import PyTree, tree_flatten, tree_map, tree_paths, tree_unflatten

from ._types import Params
from ._whole_matrices import Matrices


@dataclass(frozen=True)
class MatrixDims:
    """Dims of a leaf that form a matrix. All other dims count matrices.

    Attributes:
        outputs: dims that form the rows: the output features of the matrix.
        inputs: dims that form the columns: the input features of the matrix.

    Example:
        >>> linear, conv = MatrixDims(), MatrixDims(outputs=(0,), inputs=(1, 2, 3))
    """

    outputs: tuple[int, ...] = (-2,)
    inputs: tuple[int, ...] = (-1,)


# Names of leaves that are never hidden matrices: embeddings, heads, norms and biases, which may be stacked.
_NOT_HIDDEN = re.compile(
    r"embed|\b(wte|wpe|shared|position|head|lm_head|score|classifier|bias|b[qkvo]?|\w+_b|\w*norm\w*|ln_\w+)\b"
)


def hidden_matrices(params: Params) -> PyTree:
    """Returns the leaves that `muon` makes orthogonal by default: a tree like params of `MatrixDims`, or False.

    A leaf of at least two dims is included, unless the path has the name of an embedding, a head, a norm or a bias,
    such as "lm_head". A leaf [out, in, height, width] is a single matrix. A leaf of three dims is a stack of matrices
    [out, in].

    Args:
        params: tree of leaves. Only paths and shapes are used.

    Example:
        >>> import torch
        >>> hidden_matrices({"embed": torch.ones(9, 4), "w": torch.ones(4, 4), "lm_head": torch.ones(9, 4)})
        {'embed': False, 'w': MatrixDims(outputs=(-2,), inputs=(-1,)), 'lm_head': False}
    """
    leaves, treedef = tree_flatten(params)
    pairs = zip(tree_paths(params), leaves, strict=True)
    return tree_unflatten(
        treedef, [x.ndim > 1 and not _NOT_HIDDEN.search(path) and default_dims(x) for path, x in pairs]
    )


def default_dims(x: Tensor) -> MatrixDims:
    """Returns the dims of a leaf, chosen by shape."""
    return MatrixDims((0,), (1, 2, 3)) if x.ndim == 4 else MatrixDims()


def all_matrices(params: Params) -> PyTree:
    """Returns the dims of every leaf, where all are matrices."""
    return tree_map(default_dims, params)


def as_matrices(path: str, x: Any, dims: MatrixDims) -> Matrices:
    """Returns a leaf as matrices.

    Raises:
        ValueError: the dims do not form matrices.
    """
    n = len(x.shape)
    named = (*dims.outputs, *dims.inputs)
    rows, columns = (tuple(d % n for d in own) if n else () for own in (dims.outputs, dims.inputs))
    if not rows or not columns or len({*rows, *columns}) < len(named) or any(not -n <= d < n for d in named):
        raise ValueError(
            f"muon: {path} of shape {tuple(x.shape)} is not made of matrices by {dims}. Give its dims by"
            " matrices=, or False to leave it to the other rule."
        )
    return Matrices(tuple(x.shape), rows, columns)
