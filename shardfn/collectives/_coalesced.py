"""`start_coalesced`: one hop of several small blocks, in one message.

The bytes are the same as with a message for each block. The parts of each block have the block's place in the list. So
the values equal the results of `start`, bit for bit.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from . import _native as native
from ._primitive import Call, start


def start_coalesced(blocks: Sequence[Tensor], calls: Sequence[Call]) -> Callable[[], list[Tensor]]:
    """Starts the call of each block, in one message where the call has a message. Results have separate memory.

    Args:
        blocks: blocks of one dtype and device.
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
    """Returns the whole of one leaf, from the rows of all ranks [ranks, width]."""
    rest = own.shape[1:]
    pieces = [row[: n * rest.numel()].view(n, *rest) for row, n in zip(part, lengths, strict=True)]
    return torch.cat([piece.movedim(0, dim) for piece in pieces], dim).contiguous()


def _exchange_leaves(blocks: Sequence[Tensor], calls: Sequence[Call]) -> Callable[[], list[Tensor]]:
    """Sends each rank its parts of all blocks, one after another."""
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
