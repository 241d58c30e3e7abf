"""Norms of rows, on a CPU, in C++."""

import torch
from torch import Tensor

from shardfn.kernels._build import function
from shardfn.kernels._num_threads import threads_for

from . import _reference

SOURCE = "row_norm/_native.cpp"
# The newest generation of x86-64 whose code may run, if the processor has it; tests set older ones.
NEWEST = 4
# Elements below which a second thread costs more than it saves.
FEW = 1 << 18


def row_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, centered: bool) -> Tensor:
    """From fp32 [r, d] to fp32 [r, d]."""
    run = function(SOURCE, "row_norm", "ppppfiiiii")
    if run is None:
        return _reference.row_norm(x, weight, bias, eps, centered)
    y = torch.empty_like(x)
    threads = threads_for(x.numel(), FEW)
    shift = None if bias is None else bias.data_ptr()
    run(x.data_ptr(), weight.data_ptr(), shift, y.data_ptr(), eps, *x.shape, centered, threads, NEWEST)
    return y
