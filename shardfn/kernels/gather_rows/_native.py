"""Weighted sums of rows by number, on a CPU, in C++."""

from typing import Any

import torch
from torch import Tensor

from shardfn.kernels._build import function
from shardfn.kernels._num_threads import threads_for

from . import _reference
from ._values import refuse_index, wide

SOURCE = "gather_rows/_native.cpp"
# Elements read up to which a second thread does not pay.
FEW = 1 << 17


def gather_rows(x: Tensor, index: Tensor, weights: Tensor | None) -> Tensor:
    """Maps x [n, d], index [m, j], and weights [m, j] of the dtype of sums to [m, d]."""
    kind = wide(x.dtype)
    run = _load_function("gather_rows", kind)
    if run is None:
        return _reference.gather_rows(x, index, weights)
    rows, m = x.to(kind), index.shape[0]
    out, bad = rows.new_empty(m, x.shape[1]), index.new_zeros(1)
    at = None if weights is None else weights.data_ptr()
    run(rows.data_ptr(), index.data_ptr(), at, out.data_ptr(), *_call_sizes(rows, index), bad.data_ptr())
    if bad.item():
        refuse_index(x.shape[0])
    return out.to(x.dtype)


def row_dots(x: Tensor, y: Tensor, index: Tensor) -> Tensor:
    """Maps x [n, d], y [m, d] and index [m, j] to [m, j]."""
    kind = wide(x.dtype)
    run = _load_function("row_dots", kind)
    if run is None:
        return _reference.row_dots(x, y, index)
    rows, others = x.to(kind), y.to(kind)
    out, bad = rows.new_empty(tuple(index.shape)), index.new_zeros(1)
    run(*(t.data_ptr() for t in (rows, index, others, out)), *_call_sizes(rows, index), bad.data_ptr())
    if bad.item():
        refuse_index(x.shape[0])
    return out


def _load_function(name: str, kind: torch.dtype) -> Any:
    ends = {torch.float32: "float", torch.float64: "double"}
    return function(SOURCE, f"{name}_{ends[kind]}", "p" * 4 + "i" * 5 + "p") if kind in ends else None


def _call_sizes(x: Tensor, index: Tensor) -> tuple[int, int, int, int, int]:
    threads = threads_for(index.numel() * x.shape[1], FEW)
    return x.shape[0], x.shape[1], index.shape[0], index.shape[1], threads
