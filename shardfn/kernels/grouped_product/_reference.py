"""Products of groups of rows with a matrix each: the definition."""

import torch
from torch import Tensor

from shardfn.kernels.row_linear import pack_rows
from shardfn.kernels.row_linear._reference import row_linear

from ._values import check_counts

CHUNKS = 8


def grouped_product(x: Tensor, w: Tensor, counts: Tensor, transposed: bool, exact: bool) -> Tensor:
    """Maps x [m, k] and w [e, k, n] or [e, n, k] to [m, n]."""
    check_counts(counts, x.shape[0])
    matrices = w.mT if transposed else w
    out, start = x.new_zeros(x.shape[0], matrices.shape[2]), 0
    for size, matrix in zip(counts.tolist(), matrices.unbind(), strict=True):
        rows = x[start : start + size]
        out[start : start + size] = _multiply_exactly(rows, matrix) if exact else rows @ matrix
        start += size
    return out


def grouped_outer(x: Tensor, y: Tensor, counts: Tensor) -> Tensor:
    """Maps x [m, k] and y [m, n] to [e, k, n]."""
    check_counts(counts, x.shape[0])
    sizes = [*counts.tolist(), x.shape[0] - int(counts.sum())]
    parts = [a.mT @ b for a, b in zip(x.split(sizes), y.split(sizes), strict=True)][:-1]
    return torch.stack(parts) if parts else x.new_zeros(0, x.shape[1], y.shape[1])


def _multiply_exactly(rows: Tensor, matrix: Tensor) -> Tensor:
    return row_linear(rows, pack_rows(matrix.mT), matrix.shape[1], CHUNKS, None)
