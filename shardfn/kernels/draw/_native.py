"""Tokens drawn from logits, on a CPU, in C++."""

import ctypes
import functools
from typing import Any

import torch
from torch import Tensor

from shardfn.kernels._build import library
from shardfn.kernels._num_threads import threads_for

from . import _reference
from ._values import check_values

SOURCE = "draw/_native.cpp"
# Logits up to which a second thread does not pay.
FEW = 1 << 16


def draw(
    logits: Tensor,
    uniform: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    targets: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Tokens and log probabilities of logits [r, v]."""
    found = _load_functions(library(SOURCE))
    arguments = uniform, temperature, top_k, top_p, min_p, targets
    if found is None:
        return _reference.draw(logits, *arguments)
    r, v = logits.shape
    threads = threads_for(r * v, FEW, r)
    tokens, logprobs = logits.new_empty(r, dtype=torch.int64), logits.new_empty(r)
    memory = logits.new_empty(threads * room(v), dtype=torch.float64)
    at = (None if x is None else x.data_ptr() for x in (logits, *arguments, tokens, logprobs, memory))
    if found.draw_rows(*at, room(v), r, v, threads):
        check_values(v, *arguments)
        raise AssertionError("C++ refuses arguments that Python takes")
    return tokens, logprobs


def top_logprobs(logits: Tensor, num: int) -> tuple[Tensor, Tensor]:
    """Returns the most probable tokens of logits [r, v], and the log probabilities [r, num]."""
    found = _load_functions(library(SOURCE))
    if found is None:
        return _reference.top_logprobs(logits, num)
    r, v = logits.shape
    threads = threads_for(r * v, FEW, r)
    tokens, logprobs = logits.new_empty(r, num, dtype=torch.int64), logits.new_empty(r, num)
    memory = logits.new_empty(threads * room(v), dtype=torch.float64)
    at = (x.data_ptr() for x in (logits, tokens, logprobs, memory))
    found.top_rows(*at, room(v), r, v, num, threads)
    return tokens, logprobs


def draw_uniforms(keys: Tensor, places: Tensor) -> Tensor:
    """Numbers in [0, 1) of keys and places, int64 [r]."""
    found = _load_functions(library(SOURCE))
    if found is None:
        return _reference.draw_uniforms(keys, places)
    out = torch.empty(keys.shape, dtype=torch.float64)
    found.draw_uniforms(keys.data_ptr(), places.data_ptr(), out.data_ptr(), len(keys))
    return out


def room(vocab: int) -> int:
    """Returns the float64 numbers of memory that a thread needs.

    Example:
        >>> room(49152)
        115458
    """
    blocks, ends = -(-vocab // 64), 8192 // 2
    return blocks * 64 + (blocks + 1) + vocab + ends + vocab // 4 + 1


@functools.cache
def _load_functions(found: ctypes.CDLL | None) -> Any:
    """Returns the library, with the types of arguments, so that calls of few rows are cheap.

    None without a compiler.
    """
    if found is None:
        return None
    found.draw_rows.argtypes = [ctypes.c_void_p] * 10 + [ctypes.c_int64] * 4
    found.draw_rows.restype = ctypes.c_int64
    found.top_rows.argtypes = [ctypes.c_void_p] * 4 + [ctypes.c_int64] * 5
    found.top_rows.restype = None
    found.draw_uniforms.argtypes = [ctypes.c_void_p] * 3 + [ctypes.c_int64]
    found.draw_uniforms.restype = None
    return found
