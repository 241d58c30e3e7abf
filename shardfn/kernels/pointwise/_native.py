"""Activations of single elements, on a CPU, in C++."""

import torch
from torch import Tensor

from shardfn.kernels._build import function
from shardfn.kernels._num_threads import threads_for

from . import _reference

SOURCE = "pointwise/_native.cpp"
# The newest generation of x86-64 whose code may run, if the processor has it; tests set older ones.
NEWEST = 4
# Elements below which a second thread costs more than it saves.
FEW = 1 << 17


def gated_silu(gate: Tensor, up: Tensor) -> Tensor:
    """From fp32 of one shape to fp32 of that shape."""
    run = function(SOURCE, "gated_silu", "pppiii")
    if run is None:
        return _reference.gated_silu(gate, up)
    y = torch.empty_like(gate)
    run(gate.data_ptr(), up.data_ptr(), y.data_ptr(), y.numel(), threads_for(y.numel(), FEW), NEWEST)
    return y


def gelu(x: Tensor) -> Tensor:
    """From fp32 to fp32 of that shape."""
    run = function(SOURCE, "gelu", "ppiii")
    if run is None:
        return _reference.gelu(x)
    y = torch.empty_like(x)
    run(x.data_ptr(), y.data_ptr(), y.numel(), threads_for(y.numel(), FEW), NEWEST)
    return y


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """From fp32 [t, h, k], and [t, k] twice, to fp32 [t, h, k]."""
    run = function(SOURCE, "rotate", "ppppiiii")
    if run is None:
        return _reference.rotate(x, cos, sin)
    y = torch.empty_like(x)
    run(x.data_ptr(), cos.data_ptr(), sin.data_ptr(), y.data_ptr(), *x.shape, NEWEST)
    return y
