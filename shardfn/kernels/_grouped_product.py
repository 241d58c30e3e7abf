"""Products of groups of rows with a matrix each."""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ._arguments import check_dtype, check_floating, check_shape, threads_for
from ._build import function
from ._op import EXACT, DimLabels, KernelOp
from ._row_linear import compute_rows, pack_rows

# Chunks of k, with sums added by a tree, where a row must have the bits of `row_linear`.
CHUNKS = 8
# Number of columns computed together.
PANEL = 64
# Multiply-adds up to which a second thread does not pay.
FEW = 1 << 20
# Of `grouped_outer`: rows with separately added products, and columns of x for each turn of a thread.
_DEPTH, _COLUMNS = 512, 504
# Rows of a group from which a transposed copy of the result pays.
_MANY = 4096
_SOURCE = "_grouped_product.cpp"
_WEIGHTS = {torch.float32: "float", torch.bfloat16: "bfloat16", torch.float64: "double"}
_REMEDY = "use nn.moe.grouped, or detach its arguments."


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
    return GROUPED_PRODUCT(x, w, counts, transposed, batch_invariant)


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
    return GROUPED_OUTER(x, y, counts)


def _check_operands(name: str, x: Tensor, other: Tensor, counts: Tensor) -> None:
    check_floating("x", x)
    check_dtype(name, other, x.dtype)
    check_dtype("counts", counts, torch.int64)


def check_counts(counts: Tensor, rows: int) -> int:
    """Checks counts, and returns the largest count. Reads counts on the host, so only for a CPU.

    Raises:
        ValueError: a count is negative, or the counts are more than the rows.
    """
    sizes = counts.tolist()
    if any(size < 0 for size in sizes) or sum(sizes) > rows:
        raise ValueError(f"counts must be sizes of groups of x's {rows} rows, got {sizes}, of sum {sum(sizes)}")
    return max(sizes, default=0)


def lay_out(w: Tensor, transposed: bool) -> tuple[Tensor, bool]:
    """Returns contiguous matrices with the values of w, and whether the matrices are transposed. Copies if needed."""
    if not w.is_contiguous() and w.mT.is_contiguous():
        return w.mT, not transposed
    return w.contiguous(), transposed


# The definitions.


def _multiply_by_torch(x: Tensor, w: Tensor, counts: Tensor, transposed: bool, exact: bool) -> Tensor:
    check_counts(counts, x.shape[0])
    (w, transposed), x = lay_out(w, transposed), x.contiguous()
    matrices = w.mT if transposed else w
    out, start = x.new_zeros(x.shape[0], matrices.shape[2]), 0
    for size, matrix in zip(counts.tolist(), matrices.unbind(), strict=True):
        rows = x[start : start + size]
        out[start : start + size] = _multiply_exactly(rows, matrix) if exact else rows @ matrix
        start += size
    return out


def _outer_by_torch(x: Tensor, y: Tensor, counts: Tensor) -> Tensor:
    check_counts(counts, x.shape[0])
    sizes = [*counts.tolist(), x.shape[0] - int(counts.sum())]
    parts = [a.mT @ b for a, b in zip(x.split(sizes), y.split(sizes), strict=True)][:-1]
    return torch.stack(parts) if parts else x.new_zeros(0, x.shape[1], y.shape[1])


def _multiply_exactly(rows: Tensor, matrix: Tensor) -> Tensor:
    return compute_rows(rows, pack_rows(matrix.mT), matrix.shape[1], CHUNKS, None)


# In C++.


def _multiply_natively(x: Tensor, w: Tensor, counts: Tensor, transposed: bool, exact: bool) -> Tensor:
    if exact and x.dtype == torch.float64:
        return _multiply_by_torch(x, w, counts, transposed, exact)
    (w, transposed), counts = lay_out(w, transposed), counts.contiguous()
    kind = torch.promote_types(x.dtype, torch.float32)
    w = w if w.dtype in _WEIGHTS else w.to(kind)
    (m, k), (e, *sides) = x.shape, w.shape
    n = sides[0] if transposed else sides[1]
    check_counts(counts, m)
    rows, threads = x.to(kind).contiguous(), threads_for(m * k * n, FEW)
    y, scratch = rows.new_empty(m, n), rows.new_empty(threads * k * PANEL)
    tensors = (t.data_ptr() for t in (rows, w, counts, y, scratch))
    run = function(_SOURCE, f"grouped_product_{_WEIGHTS[w.dtype]}", "p" * 5 + "i" * 6)
    run(*tensors, m, k, n, e, transposed, threads)
    return y.to(x.dtype)


def _outer_natively(x: Tensor, y: Tensor, counts: Tensor) -> Tensor:
    (m, k), n, e = x.shape, y.shape[1], counts.shape[0]
    if _is_turned(m, k, n, e):
        return _outer_natively(y, x, counts).mT.contiguous()
    kind, size = torch.promote_types(x.dtype, torch.float32), _outer_depth(check_counts(counts, m)) * PANEL
    rows, others, threads = x.to(kind), y.to(kind), threads_for(m * k * n, FEW)
    out, scratch = rows.new_empty(e, k, n), rows.new_empty(threads * size)
    tensors = (t.data_ptr() for t in (rows, others, counts, out, scratch))
    function(_SOURCE, f"grouped_outer_{_WEIGHTS[kind]}", "p" * 5 + "i" * 5)(*tensors, k, n, e, size, threads)
    return out.to(x.dtype)


def _panel_bytes(work: int, depth: int, itemsize: int) -> int:
    """Bytes of a packed panel for each thread, where `depth` products are added up."""
    return threads_for(work, FEW) * depth * PANEL * itemsize


def _outer_depth(rows: int) -> int:
    """Returns the rows of PANEL numbers for each thread of `grouped_outer`, with at most `rows` rows a group."""
    return rows if rows <= _DEPTH else _DEPTH + _COLUMNS


def _is_turned(m: int, k: int, n: int, e: int) -> bool:
    """Returns whether `grouped_outer` computes the transpose.

    Rows of the narrower operand are read by columns, nearer to each other in memory. With few rows of a group the
    transposed copy of the result costs more than the order saves.
    """
    return k > n and m >= _MANY * e


def _cast_bytes(*operands: Tensor) -> int:
    """Returns the bytes of float32 copies of 16-bit tensors."""
    return sum(4 * x.numel() for x in operands if x.element_size() < 4)


def _product_scratch(x: Tensor, w: Tensor, counts: Tensor, transposed: bool, exact: bool) -> int:
    del counts, exact
    (m, k), n = x.shape, w.shape[1 if transposed else 2]
    wide = max(x.element_size(), 4)
    casts = _cast_bytes(x) + (4 * m * n if wide > x.element_size() else 0)
    return casts + _panel_bytes(m * k * n, k, wide) + (_cast_bytes(w) if w.dtype == torch.float16 else 0)


def _outer_scratch(x: Tensor, y: Tensor, counts: Tensor) -> int:
    (m, k), n = x.shape, y.shape[1]
    wide = max(x.element_size(), 4)
    casts = _cast_bytes(x, y) + (4 * len(counts) * k * n if wide > x.element_size() else 0)
    turned = len(counts) * k * n * x.element_size() if _is_turned(m, k, n, len(counts)) else 0
    return casts + turned + _panel_bytes(m * k * n, _outer_depth(m), wide)


def _label_product(x: Any, w: Any, counts: Any, transposed: bool, exact: bool) -> DimLabels:
    """Returns the labels of products of groups. Chains over inputs differ from chains over parts of inputs."""
    del x, w, counts
    inner = "." if exact else "k"
    matrix = f".n{inner}" if transposed else f".{inner}n"
    return DimLabels(f".{inner},{matrix},.->.n", linear=(0,), sums=not exact, grouped=True)


def _count_flops(x: Tensor, w: Tensor, counts: Tensor, transposed: bool, exact: bool) -> int:
    """Returns the operations of products of groups, as if no row was past the last group."""
    del counts, exact
    return 2 * x.numel() * w.shape[1 if transposed else 2]


GROUPED_PRODUCT = KernelOp(
    schema="grouped_product(Tensor x, Tensor w, Tensor counts, bool transposed, bool exact) -> Tensor",
    abstract=lambda x, w, counts, transposed, exact: x.new_empty(x.shape[0], w.shape[1 if transposed else 2]),
    reference=_multiply_by_torch,
    native=_multiply_natively,
    source=_SOURCE,
    triton="_grouped_product_triton.grouped_product",
    contiguous=False,
    no_derivative=_REMEDY,
    mapped=0,
    flops=_count_flops,
    scratch=_product_scratch,
    sharding=_label_product,
    rows="first",
)
GROUPED_OUTER = KernelOp(
    schema="grouped_outer(Tensor x, Tensor y, Tensor counts) -> Tensor",
    abstract=lambda x, y, counts: x.new_empty(counts.shape[0], x.shape[1], y.shape[1]),
    reference=_outer_by_torch,
    native=_outer_natively,
    source=_SOURCE,
    triton="_grouped_product_triton.grouped_outer",
    no_derivative=_REMEDY,
    mapped=0,
    flops=lambda x, y, counts: 2 * x.numel() * y.shape[1],
    scratch=_outer_scratch,
    sharding=DimLabels("mk,mn,.->.kn", linear=(0, 1)),
    rows="sum",
)
