"""Plain layers: linear maps, table look-up, and normalisation over the last dim D.

Ba, Kiros, Hinton, Layer Normalization, 2016, https://arxiv.org/abs/1607.06450
Zhang, Sennrich, Root Mean Square Layer Normalization, 2019, https://arxiv.org/abs/1910.07467

B batch, T tokens, D features in, F features out, V vocabulary.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from shardfn.collectives import axis_size
from shardfn.core import Axes

from ._batch_invariant import AnyWeight, BatchInvariantWeight, linear_of, rows_of
from ._parallel import check_block, leave_parallel, rank_range


def layer_norm(
    x_D: Float[Tensor, "*batch d"],
    w_D: Float[Tensor, " d"],
    b_D: Float[Tensor, " d"] | None = None,
    *,
    eps: float = 1e-5,
) -> Float[Tensor, "*batch d"]:
    """Returns layer norm: w (x - mean(x)) / sqrt(var(x) + eps) + b.

    Args:
        x_D: any leading dims.
        w_D: scale. A scale with a wider dtype than x determines the dtype of the computation.
        b_D: shift, or None.
        eps: added to the variance.

    Example:
        >>> import torch
        >>> layer_norm(torch.tensor([-1.0, 1.0]), torch.ones(2), eps=0.0).tolist()
        [-1.0, 1.0]
    """
    return _apply_to_rows(w_D, lambda x_D: F.layer_norm(x_D, x_D.shape[-1:], w_D, b_D, eps), x_D)


def rms_norm(
    x_D: Float[Tensor, "*batch d"], w_D: Float[Tensor, " d"], *, eps: float = 1e-5
) -> Float[Tensor, "*batch d"]:
    """Returns the root mean square norm: w x / sqrt(mean(x^2) + eps).

    Args:
        x_D: any leading dims.
        w_D: scale. A scale with a wider dtype than x determines the dtype of the computation.
        eps: added to the mean square.

    Example:
        >>> import torch
        >>> rms_norm(torch.tensor([2.0, -2.0]), torch.ones(2), eps=0.0).tolist()
        [1.0, -1.0]
    """
    return _apply_to_rows(w_D, lambda x_D: F.rms_norm(x_D, x_D.shape[-1:], w_D, eps), x_D)


def _apply_to_rows(w_D: Tensor, norm: Callable[[Tensor], Tensor], x_D: Tensor) -> Tensor:
    """Returns `norm(x)`. Without a row, returns no row of the norm of a row of zeros.

    A rank without rows of a sequence runs the operations of the other ranks, and the rank's backward needs the same
    leaves in the same order: torch's norms of nothing may leave out the weights.
    """
    if x_D.numel():
        return _apply_in_dtype(w_D, norm, x_D)
    padded = torch.cat([x_D.reshape(0, x_D.shape[-1]), x_D.new_zeros(1, x_D.shape[-1])])
    return _apply_in_dtype(w_D, norm, padded)[:0].view(x_D.shape)


def _apply_in_dtype(w_D: Tensor, norm: Callable[[Tensor], Tensor], x_D: Tensor) -> Tensor:
    """Returns `norm(x)` in the dtype of x, computed in the dtype of the weights. Autocast has separate rules."""
    if x_D.dtype == w_D.dtype or torch.is_autocast_enabled(x_D.device.type):
        return norm(x_D)
    return norm(x_D.to(w_D.dtype)).to(x_D.dtype)


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
