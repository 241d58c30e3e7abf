"""Batch-invariant linear layers, on a CPU, in C++."""

import itertools
import math
from array import array
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shardfn.kernels._build import function
from shardfn.kernels._chain import KernelCall, are_dense
from shardfn.kernels._num_threads import threads_for

from . import _reference
from ._codes import kind_of

SOURCE = "row_linear/_native.cpp"
# Multiply-adds up to which a second thread does not pay.
FEW = 1 << 21
_KINDS = {torch.float32: 0, torch.bfloat16: 1, "int8": 2, "int4": 3}


def row_linears(
    x: Tensor, packed: Sequence[Tensor], nums: Sequence[int], chunks: int, biases: Sequence[Tensor | None]
) -> list[Tensor]:
    """Maps x fp32 [*, k] to fp32 [*, num] of each layer. Neighbours of equal kind are computed in a single call."""
    run = function(SOURCE, "row_linears", "pp" + "i" * 6)
    if run is None:
        return _reference.row_linears(x, packed, nums, chunks, biases)
    *lead, k = x.shape
    m, x = math.prod(lead), x.contiguous()
    ys = [x.new_empty((*lead, num)) for num in nums]
    kinds = [_KINDS[kind_of(w) or w.dtype] for w in packed]
    packed = [w.contiguous() for w in packed]
    biases = [None if bias is None else bias.contiguous() for bias in biases]
    start = 0
    for kind, same in itertools.groupby(kinds):
        end = start + len(list(same))
        layers = array("q")
        for w, bias, y in zip(packed[start:end], biases[start:end], ys[start:end], strict=True):
            layers.extend((w.data_ptr(), 0 if bias is None else bias.data_ptr(), y.data_ptr(), y.shape[-1]))
        threads = threads_for(m * k * sum(nums[start:end]), FEW)
        run(x.data_ptr(), layers.buffer_info()[0], end - start, m, k, chunks, kind, threads)
        start = end
    return ys


def call_one(arguments: Sequence[Any], y: Tensor) -> KernelCall | None:
    """Returns the call of `row_linear` in a chain."""
    x, packed, num, chunks, bias = arguments
    return call((x, [packed], [num], chunks, [bias]), [y])


def call(arguments: Sequence[Any], ys: Sequence[Tensor]) -> KernelCall | None:
    """Returns the call of `row_linears` in a chain, if the layers are of equal kind."""
    x, packed, nums, chunks, biases = arguments
    kinds = {_KINDS.get(kind_of(w) or w.dtype) for w in packed}
    if len(kinds) != 1 or not are_dense(x, *biases) or not all(w.is_contiguous() for w in packed):
        return None
    m, k = x.shape[:-1].numel(), x.shape[-1]
    layers = [part for w, bias, y in zip(packed, biases, ys, strict=True) for part in (w, bias, y, y.shape[-1])]
    threads = threads_for(m * k * sum(nums), FEW)
    return KernelCall(SOURCE, "row_linears", (x, len(packed), m, k, chunks, *kinds, threads, *layers))
