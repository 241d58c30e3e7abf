"""`carry`: a block along a route, by the differentiable collectives.

The plainest executor of routes: one collective a hop, each waited for, nothing in place. It runs in eager programs, in
graphs that `jit` captures and inside transforms of `torch.func`, and is what other executors are compared with.
"""

import dataclasses
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from shardfn.core import MemoryKind, Placement

from ._all_gather import all_gather_invariant
from ._all_to_all import all_to_all
from ._env import current_mesh
from ._psum import psum
from ._psum_scatter import psum_scatter, take_own_block
from ._route import AllGather, AllToAll, Cast, Decode, Encode, Hop, Move, Psum, PsumScatter, Route, Slice

Mover = Callable[[Tensor, MemoryKind], Tensor]


def carry(block: Tensor, route: Route, *, move: Mover | None = None) -> Tensor:
    """What this rank holds at the end of a route. Collective over the axes of its hops; the mesh must be bound.

    What all ranks hold at the end counts once: its gradient must be the same on all. Where they go on each in its own
    way, say so by `pvary`.

    Args:
        block: what this rank holds at its start.
        route: from `route`, for the bound mesh.
        move: brings a block to another memory; needed where the route has such a hop.

    Raises:
        ValueError: the route rounds to codes, which has no derivative; or moves, and there is no `move`.

    Example:
        >>> from shardfn.core import P, Placement, as_mesh
        >>> from shardfn.collectives import bind_mesh, route
        >>> mesh = as_mesh(None)
        >>> half = Placement(dtype=torch.bfloat16)
        >>> with bind_mesh(mesh):
        ...     carry(torch.ones(2), route((2,), Placement(), half, mesh))
        tensor([1., 1.], dtype=torch.bfloat16)
    """
    mesh = current_mesh()
    for hop, after in _in_one(route):
        shape = after.block_shape(route.shape, mesh.shape, mesh.coords)
        block = _carried(block, hop, shape, move)
    return block


def _in_one(route: Route) -> Iterator[tuple[Hop, Placement]]:
    """Hops, and the placements after them; two hops of one gather, or of one sum, as one."""
    if route.src.brought or route.dst.brought:
        raise ValueError(f"`carry` takes two hops of a gather as one, so none of them is the last:\n{route}")
    first: tuple[str, ...] = ()
    for hop, before, after in zip(route.hops, route.stops, route.stops[1:], strict=False):
        if after.brought and not before.brought and isinstance(hop, AllGather | PsumScatter):
            first = hop.axes
            continue
        if first and isinstance(hop, AllGather | PsumScatter):
            cut = before.spec.dim_axes(hop.dim)
            both = tuple(a for a in cut if a in first or a in hop.axes)
            hop, first = dataclasses.replace(hop, axes=both), ()
        yield hop, after


def _carried(x: Tensor, hop: Hop, shape: torch.Size, move: Mover | None) -> Tensor:
    match hop:
        case Cast(dtype):
            return x.to(dtype)
        case Slice(axes, dim):
            return take_own_block(x, axes, dim=dim)
        case Psum(axes):
            return psum(x, axes)
        case PsumScatter(axes, dim):
            return psum_scatter(x, axes, dim=dim)
        case AllGather(axes, dim):
            return all_gather_invariant(x, axes, dim=dim, size=shape[dim])
        case AllToAll(axes, split_dim, concat_dim):
            return all_to_all(x, axes, split_dim=split_dim, concat_dim=concat_dim, size=shape[concat_dim])
        case Move(memory_kind) if move is not None:
            return move(x, memory_kind)
        case Move() | Encode() | Decode():
            raise ValueError(f"{hop} is not for `carry`: it has no derivative, or needs a `move`.")
