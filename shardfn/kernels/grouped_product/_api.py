"""Products of groups of rows with a matrix each."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from shardfn.kernels._arguments import EXACT, check_dtype, check_shape
from shardfn.kernels._dispatch import implementation, implementation_of_rows
from shardfn.kernels._library import define, map_rows, refuse_backward

from ._values import outer_depth, panel_bytes, turns


def grouped_product(
    x: Float[Tensor, "m k"],
    w: Float[Tensor, "groups rows columns"],
    counts: Int[Tensor, " e"],
    *,
    transposed: bool = False,
    batch_invariant: bool = False,
) -> Float[Tensor, "m n"]:
    """Returns the first `counts[0]` rows of `x` times `w[0]`, the next `counts[1]` rows times `w[1]`, and so on.

        torch.cat([rows @ matrix for rows, matrix in zip(x.split(counts), w)])

    For example counts [2, 0, 3] of 7 rows leave a tail of 2 rows. Rows past the sum of the counts are exact zeros. Such
    rows of `x` are not read, and may be uninitialised. Tensors of 16 bits are multiplied in float32. With C++, results
    of float32 and wider have the same bits on any number of threads, and the bits of a row do not depend on the other
    rows. `nn.moe.grouped` is `grouped_product` with derivatives.

    Args:
        x: rows, of any floating-point dtype.
        w: a matrix [k, n] for each group, in the dtype of `x`.
        counts: number of rows of each group, not negative, on the device of `x`. The host of a GPU does not read the
            counts.
        transposed: whether `w` has matrices [n, k], as for `torch.nn.functional.linear`.
        batch_invariant: whether every implementation has the bits of `row_linear` for each row. For float32, or float64
            (slow).

    Raises:
        TypeError: dtypes differ, are not floating point, or `batch_invariant` is asked of another dtype than float32
            and float64.
        ValueError: shapes do not fit. On a CPU, a count is negative, or the counts are more than the rows.
        NotImplementedError: in a backward.

    Example:
        >>> x, w = torch.ones(4, 2), torch.stack([torch.ones(2, 1), 5 * torch.ones(2, 1)])
        >>> grouped_product(x, w, torch.tensor([1, 2])).T
        tensor([[ 2., 10., 10.,  0.]])
    """
    _check_operands("w", x, w, counts)
    if batch_invariant and x.dtype not in EXACT:
        raise TypeError(
            f"x must be float32 or float64 for batch-invariant products, got {x.dtype}. Remove batch_invariant=True"
        )
    at = 2 if transposed else 1
    if w.ndim != 3 or w.shape[at] != x.shape[1]:
        raise ValueError(
            f"w must be of shape (e, {'n, k' if transposed else 'k, n'}) with k = {x.shape[1]}, "
            f"the last dim of x, got {tuple(w.shape)}. Pass transposed={not transposed} for the other layout"
        )
    check_shape("counts", counts, (w.shape[0],), "one for each matrix")
    return torch.ops.shardfn_kernels.grouped_product(x, w, counts, transposed, batch_invariant)


def grouped_outer(
    x: Float[Tensor, "m k"], y: Float[Tensor, "rows n"], counts: Int[Tensor, " e"]
) -> Float[Tensor, "e k n"]:
    """Returns, for each group, the product of the transpose of rows of `x` and rows of `y`, or zeros for no rows.

        torch.stack([a.T @ b for a, b in zip(x.split(counts), y.split(counts))])

    The op is the derivative of `grouped_product` with regard to the matrices. Rows past the sum of the counts are not
    read. Tensors of 16 bits are multiplied in float32.

    Args:
        x: rows, of any floating-point dtype.
        y: a row for each row of `x`, of the same dtype.
        counts: number of rows of each group, not negative, on the device of `x`. The host of a GPU does not read the
            counts.

    Raises:
        TypeError: dtypes differ, or are not floating point.
        ValueError: shapes do not fit. On a CPU, a count is negative, or the counts are more than the rows.
        NotImplementedError: in a backward.

    Example:
        >>> grouped_outer(torch.ones(3, 2), torch.ones(3, 1), torch.tensor([0, 2])).tolist()
        [[[0.0], [0.0]], [[2.0], [2.0]]]
    """
    _check_operands("y", x, y, counts)
    check_shape("y", y, (x.shape[0], *y.shape[1:2]), "a row for each row of x")
    return torch.ops.shardfn_kernels.grouped_outer(x, y, counts)


def _check_operands(name: str, x: Tensor, other: Tensor, counts: Tensor) -> None:
    if not x.is_floating_point():
        raise TypeError(f"x must be of floating-point numbers, got {x.dtype}. Convert x")
    check_dtype(name, other, x.dtype)
    check_dtype("counts", counts, torch.int64)


def _grouped_product(x: Tensor, w: Tensor, counts: Tensor, transposed: bool, exact: bool) -> Tensor:
    name = "grouped_product"
    run = implementation_of_rows(name, name, x) if exact else implementation(name, name, x.device)
    if not w.is_contiguous() and w.mT.is_contiguous():
        w, transposed = w.mT, not transposed
    return run(x.contiguous(), w.contiguous(), counts.contiguous(), transposed, exact)


def _grouped_outer(x: Tensor, y: Tensor, counts: Tensor) -> Tensor:
    run = implementation("grouped_product", "grouped_outer", x.device)
    return run(x.contiguous(), y.contiguous(), counts.contiguous())


def _cast_bytes(*operands: Tensor) -> int:
    """Returns the bytes of float32 copies of 16-bit tensors."""
    return sum(4 * x.numel() for x in operands if x.element_size() < 4)


def _product_scratch(x: Tensor, w: Tensor, counts: Tensor, transposed: bool, exact: bool) -> int:
    del counts, exact
    (m, k), n = x.shape, w.shape[1 if transposed else 2]
    wide = max(x.element_size(), 4)
    casts = _cast_bytes(x) + (4 * m * n if wide > x.element_size() else 0)
    return casts + panel_bytes(m * k * n, k, wide) + (_cast_bytes(w) if w.dtype == torch.float16 else 0)


def _outer_scratch(x: Tensor, y: Tensor, counts: Tensor) -> int:
    (m, k), n = x.shape, y.shape[1]
    wide = max(x.element_size(), 4)
    casts = _cast_bytes(x, y) + (4 * len(counts) * k * n if wide > x.element_size() else 0)
    turned = len(counts) * k * n * x.element_size() if turns(m, k, n, len(counts)) else 0
    return casts + turned + panel_bytes(m * k * n, outer_depth(m), wide)


define(
    "grouped_product(Tensor x, Tensor w, Tensor counts, bool transposed, bool exact) -> Tensor",
    _grouped_product,
    lambda x, w, counts, transposed, exact: x.new_empty(x.shape[0], w.shape[1 if transposed else 2]),
    scratch=_product_scratch,
)
define(
    "grouped_outer(Tensor x, Tensor y, Tensor counts) -> Tensor",
    _grouped_outer,
    lambda x, y, counts: x.new_empty(counts.shape[0], x.shape[1], y.shape[1]),
    scratch=_outer_scratch,
)
for _name in ("grouped_product", "grouped_outer"):
    map_rows(_name, 0)
    refuse_backward(_name, "use nn.moe.grouped, or detach its arguments.")
