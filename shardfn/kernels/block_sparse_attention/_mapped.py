"""Rules for vmap: a mapped dim joins the samples. Mapped tables or tiles get a call each."""

from typing import Any

import torch
from torch import Tensor

from shardfn.kernels._library import LIBRARY

# Indices after the samples' tensors of the ids and keys of dropout, and of `added`. The tiles are 0 to 3, the table 7.
_OF_SAMPLES, _ADDED = (4, 5, 8), 6


def register(name: str, num: int) -> None:
    """Registers a rule for an op where the first `num` tensors have the samples in dim 0."""

    def map_op(info: Any, in_dims: Any, *args: Any) -> Any:
        return _map_by_sample(getattr(torch.ops.shardfn_kernels, name), num, info.batch_size, in_dims, args)

    torch.library.register_vmap(f"shardfn_kernels::{name}", map_op, lib=LIBRARY)


def _map_by_sample(op: Any, num: int, many: int, in_dims: Any, args: Any) -> Any:
    def has_samples(at: int) -> bool:
        x, dim, part = args[at], in_dims[at], at - num
        alone = x is not None and part == _ADDED and dim is None and x.shape[0] == 1
        return at < num or (x is not None and part in (*_OF_SAMPLES, _ADDED) and not alone)

    if any(dim is not None and not has_samples(at) for at, dim in enumerate(in_dims)):
        return _map_in_turn(op, many, in_dims, args)
    samples = args[0].shape[0 if in_dims[0] is None else int(in_dims[0] == 0)]

    def fold_samples(x: Tensor, dim: int | None) -> Tensor:
        x = x.expand(many, *x.shape) if dim is None else x.movedim(dim, 0)
        return x.expand(many, samples, *x.shape[2:]).flatten(0, 1)

    pairs = enumerate(zip(args, in_dims, strict=True))
    outs = op(*(fold_samples(x, dim) if has_samples(at) else x for at, (x, dim) in pairs))
    return tuple(y.unflatten(0, (many, samples)) for y in outs), (0,) * len(outs)


def _map_in_turn(op: Any, many: int, in_dims: Any, args: Any) -> Any:
    def call_op(i: int) -> Any:
        return op(*(x if dim is None else x.select(dim, i) for x, dim in zip(args, in_dims, strict=True)))

    outs = [torch.stack(ys) for ys in zip(*(call_op(i) for i in range(many)), strict=True)]
    return tuple(outs), (0,) * len(outs)
