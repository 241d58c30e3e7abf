"""Blocks of one dim to blocks of another: `all_to_all`."""

import torch
from jaxtyping import Shaped

from shardfn.core import Axes

from ._arguments import joined_size, tensor_dim
from ._axis_group import AxisGroup, axis_group_along
from ._primitive import Call, bind


def all_to_all(
    x: Shaped[torch.Tensor, "..."], axis: Axes, *, split_dim: int, concat_dim: int, size: int | None = None
) -> Shaped[torch.Tensor, "..."]:
    """Cuts `split_dim`, sends block i to rank i, and joins the blocks that arrive along `concat_dim`: `V -> V`.

        NCCL: all_to_all.  Slow spec: `out[r] = cat([x.chunk(n, split_dim)[r] for x in blocks], concat_dim)`.
        Layout: `A[I_axis, J] -> A[I, J_axis]` with split_dim = J, concat_dim = I.

        [A, B] [C, D]  =>  [A; C] [B; D]

    Transpose: `all_to_all` with the two dims (and their global sizes) swapped.

    When: a sharding moves from one dim to another (sequence to heads, tokens to experts), at 1 / n of a gather's bytes.

    Args:
        x: whole along `split_dim`, a block along `concat_dim`.
        axis: mesh axes, major to minor. None, a missing axis and an axis of size 1 are the identity.
        split_dim: the dim that is cut. Any size: blocks are those of `torch.chunk`.
        concat_dim: the dim that is joined. May be `split_dim`: blocks are exchanged and the shape stays. The axis must
            then divide the dim.
        size: the global size of `concat_dim`, needed where the axis does not divide it. Default: n times this block.
            The transpose knows the size of `split_dim` from `x`.

    Returns:
        A block along `split_dim`, whole along `concat_dim`.

    Raises:
        ValueError: unknown axis, a dim out of range, a block whose length does not match `size`, or one dim for both
            that the axis does not divide.

    Example:
        >>> all_to_all(torch.ones(4, 6), "sp", split_dim=1, concat_dim=0).shape
        torch.Size([4, 6])
    """
    line = axis_group_along(axis)
    split_dim = tensor_dim("all_to_all", x, split_dim, "split_dim")
    concat_dim = tensor_dim("all_to_all", x, concat_dim, "concat_dim")
    if split_dim == concat_dim:
        size = _exchanged_size(x, line, split_dim, size)
    else:
        size = joined_size("all_to_all", x, line, concat_dim, size)
    if line is None:
        return x
    return bind(x, Call("all_to_all", line, split_dim, x.shape[split_dim], concat_dim, size))


def _exchanged_size(x: Shaped[torch.Tensor, "..."], line: AxisGroup | None, dim: int, size: int | None) -> int:
    n, rows = (1 if line is None else line.size), x.shape[dim]
    if size is not None:
        raise ValueError(
            f"all_to_all: size={size} has no meaning where split_dim and concat_dim are both {dim}. Drop it."
        )
    if rows % n:
        raise ValueError(
            f"all_to_all: split_dim and concat_dim are both {dim}, of which {n} ranks must divide the size, got {rows}."
            f" Pad it to {-(-rows // n) * n}."
        )
    return rows
