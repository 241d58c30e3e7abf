"""Wholes to blocks: `psum_scatter`, `take_own_block`."""

import torch
from jaxtyping import Shaped
from torch import Tensor

from shardfn.core import Axes

from ._arguments import tensor_dim
from ._axis_group import axis_group_along
from ._primitive import Call, bind


def psum_scatter(x: Shaped[Tensor, "..."], axis: Axes, *, dim: int = 0) -> Shaped[Tensor, "..."]:
    """This rank's block, along `dim`, of the sum over the ranks along `axis`: `V -> V`.

        NCCL: reduce_scatter.  Slow spec: `sum(blocks).chunk(n, dim)`.  Layout: `A[I]{U_axis} -> A[I_axis]`.

        [A, B] [C, D]  =>  [A + C] [B + D]

    Transpose: `all_gather`, of the same global size.

    On gloo the blocks are exchanged and summed in the order of ranks, 16-bit floats in 32 bits. Other backends sum by
    their native operation.

    When: each rank goes on with a block of the sum, for example ZeRO's gradients or sequence-parallel activations.

    Args:
        x: this rank's summand, of one shape on all ranks. Booleans are counted (int64).
        axis: mesh axes, major to minor. None, a missing axis and an axis of size 1 are the identity.
        dim: the dim that is cut. Any size: blocks are those of `torch.chunk` (with several axes, the major axis cuts
            first), the last blocks short or empty. `all_gather(..., size=x.shape[dim])` joins the blocks again.

    Returns:
        This rank's block of the sum.

    Raises:
        ValueError: unknown axis, or `dim` out of range.

    Example:
        >>> psum_scatter(torch.tensor([1, 2, 3]), "dp")
        tensor([1, 2, 3])
    """
    line = axis_group_along(axis)
    dim = tensor_dim("psum_scatter", x, dim)
    x = x.long() if x.dtype == torch.bool else x
    return x if line is None else bind(x, Call("psum_scatter", line, dim, x.shape[dim]))


def take_own_block(x: Shaped[Tensor, "..."], axis: Axes, *, dim: int = 0) -> Shaped[Tensor, "..."]:
    """Returns this rank's block along `dim` of a value that all ranks hold: `I -> V`.

        NCCL: nothing forward, all_gather backward.  Slow spec: `blocks[0].chunk(n, dim)`.  Layout: `A[I] -> A[I_axis]`.

        [A, B] [A, B]  =>  [A] [B]

    Transpose: `all_gather_invariant`, of the same global size.

    When: ranks share out work on a single value, for example rows of an invariant tensor.

    Args:
        x: the whole, equal on all ranks.
        axis: mesh axes, major to minor. None, a missing axis and an axis of size 1 are the identity.
        dim: the dim that is cut, as `psum_scatter` cuts it.

    Returns:
        A copy of this rank's block.

    Raises:
        ValueError: unknown axis, or `dim` out of range.

    Example:
        >>> take_own_block(torch.tensor([1, 2, 3]), "dp")
        tensor([1, 2, 3])
    """
    line = axis_group_along(axis)
    dim = tensor_dim("take_own_block", x, dim)
    return x if line is None else bind(x, Call("take_own_block", line, dim, x.shape[dim]))
