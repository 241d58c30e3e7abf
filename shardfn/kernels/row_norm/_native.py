"""Norms of rows, on a CPU, in C++."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shardfn.kernels._build import function
from shardfn.kernels._chain import Arguments, KernelCall, addresses, are_dense
from shardfn.kernels._num_threads import threads_for

from . import _reference

SOURCE = "row_norm/_native.cpp"
# Elements up to which a second thread does not pay.
FEW = 1 << 18


def row_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, centered: bool) -> Tensor:
    """Maps fp32 [r, d] to fp32 [r, d]."""
    run = function(SOURCE, "row_norm", "ppppfiiii")
    if run is None:
        return _reference.row_norm(x, weight, bias, eps, centered)
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    run(*addresses(_call_arguments(x, weight, bias, eps, centered, y)))
    return y


def call(arguments: Sequence[Any], y: Tensor) -> KernelCall | None:
    """Returns the call of the op in a chain."""
    x, weight, bias, eps, centered = arguments
    whole = are_dense(x, weight, bias)
    return KernelCall(SOURCE, "row_norm", _call_arguments(x, weight, bias, eps, centered, y)) if whole else None


def _call_arguments(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, centered: bool, y: Tensor) -> Arguments:
    rows, d = x.shape[:-1].numel(), x.shape[-1]
    return x, weight, bias, y, eps, rows, d, centered, threads_for(x.numel(), FEW)
