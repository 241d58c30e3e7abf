"""Linear maps and table look-up.

B batch, T tokens, D features in, F features out, V vocabulary.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from shardfn.collectives import axis_size
from shardfn.core import Axes

from ._batch_invariant import AnyWeight, BatchInvariantWeight, linear_of, rows_of
from ._parallel import check_block, leave_parallel, rank_range


def linear(
    x_D: Float[Tensor, "*batch d"], w_FD: Float[AnyWeight, "f d"], b_F: Float[Tensor, " f"] | None = None
) -> Float[Tensor, "*batch f"]:
    """Returns the affine map y = x w^T + b, with the weight as [out, in].

    Args:
        x_D: any leading dims.
        w_FD: weight.
        b_F: bias, or None.

    Returns:
        The leading dims of `x_D` and F.

    Example:
        >>> import torch
        >>> linear(torch.ones(2, 3), torch.ones(4, 3)).shape
        torch.Size([2, 4])
    """
    return linear_of(x_D, w_FD, b_F)


def embedding(
    tokens: Int[Tensor, "*batch"],
    w_VD: Float[AnyWeight, "v d"],
    *,
    axis: Axes = None,
    vocab_size: int | None = None,
    sequence: int | None = None,
) -> Float[Tensor, "*batch2 d"]:
    """Returns rows `tokens[...]` of the table. With `axis`, the rows of the table are cut over ranks.

    Each rank looks up the local rows, and the sum over ranks is the result: for all tokens, or with `sequence` for the
    rank's tokens.

    Args:
        tokens: indices in [0, V), of any shape, the same on all ranks of `axis`.
        w_VD: table, or the rank's block of the table.
        axis: mesh axes along which V is cut. None means a single device.
        vocab_size: V, needed where the axis has several ranks.
        sequence: T where each rank is to have its part of the last dim of `tokens`.

    Returns:
        The shape of `tokens` and D.

    Raises:
        ValueError: the table is not the rank's block of `vocab_size` rows.
        IndexError: a token is outside the table (on CPU; CUDA asserts on the device).

    Example:
        >>> import torch
        >>> embedding(torch.tensor([1, 0]), torch.tensor([[1.0], [2.0]])).tolist()
        [[2.0], [1.0]]
    """
    if axis_size(axis) == 1:
        return rows_of(tokens, w_VD)
    start, stop, size = rank_classes("embedding: w_VD", w_VD.shape[0], vocab_size, axis)
    if start == stop:  # not a lookup, but a function of the block: all ranks take transposes of the function
        block = w_VD.source if isinstance(w_VD, BatchInvariantWeight) else w_VD
        rows = tokens.new_zeros(w_VD.shape[1], dtype=w_VD.dtype) if block is None else block.sum(0)
        rows = rows.expand(*tokens.shape, w_VD.shape[1]).neg()
    else:
        index, missing = rank_index(tokens, start, stop, size)
        rows = rows_of(index, w_VD).masked_fill(missing[..., None], -0.0)  # with this summand -0 stays -0
    return leave_parallel(rows, axis, sequence)


def rank_classes(name: str, rows: int, vocab_size: int | None, axis: Axes) -> tuple[int, int, int]:
    """Returns the start and stop of the rank's classes, and the number of all classes.

    Raises:
        ValueError: `vocab_size` is missing, or the block has the wrong number of rows.
    """
    check_block(name, (rows,), vocab_size, axis, option="vocab_size")
    size = rows if vocab_size is None else vocab_size
    return *rank_range(size, axis), size


def rank_index(tokens: Tensor, start: int, stop: int, size: int) -> tuple[Tensor, Tensor]:
    """Returns indices into the rank's rows, and a mask of the other ranks' tokens.

    Tokens outside of the table go unchanged to the first or the last rank. The lookup there raises.
    """
    below = tokens.lt(start) if start > 0 else None
    above = tokens.ge(stop) if stop < size else None
    missing = below if above is None else above if below is None else below | above
    missing = torch.zeros_like(tokens, dtype=torch.bool) if missing is None else missing
    return (tokens - start).masked_fill(missing, 0), missing
