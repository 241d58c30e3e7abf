"""Linear layers whose rows do not depend on one another's number, on a CPU, in C++."""

import torch
from torch import Tensor

from shardfn.kernels._build import function

from . import _reference
from ._codes import kind_of

SOURCE = "row_linear/_native.cpp"
# The newest generation of x86-64 whose code may run, if the processor has it; tests set older ones.
NEWEST = 4
# Multiply-adds below which a second thread costs more than it saves.
FEW = 1 << 20
_KINDS = {torch.float32: 0, torch.bfloat16: 1, "int8": 2, "int4": 3}


def row_linear(x: Tensor, packed: Tensor, num: int, chunks: int, bias: Tensor | None) -> Tensor:
    """From x fp32 [m, k] and packed [panels, k, 64], or codes, to fp32 [m, num]."""
    run = function(SOURCE, "row_linear", "p" * 4 + "i" * 7)
    if run is None:
        return _reference.row_linear(x, packed, num, chunks, bias)
    m, k = x.shape
    y = x.new_empty(m, num)
    threads = torch.get_num_threads() if m * k * num > FEW else 1
    bias = None if bias is None else bias.contiguous()
    at = None if bias is None else bias.data_ptr()
    kind = _KINDS[kind_of(packed) or packed.dtype]
    run(x.data_ptr(), packed.data_ptr(), at, y.data_ptr(), m, k, num, chunks, kind, threads, NEWEST)
    return y
