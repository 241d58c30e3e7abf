"""Penalties on logits, on a CPU, in C++."""

import ctypes
import functools
from typing import Any

import torch
from torch import Tensor

from shardfn.kernels._build import library
from shardfn.kernels._num_threads import threads_for

from . import _reference
from ._values import check_values

SOURCE = "penalise/_native.cpp"
# Logits up to which a second thread does not pay.
FEW = 1 << 20


def penalise(
    logits: Tensor, history: Tensor, prompts: Tensor, repetition: Tensor, presence: Tensor, frequency: Tensor
) -> Tensor:
    """Maps logits [r, v] and history [r, w] to logits [r, v]."""
    arguments = history, prompts, repetition, presence, frequency
    run = _load_function()
    if run is None:
        return _reference.penalise(logits, *arguments)
    r, v = logits.shape
    threads = threads_for(r * v, FEW, r)
    out, counts = torch.empty_like(logits), history.new_zeros(threads * v)
    at = (x.data_ptr() for x in (logits, *arguments, out, counts))
    if run(*at, r, v, history.shape[1], threads):
        check_values(v, *arguments)
        raise AssertionError("C++ refuses arguments that Python takes")
    return out


@functools.cache
def _load_function() -> Any:
    """Returns the function, with the types of arguments, so that calls of few rows are cheap.

    None without a compiler.
    """
    found = library(SOURCE)
    if found is None:
        return None
    found.penalise.argtypes = [ctypes.c_void_p] * 8 + [ctypes.c_int64] * 4
    found.penalise.restype = ctypes.c_int64
    return found.penalise
