"""Products of groups of rows with a matrix each, on a CPU, in C++."""

import torch
from torch import Tensor

from shardfn.kernels._build import function

from . import _reference
from ._values import PANEL, check_counts, outer_depth, threads_for, turns

SOURCE = "grouped_product/_native.cpp"
_WEIGHTS = {torch.float32: "float", torch.bfloat16: "bfloat16", torch.float64: "double"}


def grouped_product(x: Tensor, w: Tensor, counts: Tensor, transposed: bool, exact: bool) -> Tensor:
    """Maps x [m, k] and w [e, k, n] or [e, n, k] to [m, n]."""
    kind = torch.promote_types(x.dtype, torch.float32)
    w = w if w.dtype in _WEIGHTS else w.to(kind)
    run = (
        function(SOURCE, f"grouped_product_{_WEIGHTS.get(w.dtype)}", "p" * 5 + "i" * 6) if w.dtype in _WEIGHTS else None
    )
    if run is None:
        return _reference.grouped_product(x, w, counts, transposed, exact)
    (m, k), (e, *sides) = x.shape, w.shape
    n = sides[0] if transposed else sides[1]
    check_counts(counts, m)
    rows, threads = x.to(kind), threads_for(m * k * n)
    y, scratch = rows.new_empty(m, n), rows.new_empty(threads * k * PANEL)
    tensors = (t.data_ptr() for t in (rows, w, counts, y, scratch))
    run(*tensors, m, k, n, e, transposed, threads)
    return y.to(x.dtype)


def grouped_outer(x: Tensor, y: Tensor, counts: Tensor) -> Tensor:
    """Maps x [m, k] and y [m, n] to [e, k, n]."""
    kind = torch.promote_types(x.dtype, torch.float32)
    run = function(SOURCE, f"grouped_outer_{_WEIGHTS[kind]}", "p" * 5 + "i" * 5) if kind in _WEIGHTS else None
    if run is None:
        return _reference.grouped_outer(x, y, counts)
    (m, k), n, e = x.shape, y.shape[1], counts.shape[0]
    if turns(m, k, n, e):
        return grouped_outer(y, x, counts).mT.contiguous()
    size = outer_depth(check_counts(counts, m)) * PANEL
    rows, others, threads = x.to(kind), y.to(kind), threads_for(m * k * n)
    out, scratch = rows.new_empty(e, k, n), rows.new_empty(threads * size)
    tensors = (t.data_ptr() for t in (rows, others, counts, out, scratch))
    run(*tensors, k, n, e, size, threads)
    return out.to(x.dtype)
