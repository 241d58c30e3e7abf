"""A rank's share of the gradients of leaves that travel together."""

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from shardfn.capture import capturing, traced_once
from shardfn.collectives import Packing
from shardfn.core import Stored
from shardfn.memory import to_device
from shardfn.state import StoredSlice, loaded


def brought(x: Tensor | Stored, device: torch.device) -> Tensor:
    """A share, copied to the device from the memory where it waits."""
    return to_device(loaded(x), device).result()


def pieces_of(packing: Packing, rank: int, flat: Tensor | Stored) -> list[Tensor | Stored]:
    """The pieces of single leaves in a rank's share."""
    if isinstance(flat, Tensor) and not capturing():
        return list(packing.split(flat, rank))
    shapes = packing.shapes(rank)
    if isinstance(flat, Tensor):
        return list(traced_once(("pieces", *shapes), functools.partial(_views, shapes), [flat]))
    sizes = [s.numel() for s in shapes]
    starts = [sum(sizes[:k]) for k in range(len(sizes))]
    return [StoredSlice(flat, start, shape) for start, shape in zip(starts, shapes, strict=True)]


def _views(shapes: Sequence[torch.Size], flat: Tensor) -> list[Tensor]:
    pieces = flat.split_with_sizes([s.numel() for s in shapes]) if len(shapes) > 1 else [flat]
    return [p.view(s) for p, s in zip(pieces, shapes, strict=True)]
