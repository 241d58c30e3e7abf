"""Linear layers whose rows do not depend on one another's number, on a CPU, in C++."""

import torch
from torch import Tensor

from shardfn.kernels._build import function

from . import _reference

SOURCE = "row_linear/_native.cpp"
# The newest generation of x86-64 whose code may run, if the processor has it; tests set older ones.
NEWEST = 4
# Multiply-adds below which a second thread costs more than it saves.
FEW = 1 << 20


def row_linear(x: Tensor, packed: Tensor, num: int, chunks: int, bias: Tensor | None) -> Tensor:
    """From x fp32 [m, k] and packed [panels, k, 64] to fp32 [m, num]."""
    run = function(SOURCE, "row_linear", "p" * 4 + "i" * 7)
    if run is None:
        return _reference.row_linear(x, packed, num, chunks, bias)
    m, k = x.shape
    y = x.new_empty(m, num)
    threads = torch.get_num_threads() if m * k * num > FEW else 1
    bias = None if bias is None else bias.contiguous()
    at = None if bias is None else bias.data_ptr()
    wide = packed.dtype == torch.float32
    run(x.data_ptr(), packed.data_ptr(), at, y.data_ptr(), m, k, num, chunks, wide, threads, NEWEST)
    return y
