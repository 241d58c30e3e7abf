"""Converts a value of a partitioned program from a form to another, by the primitives."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from shardfn.collectives import (
    all_gather,
    all_gather_invariant,
    all_to_all,
    psum,
    psum_scatter,
    pvary,
    take_own_block,
)
from shardfn.graph import Form, Ranks
from shardfn.leaves import LazyLeaf, opened

from ._partition_program import Convert

# From a part of a value, the part's dim, the size of the whole dim and the multiple, to the part in another form.
OfPart = Callable[[Tensor, int, int, int], Tensor]


def converted(x: Any, step: Convert, axis: str) -> Any:
    """Returns the value in the form that the step names."""
    before, after = step.before, step.after
    if (before.kind, after.kind) == ("whole", "varying") and type(x) is LazyLeaf and not x._layers:
        return x.with_handle(pvary(x.handle, axis))  # still not opened, so that the sum of gradients is taken once
    x = opened(x)
    if after.kind == "cut":
        return _cut_value(x, step, axis)
    if before.kind == "cut":
        gather = all_gather_invariant if after.kind == "whole" else all_gather
        held = Ranks(axis).own(step.shape[before.dim], before)

        def gather_part(part: Tensor, dim: int, size: int, multiple: int) -> Tensor:
            return _join_blocks(
                gather(_split_blocks(part, dim, multiple), axis, dim=dim, size=size // multiple), dim, multiple
            )

        return _convert_parts(x, before, step.shape, held, gather_part)
    if before.kind == "partial":
        return psum(x.contiguous(), axis)
    return pvary(x, axis)


def _cut_value(x: Tensor, step: Convert, axis: str) -> Tensor:
    before, after = step.before, step.after
    if before.kind == "varying":
        return Ranks(axis).block(x, after)
    if before.kind == "cut":
        return all_to_all(x, axis, split_dim=after.dim, concat_dim=before.dim, size=step.shape[before.dim])
    take = take_own_block if before.kind == "whole" else psum_scatter

    def take_own(part: Tensor, dim: int, size: int, multiple: int) -> Tensor:
        del size
        return _join_blocks(take(_split_blocks(part, dim, multiple), axis, dim=dim), dim, multiple)

    return _convert_parts(x, after, step.shape, [size for size, _ in after.parts], take_own)


def _convert_parts(x: Tensor, form: Form, shape: Sequence[int], held: Sequence[int], convert: OfPart) -> Tensor:
    """Converts each part of a cut dim. Equal parts are converted at once.

    Args:
        x: this rank's value.
        form: form in which the value is cut, before or afterwards.
        shape: shape of the whole.
        held: lengths of the parts in `x`.
        convert: function that converts a part.
    """
    dim, parts = form.dim, form.parts
    if not parts:
        return convert(x, dim, shape[dim], form.multiple)
    if len(set(parts)) == 1:
        apart = x.unflatten(dim, (len(parts), held[0]))
        return convert(apart, dim + 1, *parts[0]).flatten(dim, dim + 1)
    pieces = x.split(list(held), dim)
    return torch.cat([convert(one, dim, *part) for one, part in zip(pieces, parts, strict=True)], dim)


def _split_blocks(x: Tensor, dim: int, multiple: int) -> Tensor:
    """Returns the cut dim as [blocks, multiple], so that blocks are cut as the table cuts them."""
    return x if multiple == 1 else x.unflatten(dim, (x.shape[dim] // multiple, multiple))


def _join_blocks(x: Tensor, dim: int, multiple: int) -> Tensor:
    return x if multiple == 1 else x.flatten(dim, dim + 1)
