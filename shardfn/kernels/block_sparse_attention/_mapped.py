"""Rules for vmap: a mapped dim joins the samples. Tables or tiles that are mapped get a call each."""

from typing import Any

import torch
from torch import Tensor

from shardfn.kernels._library import LIBRARY

# Indices after the samples' tensors of the ids and keys of dropout, and of `added`. The tiles are 0 to 3, the table 7.
_OF_SAMPLES, _ADDED = (4, 5, 8), 6


def register(name: str, num: int) -> None:
    """Registers a rule for an op whose first `num` tensors have the samples in dim 0."""

    def rule(info: Any, in_dims: Any, *args: Any) -> Any:
        return _by_sample(getattr(torch.ops.shardfn_kernels, name), num, info.batch_size, in_dims, args)

    torch.library.register_vmap(f"shardfn_kernels::{name}", rule, lib=LIBRARY)


def _by_sample(op: Any, num: int, many: int, in_dims: Any, args: Any) -> Any:
    def of_samples(at: int) -> bool:
        x, dim, part = args[at], in_dims[at], at - num
        alone = x is not None and part == _ADDED and dim is None and x.shape[0] == 1
        return at < num or (x is not None and part in (*_OF_SAMPLES, _ADDED) and not alone)

    if any(dim is not None and not of_samples(at) for at, dim in enumerate(in_dims)):
        return _one_by_one(op, many, in_dims, args)
    samples = args[0].shape[0 if in_dims[0] is None else int(in_dims[0] == 0)]

    def folded(x: Tensor, dim: int | None) -> Tensor:
        x = x.expand(many, *x.shape) if dim is None else x.movedim(dim, 0)
        return x.expand(many, samples, *x.shape[2:]).flatten(0, 1)

    pairs = enumerate(zip(args, in_dims, strict=True))
    outs = op(*(folded(x, dim) if of_samples(at) else x for at, (x, dim) in pairs))
    return tuple(y.unflatten(0, (many, samples)) for y in outs), (0,) * len(outs)


def _one_by_one(op: Any, many: int, in_dims: Any, args: Any) -> Any:
    def one(i: int) -> Any:
        return op(*(x if dim is None else x.select(dim, i) for x, dim in zip(args, in_dims, strict=True)))

    outs = [torch.stack(ys) for ys in zip(*(one(i) for i in range(many)), strict=True)]
    return tuple(outs), (0,) * len(outs)
