"""Blocks along routes: `carry`, by the differentiable collectives, and `carry_all`, with several under way.

`carry` is the plainest executor of routes: one collective a hop, each waited for, nothing in place. It runs in eager
programs, in graphs that `jit` captures and inside transforms of `torch.func`, and is the reference of other executors.
`carry_all` is for programs that only want the values: the same wire, with the next leaf's transfer under way while the
last one's is waited for.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from shardfn.core import MemoryKind, Pending, Placement, StoredValue

from ._buckets import staggered
from ._env import current_mesh
from ._line import line_along
from ._primitive import Call, bind
from ._route import AllGather, AllToAll, Cast, Hop, Move, Psum, PsumScatter, Route, Slice
from ._together import start_together

# Leaves of fewer bytes share messages, of at most so many bytes of whole leaves; as between meshes.
SMALL, MESSAGE = 64 << 10, 4 << 20

Mover = Callable[[Tensor, MemoryKind], Tensor]
# Starts to move a block from one memory to another.
Sender = Callable[[StoredValue, MemoryKind, MemoryKind], Pending[StoredValue]]
# From the number of a route and its last block to the block that is kept.
Keeper = Callable[[int, StoredValue], StoredValue]


def carry(block: Tensor, route: Route, *, move: Mover | None = None) -> Tensor:
    """This rank's block at the end of a route. Collective over the axes of its hops; the mesh must be bound.

    A result that all ranks hold counts once: its gradient must be the same on all. If each rank goes on in its own way,
    pass it through `pvary`.

    Args:
        block: this rank's block at its start.
        route: from `route`, for the bound mesh.
        move: brings a block to another memory; needed where the route has such a hop.

    Raises:
        ValueError: the route rounds to codes, which has no derivative; or moves, and `move` is None.

    Example:
        >>> from shardfn.core import P, Placement, as_mesh
        >>> from shardfn.collectives import bind_mesh, route
        >>> mesh = as_mesh(None)
        >>> half = Placement(dtype=torch.bfloat16)
        >>> with bind_mesh(mesh):
        ...     carry(torch.ones(2), route((2,), Placement(), half, mesh))
        tensor([1., 1.], dtype=torch.bfloat16)
    """
    for hop, _, shape in _merge_hops(route):
        if isinstance(hop, Cast):
            block = block.to(hop.dtype)
        elif isinstance(hop, Move) and move is not None:
            block = move(block, hop.memory_kind)
        else:
            block = bind(block, _call_of_hop(block, hop, shape))
    return block


def carry_all(
    blocks: Sequence[StoredValue], routes: Sequence[Route], send: Sender, keep: Keeper = lambda i, block: block
) -> list[StoredValue]:
    """This rank's block at the end of each route. Collective over the mesh, which must be bound; no gradients.

    Values and bytes are `carry`'s. Small leaves with the same hops share messages. For routes of h hops, at most h + 1
    blocks, or messages' worth of small ones, are under way.

    Args:
        blocks: this rank's blocks at their starts; blocks on disk in their stored form.
        routes: for the bound mesh; the same on all ranks.
        send: starts to bring a block to another memory.
        keep: called at the end of a route, while others are still under way.

    Raises:
        ValueError: a route rounds to codes.
    """
    out: list[StoredValue] = list(blocks)
    groups = _group_routes([x.dtype for x in blocks], routes)
    staggered([_carry_group(out, at, [routes[i] for i in at], send, keep) for at in groups])
    return out


def _group_routes(dtypes: Sequence[torch.dtype], routes: Sequence[Route]) -> list[list[int]]:
    """The routes that share messages, by number: of small leaves of one dtype, with the same hops. Equal on all ranks.

    A group has the place of its first route.
    """
    out: list[list[int]] = []
    shared: dict[object, tuple[list[int], int]] = {}
    for i, (dtype, way) in enumerate(zip(dtypes, routes, strict=True)):
        hops = tuple(hop for hop, _, _ in _merge_hops(way))
        nbytes = math.prod(way.shape) * max(dtype.itemsize, (way.dst.dtype or dtype).itemsize)
        if nbytes >= SMALL or not any(isinstance(hop, AllGather | AllToAll) for hop in hops):
            out.append([i])
            continue
        group, before = shared.get((dtype, hops), ([], 0))
        if not group or before + nbytes > MESSAGE:
            out.append(group := [])
            before = 0
        group.append(i)
        shared[dtype, hops] = group, before + nbytes
    return out


def _carry_group(
    out: list[StoredValue], at: Sequence[int], routes: Sequence[Route], send: Sender, keep: Keeper
) -> Iterator[None]:
    """Brings `out[i]` along routes of the same hops; each time that something is on its way, others go on."""
    for step in zip(*map(_merge_hops, routes), strict=True):
        blocks, hop = [out[i] for i in at], step[0][0]
        if isinstance(hop, Move):
            moved = hop.memory_kind
            arriving = [send(x, before.memory_kind, moved) for x, (_, before, _) in zip(blocks, step, strict=True)]
            del blocks
            yield
            ends: list[StoredValue] = [x.result() for x in arriving]
        else:
            here = [x for x in blocks if isinstance(x, Tensor)]
            assert len(here) == len(blocks)  # a route moves to the device first
            if isinstance(hop, Cast):
                ends = [x.to(hop.dtype) for x in here]
            else:
                calls = [_call_of_hop(x, one, shape) for x, (one, _, shape) in zip(here, step, strict=True)]
                wait = start_together(here, calls)
                del blocks, here
                yield
                ends = [*wait()]
        for i, end in zip(at, ends, strict=True):
            out[i] = end
    for i in at:
        out[i] = keep(i, out[i])


def _merge_hops(route: Route) -> Iterator[tuple[Hop, Placement, torch.Size]]:
    """Hops, the placements before them, and the shapes of this rank's block after them.

    Two hops of one gather, or of one sum, are one.
    """
    if route.src.brought or route.dst.brought:
        raise ValueError(f"`carry` takes two hops of a gather as one, so none of them is the last:\n{route}")
    mesh = current_mesh()
    first: tuple[str, ...] = ()
    for hop, before, after in zip(route.hops, route.stops, route.stops[1:], strict=False):
        if after.brought and not before.brought and isinstance(hop, AllGather | PsumScatter):
            first = hop.axes
            continue
        if first and isinstance(hop, AllGather | PsumScatter):
            cut = before.spec.dim_axes(hop.dim)
            both = tuple(a for a in cut if a in first or a in hop.axes)
            hop, first = dataclasses.replace(hop, axes=both), ()
        yield hop, before, after.block_shape(route.shape, mesh.shape, mesh.coords)


def _call_of_hop(x: Tensor, hop: Hop, shape: torch.Size) -> Call:
    """The collective that a hop is, of a block that then has `shape`."""
    match hop:
        case Psum(axes):
            name, sizes = "psum", (0, 0, 0, 0)
        case Slice(axes, dim):
            name, sizes = "take_own_block", (dim, x.shape[dim], 0, 0)
        case PsumScatter(axes, dim):
            name, sizes = "psum_scatter", (dim, x.shape[dim], 0, 0)
        case AllGather(axes, dim):
            name, sizes = "all_gather_invariant", (dim, shape[dim], 0, 0)
        case AllToAll(axes, split_dim, concat_dim):
            name, sizes = "all_to_all", (split_dim, x.shape[split_dim], concat_dim, shape[concat_dim])
        case _:
            raise ValueError(f"{hop} is not for `carry`: it has no derivative, or needs a `move`.")
    line = line_along(axes)
    assert line is not None  # a route has no hop along one rank
    return Call(name, line, *sizes)
