"""Flat tensors of a job of DeepSpeed: the order of parameters inside, and the ranks that cut each tensor."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ._ds_expert_ranks import Group

# At `parameter_alignment`, parameters begin at a multiple of this many bytes.
_ALIGNED_BYTES = 16


class FlatGroup(NamedTuple):
    """Parameters that lie in one flat tensor on each rank.

    Attributes:
        owner: index of the group in the optimizer.
        shapes: shapes by name, in the order of the elements.
        starts: start of each parameter: below stage 3 in the whole group, else in each rank's part.
        paddings: numbers of unused elements after each parameter.
        used: number of elements of the whole group, paddings between parameters included.
        size: number of elements of a rank's part.
        ranks: number of parts.
        experts: whether the parameters belong to the experts of one rank, by local names.
    """

    owner: int
    shapes: dict[str, torch.Size]
    starts: dict[str, int]
    paddings: tuple[int, ...]
    used: int
    size: int
    ranks: int
    experts: bool = False


def flat_groups(
    groups: Sequence[tuple[Group, bool]],
    shapes: Mapping[str, torch.Size],
    zero: Mapping[str, Any],
    sharing: tuple[int, int],
    dtype: torch.dtype,
) -> Iterator[FlatGroup]:
    """Yields the flat groups of a job.

    Args:
        groups: groups of the optimizer, and whether each is of experts.
        shapes: shapes of all parameters.
        zero: configuration of ZeRO.
        sharing: number of ranks that share the batch, and number of ranks with the same experts.
        dtype: dtype of the module's weights.
    """
    stage = zero.get("stage", 0)
    if stage == 3:
        for owner, ((names, _), _) in enumerate(groups):
            ranks = sharing[0]
            for some in _sub_groups(names, shapes, ranks, int(zero.get("sub_group_size", 1e9))):
                yield _place_pieces(owner, {name: shapes[name] for name in some}, ranks)
        return
    align = math.lcm(_ALIGNED_BYTES, dtype.itemsize) // dtype.itemsize if zero.get("parameter_alignment") else 1
    for owner, ((names, _), experts) in enumerate(groups):
        ranks = sharing[experts] if stage else 1
        order = [x for r in range(ranks) for x in names[r::ranks]] if zero.get("round_robin_gradients") else names
        yield _place_row(owner, {name: shapes[name] for name in order}, ranks, align)._replace(experts=experts)


def _sub_groups(names: Sequence[str], shapes: Mapping[str, torch.Size], ranks: int, most: int) -> Iterator[list[str]]:
    """Yields the groups of stage 3: a group ends when a rank's part reaches this many elements."""
    some: list[str] = []
    held = 0
    for name in names:
        some.append(name)
        held += -(-shapes[name].numel() // ranks)
        if held >= most:
            yield some
            some, held = [], 0
    if some:
        yield some


def _place_pieces(owner: int, shapes: dict[str, torch.Size], ranks: int) -> FlatGroup:
    starts: dict[str, int] = {}
    at = 0
    for name, shape in shapes.items():
        starts[name] = at
        at += -(-shape.numel() // ranks)
    return FlatGroup(owner, shapes, starts, (0,) * len(shapes), at * ranks, at, ranks)


def _place_row(owner: int, shapes: dict[str, torch.Size], ranks: int, align: int) -> FlatGroup:
    starts: dict[str, int] = {}
    paddings: list[int] = []
    at = 0
    for name, shape in shapes.items():
        starts[name] = at
        at += shape.numel()
        # After the last parameter the group is padded for all ranks.
        paddings.append(-at % align if len(starts) < len(shapes) else 0)
        at += paddings[-1]
    return FlatGroup(owner, shapes, starts, tuple(paddings), at, -(-at // (2 * ranks)) * 2, ranks)
