"""Strides of kernels' results, for ops where torch gives other strides for tensors without data.

Only formulas. The op table (`_ops.py`) says which op has which formula.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from shardfn._torch import compute_elementwise_output_strides, make_contiguous_strides_for, suggest_memory_format


def grouped_mm(
    a: Tensor, b: Tensor, offs: Tensor | None = None, bias: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> Tensor:
    """Returns the result for every dtype that the kernels accept, with rows padded to 16 bytes.

    Torch accepts only bf16.
    """
    del bias
    num_groups = None if offs is None else offs.shape[0]
    if a.ndim == 2:
        shape = [num_groups, a.shape[0], b.shape[1]] if b.ndim == 2 else [a.shape[0], b.shape[-1]]
    else:
        shape = [a.shape[1], b.shape[1]] if b.ndim == 2 else [a.shape[0], a.shape[1], b.shape[-1]]
    dtype = out_dtype or a.dtype
    step = 16 // dtype.itemsize
    row = -(-shape[-1] // step) * step
    stride = [shape[1] * row, row, 1] if len(shape) == 3 else [row, 1]
    return torch.empty_strided(shape, stride, dtype=dtype, device=a.device)


def _restride(out: Tensor, stride: Sequence[int]) -> Tensor:
    """Returns `out`, new memory, in other strides."""
    if out.stride() == tuple(stride):
        return out
    return torch.empty_strided(out.shape, stride, dtype=out.dtype, device=out.device)


def lay_out_elementwise(out: Tensor, args: Sequence[Any]) -> Tensor:
    """Returns the strides of an elementwise kernel's result. Earlier operands count first."""
    operands = torch.broadcast_tensors(*(x for x in args if isinstance(x, Tensor)))
    return _restride(out, compute_elementwise_output_strides(*operands))


def lay_out_contiguous(out: Tensor, args: Sequence[Any]) -> Tensor:
    del args
    return _restride(out, make_contiguous_strides_for(out.shape))


def keep_format_of(position: int) -> Callable[[Tensor, Sequence[Any]], Tensor]:
    """Returns strides for channels last if the argument at `position` is channels last, else contiguous strides."""

    def lay_out(out: Tensor, args: Sequence[Any]) -> Tensor:
        return _restride(out, torch.empty_like(out, memory_format=suggest_memory_format(args[position])).stride())

    return lay_out
