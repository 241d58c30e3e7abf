"""Leaves of a tree one after another, whole, for a file: no more than one of them is there at a time."""

from typing import Any

import torch
from torch import Tensor

from shardfn.collectives import GlobalTensor
from shardfn.core import P


def whole(x: Any) -> Tensor:
    """The whole leaf, detached. Collective where it is sharded."""
    return x.full_tensor() if isinstance(x, GlobalTensor) else x.detach()


def layer_of(x: Any, i: int) -> Tensor:
    """Row `i` of a stack, whole; where dim 0 is not cut, only that row crosses the mesh. Collective."""
    if not isinstance(x, GlobalTensor):
        return x[i].detach()
    if x.mesh.axes(x.spec.dim_axes(0)):
        return x.full_tensor()[i].clone()
    entries = [x.spec.dim_axes(d) or None for d in range(1, len(x.shape))]
    return GlobalTensor(x.local[i], torch.Size(x.shape[1:]), P(*entries), x.mesh).full_tensor()


def is_writer(tree_leaves: list[Any]) -> bool:
    """Whether this rank is the one that writes: the first of the leaves' mesh."""
    return all(x.mesh.rank == 0 for x in tree_leaves if isinstance(x, GlobalTensor))
