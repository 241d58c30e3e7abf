"""Attention of ragged tokens over a paged cache, on a CPU, in C++."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shardfn.kernels._build import function
from shardfn.kernels._chain import Arguments, KernelCall, addresses, are_dense
from shardfn.kernels._num_threads import num_threads

from . import _reference
from ._check import check_plan

SOURCE = "ragged_attention/_native.cpp"
# The kinds of a cache, as in _rows.h.
KINDS = {torch.bfloat16: 0, torch.float32: 1, torch.int8: 2, torch.float8_e4m3fn: 3}
# Multiply-adds of scores up to which a second thread does not pay.
FEW = 1 << 19


def ragged_attention(
    q: Tensor, k: Tensor, v: Tensor, cache: Tensor, slots: Tensor, positions: Tensor, sequences: Tensor, tables: Tensor,
    scale: float, window: int | None, softcap: float | None, slopes: Tensor | None, sinks: Tensor | None,
    tree: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Returns fp32 [T, H, K] and [T, H]. Writes the cache [blocks, 2, G, block, row]."""
    run = function(SOURCE, "ragged_attention", "p" * 13 + "i" * 13 + "ff" + "ii", returns=True)
    if run is None:
        args = q, k, v, cache, slots, positions, sequences, tables, scale, window, softcap, slopes, sinks, tree
        return _reference.ragged_attention(*args)
    T, H, K = q.shape
    q, k, v = (x if x.stride()[1:] == (K, 1) else x.contiguous() for x in (q, k, v))
    slopes, sinks, tree = (None if x is None else x.contiguous() for x in (slopes, sinks, tree))
    y, lse = q.new_empty(T, H, K), q.new_empty(T, H)
    plan = slots, positions, sequences, tables
    if run(*addresses(_call_arguments(q, k, v, cache, *plan, scale, window, softcap, slopes, sinks, tree, y, lse))):
        check_plan(cache, *plan, window, tree)
        raise AssertionError("C++ refused a plan that is in range")
    return y, lse


def call(arguments: Sequence[Any], results: Sequence[Tensor]) -> KernelCall | None:
    """Returns the call of the op in a chain."""
    q, k, v, cache, *plan, _, window, _, slopes, sinks, tree = arguments
    if not are_dense(q, k, v, slopes, sinks) or not all(x is None or x.is_contiguous() for x in (cache, *plan, tree)):
        return None
    check = check_plan, (cache, *plan, window, tree)
    return KernelCall(SOURCE, "ragged_attention", _call_arguments(*arguments, *results), check)


def _call_arguments(
    q: Tensor, k: Tensor, v: Tensor, cache: Tensor, slots: Tensor, positions: Tensor, sequences: Tensor, tables: Tensor,
    scale: float, window: int | None, softcap: float | None, slopes: Tensor | None, sinks: Tensor | None,
    tree: Tensor | None, y: Tensor, lse: Tensor,
) -> Arguments:  # fmt: skip
    (T, H, K), G = q.shape, k.shape[1]
    tensors = q, k, v, cache, slots, positions, sequences, tables, slopes, sinks, tree, y, lse
    sizes = *(T, H, G, K), *(x.stride(0) for x in (q, k, v)), cache.shape[0], cache.shape[3], *tables.shape
    scores = (scale, 0.0) if softcap is None else (scale / softcap, softcap)
    return *tensors, *sizes, window or 0, KINDS[cache.dtype], *scores, num_threads(), FEW
