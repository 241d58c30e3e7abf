"""Weighted sums of rows by number: the definition."""

import torch
from torch import Tensor

from ._values import refuse_index, wide


def gather_rows(x: Tensor, index: Tensor, weights: Tensor | None) -> Tensor:
    """Maps x [n, d], index [m, j], and weights [m, j] of the dtype of sums to [m, d]."""
    _check_index(x, index)
    out = x.new_zeros(index.shape[0], x.shape[1], dtype=wide(x.dtype))
    begun = torch.zeros_like(index[:, :1], dtype=torch.bool)
    for j in range(index.shape[1]):
        at = index[:, j]
        term = x[at.clamp(min=0)].to(out.dtype) if x.shape[0] else torch.zeros_like(out)
        term = term if weights is None else term * weights[:, j, None]
        named = at[:, None] >= 0
        out = torch.where(named, torch.where(begun, out + term, term), out)
        begun = begun | named
    return out.to(x.dtype)


def row_dots(x: Tensor, y: Tensor, index: Tensor) -> Tensor:
    """Maps x [n, d], y [m, d] and index [m, j] to [m, j]."""
    _check_index(x, index)
    out = x.new_zeros(tuple(index.shape), dtype=wide(x.dtype))
    for j in range(index.shape[1] if x.shape[0] else 0):
        at = index[:, j]
        dots = (x[at.clamp(min=0)].to(out.dtype) * y.to(out.dtype)).sum(1)
        out[:, j] = torch.where(at >= 0, dots, 0)
    return out


def _check_index(x: Tensor, index: Tensor) -> None:
    if index.device.type == "cpu" and bool(((index < -1) | (index >= x.shape[0])).any()):
        refuse_index(x.shape[0])
