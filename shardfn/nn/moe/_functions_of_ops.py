"""Functions that captures write down as ops, for graphs that run, with derivatives of any order."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ._grouped import grouped
from ._permute import Permutation, combine, copies

_OPS = torch.ops.shardfn_kernels


def _multiply_groups(x: Tensor, w: Tensor, counts: Tensor, transposed: bool, batch_invariant: bool) -> Tensor:
    return grouped(x, w, counts, transposed, batch_invariant=batch_invariant)


def _combine_rows(y: Tensor, weights: Tensor, source: Tensor, places: Tensor) -> Tensor:
    return combine(y, Permutation(source, places), weights)


# By op: see `as_ops`.
FUNCTIONS_OF_OPS: Mapping[Any, Callable[..., Tensor]] = {
    _OPS.multiplied_rows.default: _multiply_groups,
    _OPS.copied_rows.default: copies,
    _OPS.combined_rows.default: _combine_rows,
}
