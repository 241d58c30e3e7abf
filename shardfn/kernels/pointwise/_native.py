"""Activations of single elements, on a CPU, in C++."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shardfn.kernels._build import function
from shardfn.kernels._chain import Arguments, KernelCall, addresses, are_dense
from shardfn.kernels._num_threads import threads_for

from . import _reference

SOURCE = "pointwise/_native.cpp"
# Elements up to which a second thread does not pay.
FEW = 1 << 17


def gated_silu(gate: Tensor, up: Tensor) -> Tensor:
    """Maps fp32 to fp32 of the same shape."""
    run = function(SOURCE, "gated_silu", "pppii")
    if run is None:
        return _reference.gated_silu(gate, up)
    y = torch.empty_like(gate, memory_format=torch.contiguous_format)
    run(*addresses(_call_arguments(gate, up, y)))
    return y


def gelu(x: Tensor) -> Tensor:
    """Maps fp32 to fp32 of the same shape."""
    run = function(SOURCE, "gelu", "ppii")
    if run is None:
        return _reference.gelu(x)
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    run(*addresses(_call_arguments(x, y)))
    return y


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Maps fp32 [t, h, k], and [t, k] twice, to fp32 [t, h, k]."""
    run = function(SOURCE, "rotate", "ppppiii")
    if run is None:
        return _reference.rotate(x, cos, sin)
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    run(*addresses((x, cos, sin, y, *x.shape)))
    return y


def call(name: str, arguments: Sequence[Any], y: Tensor) -> KernelCall | None:
    """Returns the call of `gated_silu` or `gelu` in a chain."""
    return KernelCall(SOURCE, name, _call_arguments(*arguments, y)) if are_dense(*arguments) else None


def call_rotate(arguments: Sequence[Any], y: Tensor) -> KernelCall | None:
    """Returns the call of the op in a chain."""
    x, cos, sin = arguments
    return KernelCall(SOURCE, "rotate", (x, cos, sin, y, *x.shape)) if are_dense(x, cos, sin) else None


# Operations of torch with results determined by IEEE 754, so that both have the same bits.


def call_add(arguments: Sequence[Any], y: Tensor) -> KernelCall | None:
    """Returns the call of torch's `add` and `add_`: of two tensors of equal shape, or of a tensor and a number."""
    x, other = arguments
    if type(other) in (int, float) and abs(other) <= 1 << 53 and are_dense(x, y):
        n = x.numel()
        return KernelCall(SOURCE, "shifted", (x, y, n, float(other), threads_for(n, FEW)))
    return call("added", arguments, y) if isinstance(other, Tensor) and x.shape == other.shape else None


def call_multiply(arguments: Sequence[Any], y: Tensor) -> KernelCall | None:
    """Returns the call of torch's `mul` and `mul_`: of two tensors of equal shape, or of rows and row factors."""
    x, by = arguments
    if not isinstance(by, Tensor) or not are_dense(x, by, y):
        return None
    if x.shape == by.shape:
        return call("multiplied", arguments, y)
    if y.shape == by.shape:
        x, by = by, x
    rows, size = y.numel() // max(y.shape[-1], 1), y.shape[-1]
    each, alike = (*y.shape[:-1], 1), (*[1] * (by.ndim - 1), size)
    if y.shape != x.shape or y.numel() > FEW or by.shape not in (each, alike):
        return None
    return KernelCall(SOURCE, "scaled", (x, by, y, rows, size, int(by.shape == each)))


def call_square(arguments: Sequence[Any], y: Tensor) -> KernelCall | None:
    """Returns the call of torch's `pow` with an exponent of two."""
    x, exponent = arguments
    two = type(exponent) in (int, float) and exponent == 2
    return call("multiplied", (x, x), y) if two and are_dense(x, y) else None


def call_inverse_root(arguments: Sequence[Any], y: Tensor) -> KernelCall | None:
    """Returns the call of torch's `rsqrt` and `rsqrt_`."""
    (x,) = arguments
    return KernelCall(SOURCE, "inverse_root", (x, y, x.numel())) if are_dense(x, y) else None


def _call_arguments(*tensors: Tensor) -> Arguments:
    n = tensors[-1].numel()
    return *tensors, n, threads_for(n, FEW)
