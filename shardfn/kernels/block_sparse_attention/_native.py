"""Attention over the tiles of a layout, on a CPU, in C++."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from shardfn.kernels._build import call, library
from shardfn.kernels._num_threads import num_threads
from shardfn.kernels.block_sparse_attention._api import Given, Tiles, wide

from . import _reference
from ._reference import QKV

SOURCE = "block_sparse_attention/_native.cpp"


def forward(qkv: QKV, tiles: Tiles, given: Given, block: int, scale: float) -> tuple[Tensor, Tensor]:
    """Returns y [B, T, H, K] and lse [B, H, T]."""
    if library(SOURCE) is None:
        return _reference.forward(qkv, tiles, given, block, scale)
    B, T, H, _ = qkv[0].shape
    q, k, v = (_widen_input(x) for x in qkv)
    y, lse = torch.empty_like(q), q.new_empty(B, H, T)
    _run_kernel((q, k, v), tiles, given, block, scale, (y, lse), back=False)
    return y.to(qkv[0].dtype), lse


def backward(
    dy: Tensor, qkv: QKV, lse: Tensor, delta: Tensor, tiles: Tiles, given: Given, block: int, scale: float
) -> QKV:
    """Returns the gradients of q, k and v."""
    if library(SOURCE) is None:
        return _reference.backward(dy, qkv, lse, delta, tiles, given, block, scale)
    q, k, v = (_widen_input(x) for x in qkv)
    dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
    outer = None, lse.contiguous(), _widen_input(dy), delta, dq, dk, dv
    _run_kernel((q, k, v), tiles, given, block, scale, outer, back=True)
    return dq.to(qkv[0].dtype), dk.to(qkv[0].dtype), dv.to(qkv[0].dtype)


def _widen_input(x: Tensor) -> Tensor:
    return x.to(wide(x.dtype)).contiguous()


def _run_kernel(
    qkv: QKV, tiles: Tiles, given: Given, block: int, scale: float, outer: tuple[Any, ...], *, back: bool
) -> None:
    q, k, _ = qkv
    (B, T, H, K), (S, G) = q.shape, k.shape[1:3]
    added = None if given.added is None else given.added.to(q.dtype).expand(B, H, T, S)
    table = None if given.table is None else given.table.to(q.dtype).contiguous()
    strides = (0,) * 4 if added is None else added.stride()
    heads = 0 if table is None else table.shape[0]
    keys, *places = given.dropped or (None, 0, 0, 0, 0)
    sizes = B, T, S, H, G, K, block, tiles.starts.shape[0], *strides, heads, *places
    data = (None if x is None else x.contiguous() for x in (given.ids_q, given.ids_k, keys))
    # Held until the call returns, because the call receives the addresses.
    tensors = *qkv, *(x.contiguous() for x in tiles), *data, added, table, *outer
    tensors += (None,) * (19 - len(tensors))
    at = np.array([0 if x is None else x.data_ptr() for x in tensors], np.uint64)
    numbers, factor = np.array((*sizes, num_threads()), np.int64), np.array([scale])
    call("block_sparse_attention", numbers, factor, at, int(q.dtype == torch.float64), int(back), source=SOURCE)
