"""Weighted sums of rows by number, and the dot products in the derivative."""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ._arguments import check_dtype, check_floating, check_shape, threads_for
from ._build import function
from ._op import DimLabels, KernelOp

# Elements read up to which a second thread does not pay.
FEW = 1 << 17
_SOURCE = "_gather_rows.cpp"
_REMEDY = "use nn.moe.dispatch and nn.moe.combine, or detach its arguments."


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
    check_floating("x", x)
    check_dtype("index", index, torch.int64)
    if weights is not None:
        check_floating("weights", weights)
        check_shape("weights", weights, tuple(index.shape), "one for each index")
    return GATHER_ROWS(x, index, weights)


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
    check_floating("x", x)
    check_dtype("y", y, x.dtype)
    check_dtype("index", index, torch.int64)
    check_shape("y", y, (index.shape[0], x.shape[1]), "a row for each row of the index, as long as those of x")
    return ROW_DOTS(x, y, index)


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype in which numbers of a dtype are added up."""
    return torch.float32 if dtype.itemsize < 4 else dtype


# The definitions.


def _gather_by_torch(x: Tensor, index: Tensor, weights: Tensor | None) -> Tensor:
    _check_index(x, index)
    out = x.new_zeros(index.shape[0], x.shape[1], dtype=sum_dtype(x.dtype))
    begun = torch.zeros_like(index[:, :1], dtype=torch.bool)
    for j in range(index.shape[1]):
        at = index[:, j]
        term = x[at.clamp(min=0)].to(out.dtype) if x.shape[0] else torch.zeros_like(out)
        term = term if weights is None else term * weights[:, j, None].to(out.dtype)
        named = at[:, None] >= 0
        out = torch.where(named, torch.where(begun, out + term, term), out)
        begun = begun | named
    return out.to(x.dtype)


def _dot_by_torch(x: Tensor, y: Tensor, index: Tensor) -> Tensor:
    _check_index(x, index)
    out = x.new_zeros(tuple(index.shape), dtype=sum_dtype(x.dtype))
    for j in range(index.shape[1] if x.shape[0] else 0):
        at = index[:, j]
        dots = (x[at.clamp(min=0)].to(out.dtype) * y.to(out.dtype)).sum(1)
        out[:, j] = torch.where(at >= 0, dots, 0)
    return out


def _check_index(x: Tensor, index: Tensor) -> None:
    if index.device.type == "cpu" and bool(((index < -1) | (index >= x.shape[0])).any()):
        _refuse_index(x.shape[0])


def _refuse_index(num: int) -> None:
    raise IndexError(f"an index must be from -1 to {num - 1}, the last row of x. -1 adds nothing")


# In C++.


def _gather_natively(x: Tensor, index: Tensor, weights: Tensor | None) -> Tensor:
    rows, m = x.to(sum_dtype(x.dtype)), index.shape[0]
    factors = None if weights is None else weights.to(rows.dtype)
    out = rows.new_empty(m, x.shape[1])
    _call_rows("gather_rows", rows, index, factors, out)
    return out.to(x.dtype)


def _dot_natively(x: Tensor, y: Tensor, index: Tensor) -> Tensor:
    rows, others = (t.to(sum_dtype(x.dtype)) for t in (x, y))
    out = rows.new_empty(tuple(index.shape))
    _call_rows("row_dots", rows, index, others, out)
    return out


def _call_rows(name: str, rows: Tensor, *rest: Any) -> None:
    index, sizes = rest[0], (*rows.shape, *rest[0].shape)
    kind, bad = "float" if rows.dtype == torch.float32 else "double", index.new_zeros(1)
    threads = threads_for(index.numel() * rows.shape[1], FEW)
    at = (None if t is None else t.data_ptr() for t in (rows, *rest))
    function(_SOURCE, f"{name}_{kind}", "p" * 4 + "i" * 5 + "p")(*at, *sizes, threads, bad.data_ptr())
    if bad.item():
        _refuse_index(rows.shape[0])


def count_gather_scratch(x: Tensor, index: Tensor, weights: Tensor | None) -> int:
    """Returns the bytes of copies in float32 of tensors of 16 bits, and of the result."""
    numbers = x.numel() + index.shape[0] * x.shape[1] if x.element_size() < 4 else 0
    return 4 * (numbers + (index.numel() if weights is not None and weights.element_size() < 4 else 0))


def _dot_scratch(x: Tensor, y: Tensor, index: Tensor) -> int:
    del index
    return 4 * (x.numel() + y.numel()) if x.element_size() < 4 else 0


GATHER_ROWS = KernelOp(
    schema="gather_rows(Tensor x, Tensor index, Tensor? weights) -> Tensor",
    abstract=lambda x, index, weights: x.new_empty(index.shape[0], x.shape[1]),
    reference=_gather_by_torch,
    native=_gather_natively,
    source=_SOURCE,
    triton="_gather_rows_triton.gather_rows",
    no_derivative=_REMEDY,
    mapped=0,
    scratch=count_gather_scratch,
    sharding=DimLabels(".d,m.,m.->md", linear=(0, 2)),
    rows="places",
)
ROW_DOTS = KernelOp(
    schema="row_dots(Tensor x, Tensor y, Tensor index) -> Tensor",
    abstract=lambda x, y, index: x.new_empty(tuple(index.shape), dtype=sum_dtype(x.dtype)),
    reference=_dot_by_torch,
    native=_dot_natively,
    source=_SOURCE,
    triton="_gather_rows_triton.row_dots",
    no_derivative=_REMEDY,
    mapped=0,
    flops=lambda x, y, index: 2 * index.numel() * y.shape[1],
    scratch=_dot_scratch,
    sharding=DimLabels(".d,md,m.->m.", linear=(0, 1), sums=True),
)
