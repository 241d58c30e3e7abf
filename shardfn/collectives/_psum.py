"""Reductions over an axis, and the cast that is the transpose of a sum: `psum`, `pmean`, `pmax`, `pvary`."""

import torch
from torch import Tensor

from shardfn.core import Axes, PyTree

from ._arguments import map_tensors
from ._axis_group import axis_group_along
from ._primitive import Call, bind
from ._remat_results import as_one


def psum(x: PyTree, axis: Axes) -> PyTree:
    """Returns the sum over the ranks along `axis`: `V -> I`.

        NCCL: all_reduce.  Slow spec: `[sum(blocks)] * n`.  Layout: `A{U_axis} -> A`.

        [A] [B]  =>  [A + B] [A + B]

    Transpose: `pvary`. The cotangent of an invariant value is invariant, and counts once: a loss that ends in `psum`
    has the gradient of the sum, not n times the gradient.

    When: all ranks need the whole sum. When each rank goes on with a block, `psum_scatter` sends half the bytes.

    Args:
        x: a tensor, or a tree of tensors, of one shape on all ranks. Booleans are counted, as by `torch.sum` (int64).
        axis: mesh axes. None, a missing axis and an axis of size 1 are the identity.

    Returns:
        A tree like `x`.

    Raises:
        ValueError: an axis is neither in the mesh nor a house name, or is named twice.
        TypeError: a leaf is not a tensor.
        AxisTypeError: in `shard_map` or a loss, a leaf varies along some of several axes but not along all, so that the
            leaf would be counted once a rank there.

    Example:
        >>> psum(torch.tensor([1.0, 2.0]), "dp")
        tensor([1., 2.])
    """
    line = axis_group_along(axis)

    def sum_leaf(t: Tensor) -> Tensor:
        t = t.long() if t.dtype == torch.bool else t
        return t if line is None else bind(t, Call("psum", line))

    return map_tensors("psum", sum_leaf, x)


def pmean(x: PyTree, axis: Axes) -> PyTree:
    """Returns the mean over the ranks along `axis`: `V -> I`, `psum(x) / n`.

        NCCL: all_reduce.  Slow spec: `[sum(blocks) / n] * n`.

        [A] [B]  =>  [(A + B) / 2] [(A + B) / 2]

    Transpose: `pvary(y) / n`.

    When: ranks hold equally many rows. With unequal numbers, for example 3 and 5 rows, sum totals and weights
    separately and divide once.

    Args:
        x: a tensor, or a tree of tensors, of one shape on all ranks. Integers give the default float.
        axis: mesh axes. None, a missing axis and an axis of size 1 are the identity.

    Returns:
        A tree like `x`.

    Raises:
        ValueError: an axis is neither in the mesh nor a house name, or is named twice.
        TypeError: a leaf is not a tensor.

    Example:
        >>> pmean({"loss": torch.tensor(3.0)}, "dp")
        {'loss': tensor(3.)}
    """
    line = axis_group_along(axis)

    def average_leaf(t: Tensor) -> Tensor:
        if line is None:
            return t if t.is_floating_point() or t.is_complex() else t / 1
        size = line.size
        return as_one(lambda: psum(t, axis) / size)

    return map_tensors("pmean", average_leaf, x)


def pmax(x: PyTree, axis: Axes) -> PyTree:
    """Returns the elementwise maximum over the ranks along `axis`: `V -> I`.

        NCCL: all_reduce (max).  Slow spec: `[max(blocks)] * n`.

        [A] [B]  =>  [max(A, B)] [max(A, B)]

    A NaN on one rank gives NaN on all, on every backend, as in JAX.

    Not differentiable: the maximum is nonlinear, and its gradient is an error. The minimum is `-pmax(-x)`.

    When: for example the shift of a softmax over sharded logits (`pmax(x.detach(), axis)`), a scale that ranks share, a
    flag.

    Args:
        x: a tensor, or a tree of tensors, of one shape on all ranks.
        axis: mesh axes. None, a missing axis and an axis of size 1 are the identity.

    Returns:
        A tree like `x`.

    Raises:
        ValueError: an axis is neither in the mesh nor a house name, or is named twice.
        TypeError: a leaf is not a tensor.
        NotImplementedError: a gradient is asked for (raised in the backward, or in a jvp).

    Example:
        >>> pmax(torch.tensor([1, 5]), "tp")
        tensor([1, 5])
    """
    line = axis_group_along(axis)

    def max_leaf(t: Tensor) -> Tensor:
        if line is None:
            return t
        if t.dtype != torch.bool:
            return bind(t, Call("pmax", line))
        # Backends have no maximum of booleans. "any" is the maximum of bytes.
        call = Call("pmax", line)
        return as_one(lambda: bind(t.byte(), call).bool())

    return map_tensors("pmax", max_leaf, x)


def pvary(x: PyTree, axis: Axes) -> PyTree:
    """Returns the identity that declares an invariant value varying: `I -> V`.

        NCCL: nothing forward, all_reduce backward.  Slow spec: `blocks`.

        [A] [A]  =>  [A] [A]

    Transpose: `psum`. Each rank's use of `x` gives a part of its gradient. The parts are summed.

    When: an invariant value (replicated weights, activations between tensor-parallel layers) meets a varying value.

    Args:
        x: a tensor, or a tree of tensors, equal on all ranks.
        axis: mesh axes. None, a missing axis and an axis of size 1 are the identity.

    Returns:
        A tree like `x`.

    Raises:
        ValueError: an axis is neither in the mesh nor a house name, or is named twice.
        TypeError: a leaf is not a tensor.

    Example:
        >>> pvary([torch.tensor(1)], "tp")
        [tensor(1)]
    """
    line = axis_group_along(axis)
    return map_tensors("pvary", lambda t: t if line is None else bind(t, Call("pvary", line)), x)
