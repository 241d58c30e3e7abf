"""Weighted sums of rows by number, and the dot products in the derivative."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from shardfn.kernels._arguments import check_dtype, check_shape
from shardfn.kernels._dispatch import implementation
from shardfn.kernels._library import define, map_rows, refuse_backward

from ._values import wide


def gather_rows(
    x: Float[Tensor, "n d"], index: Int[Tensor, "m j"], weights: Float[Tensor, "rows choices"] | None = None
) -> Float[Tensor, "m d"]:
    """Returns rows: row i is the sum over j, in order, of `weights[i, j] * x[index[i, j]]`.

    An index of -1 adds nothing.

        out[i] = w[i, 0] x[index[i, 0]] + w[i, 1] x[index[i, 1]] + ...

    Each row of the result is written by a single thread, and each product and each sum is rounded separately, so
    results have the same bits on any number of threads. A row of indices [-1, -1], for example, is exact zeros,
    whatever x holds. Tensors of 16 bits are summed in float32. `nn.moe.dispatch` and `nn.moe.combine` are `gather_rows`
    with derivatives.

    Args:
        x: rows, of any floating-point dtype.
        index: numbers of rows of `x`, or -1.
        weights: weights in any floating-point dtype, converted to the dtype of the sums. None means weights of 1.

    Raises:
        TypeError: `x` or `weights` is not floating point, or `index` is not int64.
        ValueError: shapes do not fit.
        IndexError: on a CPU, an index is not from -1 to n - 1. On other devices such an index adds nothing.
        NotImplementedError: in a backward.

    Example:
        >>> x = torch.tensor([[1.0, 2.0], [10.0, 20.0]])
        >>> gather_rows(x, torch.tensor([[1, 0], [-1, 1], [-1, -1]]))
        tensor([[11., 22.],
                [10., 20.],
                [ 0.,  0.]])
    """
    _check_float("x", x)
    check_dtype("index", index, torch.int64)
    if weights is not None:
        _check_float("weights", weights)
        check_shape("weights", weights, tuple(index.shape), "one for each index")
    return torch.ops.shardfn_kernels.gather_rows(x, index, weights)


def row_dots(
    x: Float[Tensor, "n d"], y: Float[Tensor, "rows width"], index: Int[Tensor, "m j"]
) -> Float[Tensor, "m j"]:
    """Returns the dot products of `x[index[i, j]]` and `y[i]`, or 0 where an index is -1.

    The products are the derivative of `gather_rows` with regard to the weights. Results are float32 for tensors of 16
    bits, else in the dtype of `x`. Results have the same bits on any number of threads, and implementations agree up to
    rounding.

    Args:
        x: rows, of any floating-point dtype.
        y: a row for each row of `index`, of the same dtype.
        index: numbers of rows of `x`, or -1.

    Raises:
        TypeError: for other dtypes.
        ValueError: shapes do not fit.
        IndexError: on a CPU, an index is not from -1 to n - 1. On other devices such an index gives 0.
        NotImplementedError: in a backward.

    Example:
        >>> x = torch.tensor([[1.0, 2.0], [10.0, 20.0]])
        >>> row_dots(x, torch.tensor([[1.0, 1.0], [0.0, 1.0]]), torch.tensor([[1, -1], [0, 1]]))
        tensor([[30.,  0.],
                [ 2., 20.]])
    """
    _check_float("x", x)
    check_dtype("y", y, x.dtype)
    check_dtype("index", index, torch.int64)
    check_shape("y", y, (index.shape[0], x.shape[1]), "a row for each row of the index, as long as those of x")
    return torch.ops.shardfn_kernels.row_dots(x, y, index)


def _check_float(name: str, x: Tensor) -> None:
    if not x.is_floating_point():
        raise TypeError(f"{name} must be of floating-point numbers, got {x.dtype}. Convert {name}")


def _gather_rows(x: Tensor, index: Tensor, weights: Tensor | None) -> Tensor:
    run = implementation("gather_rows", "gather_rows", x.device)
    factors = None if weights is None else weights.to(wide(x.dtype)).contiguous()
    return run(x.contiguous(), index.contiguous(), factors)


def _row_dots(x: Tensor, y: Tensor, index: Tensor) -> Tensor:
    return implementation("gather_rows", "row_dots", x.device)(x.contiguous(), y.contiguous(), index.contiguous())


def _gather_scratch(x: Tensor, index: Tensor, weights: Tensor | None) -> int:
    """Bytes of copies in float32 of tensors of 16 bits, and of the result."""
    numbers = x.numel() + index.shape[0] * x.shape[1] if x.element_size() < 4 else 0
    return 4 * (numbers + (index.numel() if weights is not None and weights.element_size() < 4 else 0))


def _dots_scratch(x: Tensor, y: Tensor, index: Tensor) -> int:
    del index
    return 4 * (x.numel() + y.numel()) if x.element_size() < 4 else 0


define(
    "gather_rows(Tensor x, Tensor index, Tensor? weights) -> Tensor",
    _gather_rows,
    lambda x, index, weights: x.new_empty(index.shape[0], x.shape[1]),
    scratch=_gather_scratch,
)
define(
    "row_dots(Tensor x, Tensor y, Tensor index) -> Tensor",
    _row_dots,
    lambda x, y, index: x.new_empty(tuple(index.shape), dtype=wide(x.dtype)),
    scratch=_dots_scratch,
)
for _name in ("gather_rows", "row_dots"):
    map_rows(_name, 0)
    refuse_backward(_name, "use nn.moe.dispatch and nn.moe.combine, or detach its arguments.")
