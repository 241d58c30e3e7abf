"""Blocks along routes: `carry`, by the differentiable collectives, and `carry_all`, with several in flight.

`carry` is the plainest executor of routes: one collective a hop, each waited for, nothing in place. `carry` runs in
eager programs, in graphs that `jit` captures and inside transforms of `torch.func`, and is the reference for other
executors. `carry_all` is for programs that need only the values: the same wire, with the next leaf's transfer in flight
while the last leaf's is waited for.

`start_coalesced`: one hop of several small blocks, in a single message.

The bytes are the same as with a message for each block. The parts of each block have the block's place in the list. So
the values equal the results of `start`, bit for bit.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from shardfn import core
from shardfn.core import Placement

from . import _native as native
from ._axis_group import axis_group_along, current_mesh
from ._compressor import staggered
from ._primitive import Call, bind, start
from ._route import AllGather, AllToAll, Cast, Hop, Move, Psum, PsumScatter, Route, Slice


def start_coalesced(blocks: Sequence[Tensor], calls: Sequence[Call]) -> Callable[[], list[Tensor]]:
    """Starts the call of each block, in a single message where the call has a message. Results have separate memory.

    Args:
        blocks: blocks of the same dtype and device.
        calls: calls of one primitive along one line. Dims and sizes may differ.
    """
    name = calls[0].name
    if len(blocks) > 1 and name == "all_gather_invariant":
        return _gather_leaves(blocks, calls)
    if len(blocks) > 1 and name == "all_to_all":
        return _exchange_leaves(blocks, calls)
    waits = [start(x, call) for x, call in zip(blocks, calls, strict=True)]
    return lambda: [wait() for wait in waits]


def _gather_leaves(blocks: Sequence[Tensor], calls: Sequence[Call]) -> Callable[[], list[Tensor]]:
    """Gathers leaves with rows first and blocks padded to the longest, so that all ranks send equally much."""
    line = calls[0].line
    rows = [x.movedim(call.dim, 0) for x, call in zip(blocks, calls, strict=True)]
    lengths = [line.lengths(call.size) for call in calls]
    widths = [x.shape[1:].numel() * max(n) for x, n in zip(rows, lengths, strict=True)]
    message = blocks[0].new_zeros(sum(widths))
    for x, part in zip(rows, message.split(widths), strict=True):
        part[: x.numel()].view(x.shape).copy_(x)
    wait = native.all_gather_start(message, line)

    def take_arrived() -> list[Tensor]:
        parts = wait().split(widths, 1)
        return [_join_leaf(p, n, x, c.dim) for p, n, x, c in zip(parts, lengths, rows, calls, strict=True)]

    return take_arrived


def _join_leaf(part: Tensor, lengths: Sequence[int], own: Tensor, dim: int) -> Tensor:
    """Returns the whole of a single leaf, from the rows of all ranks [ranks, width]."""
    rest = own.shape[1:]
    pieces = [row[: n * rest.numel()].view(n, *rest) for row, n in zip(part, lengths, strict=True)]
    return torch.cat([piece.movedim(0, dim) for piece in pieces], dim).contiguous()


def _exchange_leaves(blocks: Sequence[Tensor], calls: Sequence[Call]) -> Callable[[], list[Tensor]]:
    """Sends each rank its parts of all blocks, in sequence."""
    line = calls[0].line
    sent = [x.split(line.lengths(call.size), call.dim) for x, call in zip(blocks, calls, strict=True)]
    arriving = [_arriving_shapes(x, call) for x, call in zip(blocks, calls, strict=True)]
    send = [sum(parts[i].numel() for parts in sent) for i in range(line.size)]
    recv = [sum(shapes[i].numel() for shapes in arriving) for i in range(line.size)]
    message = torch.cat([parts[i].reshape(-1) for i in range(line.size) for parts in sent])
    wait = native.exchange_start(message, send, recv, line, name="all_to_all")

    def take_arrived() -> list[Tensor]:
        flat = iter(wait().split([shapes[i].numel() for i in range(line.size) for shapes in arriving]))
        found = [[next(flat).view(shapes[i]) for shapes in arriving] for i in range(line.size)]
        return [torch.cat([row[k] for row in found], call.concat_dim) for k, call in enumerate(calls)]

    return take_arrived


def _arriving_shapes(x: Tensor, call: Call) -> list[torch.Size]:
    """Returns the shapes of the parts that come from each index."""
    own = call.line.lengths(call.size)[call.line.index]
    shapes = []
    for rows in call.line.lengths(call.concat_size):
        shape = [*x.shape]
        shape[call.dim], shape[call.concat_dim] = own, rows
        shapes.append(torch.Size(shape))
    return shapes


# Leaves of fewer bytes share messages, of at most as many bytes of whole leaves, as between meshes.
SMALL, MESSAGE = 64 << 10, 4 << 20

Mover = Callable[[Tensor, core.MemoryKind], Tensor]
# Starts to move a block from a memory to another.
Sender = Callable[[core.StoredValue, core.MemoryKind, core.MemoryKind], core.Pending[core.StoredValue]]
# From the number of a route and its last block to the block that is kept.
RematResults = Callable[[int, core.StoredValue], core.StoredValue]


def carry(block: Tensor, route: Route, *, move: Mover | None = None) -> Tensor:
    """Returns this rank's block at the end of a route. Collective over the axes of the hops. The mesh must be bound.

    A result that all ranks hold counts once: the gradient must be the same on all ranks. If ranks continue in different
    ways, pass the result through `pvary`.

    Args:
        block: this rank's block at the start of the route.
        route: result of `route`, for the bound mesh.
        move: function that brings a block to another memory. Needed where the route has such a hop.

    Raises:
        ValueError: the route rounds to codes, without a derivative, or the route moves and `move` is None.

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
    blocks: Sequence[core.StoredValue],
    routes: Sequence[Route],
    send: Sender,
    keep: RematResults = lambda i, block: block,
) -> list[core.StoredValue]:
    """Returns this rank's block at the end of each route, without gradients. Collective over the bound mesh.

    Values and bytes are as in `carry`. Small leaves with the same hops share messages. For routes of h hops, at most h
    + 1 blocks (or full messages of small blocks) are in flight, for example 3 for routes of 2 hops.

    Args:
        blocks: this rank's blocks at the starts of the routes, with blocks on disk in stored form.
        routes: routes for the bound mesh, the same on all ranks.
        send: function that starts to bring a block to another memory.
        keep: function that is called at the end of a route, while other routes are still in flight.

    Raises:
        ValueError: a route rounds to codes.
    """
    out: list[core.StoredValue] = list(blocks)
    groups = _group_routes([x.dtype for x in blocks], routes)
    staggered([_carry_group(out, at, [routes[i] for i in at], send, keep) for at in groups])
    return out


def _group_routes(dtypes: Sequence[torch.dtype], routes: Sequence[Route]) -> list[list[int]]:
    """Returns the numbers of routes that share messages: small leaves of the same dtype with the same hops.

    The result is equal on all ranks. A group has the place of the group's first route.
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
    out: list[core.StoredValue], at: Sequence[int], routes: Sequence[Route], send: Sender, keep: RematResults
) -> Iterator[None]:
    """Brings `out[i]` along routes of the same hops, and yields whenever something is in flight."""
    for step in zip(*map(_merge_hops, routes), strict=True):
        blocks, hop = [out[i] for i in at], step[0][0]
        if isinstance(hop, Move):
            moved = hop.memory_kind
            arriving = [send(x, before.memory_kind, moved) for x, (_, before, _) in zip(blocks, step, strict=True)]
            del blocks
            yield
            ends: list[core.StoredValue] = [x.result() for x in arriving]
        else:
            here = [x for x in blocks if isinstance(x, Tensor)]
            assert len(here) == len(blocks)  # a route moves to the device first
            if isinstance(hop, Cast):
                ends = [x.to(hop.dtype) for x in here]
            else:
                calls = [_call_of_hop(x, one, shape) for x, (one, _, shape) in zip(here, step, strict=True)]
                wait = start_coalesced(here, calls)
                del blocks, here
                yield
                ends = [*wait()]
        for i, end in zip(at, ends, strict=True):
            out[i] = end
    for i in at:
        out[i] = keep(i, out[i])


def _merge_hops(route: Route) -> Iterator[tuple[Hop, Placement, torch.Size]]:
    """Yields hops, each with the placement before and the shape of this rank's block after.

    The two hops of a gather, or of a sum, are merged.
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
    """Returns the call of a hop's collective, after which the block has `shape`."""
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
    line = axis_group_along(axes)
    assert line is not None  # a route has no hop along one rank
    return Call(name, line, *sizes)
