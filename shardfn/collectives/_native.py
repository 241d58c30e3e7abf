"""The wire of a loss's collectives: buffers whose first dim counts ranks or rows, on the channel along a line.

There are no gradients and no odd sizes here. Every function reports to the traffic counter under the primitive's name.
Where a program is recorded, or a mode looks at its operations, transfers are ops (`_ragged_ops.py`).
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from shardfn._torch import FakeTensor, num_dispatch_modes, peek_interpreter_stack
from shardfn.collectives.transport import Channel, loss_channel, ordered_sum

from ._axis_group import AxisGroup, this_mesh

_ops = torch.ops.shardfn


def _forget_value(x: Tensor) -> Tensor:
    """Returns `x` without the value of a constant that a tracer remembers, with which it would run the collective."""
    if not isinstance(x, FakeTensor) or x.constant is None:
        return x
    return torch.empty(x.shape, dtype=x.dtype, device=x.device).copy_(x)


def _channel_for(x: Tensor, line: AxisGroup) -> Channel | None:
    """Returns the channel that takes `x` at once, or None where transfers are to be ops."""
    if torch.compiler.is_compiling() or num_dispatch_modes() or peek_interpreter_stack() is not None:
        return None
    if isinstance(x, FakeTensor) or x.is_meta or line.mesh.abstract:
        return None
    if x.numel() and not x.data_ptr():  # without data, in a run of a layer for the structure of its result
        return None
    if line.mesh.device.type == "cpu" and not x.is_cpu:  # ranks would read the address in their separate memory
        raise ValueError(
            f"a collective along {line.axes} of {line.mesh!r} got a tensor on {x.device}. Move it to the CPU."
        )
    return loss_channel(line.mesh, line.axes)


def start_op(name: str, line: AxisGroup, *args: Any) -> Callable[[], Tensor]:
    """Starts a transfer by an op with the axes as last argument. The result waits for the transfer."""
    axes = ",".join(line.axes)
    if torch.compiler.is_compiling():
        whole = getattr(_ops, name)(*args, axes)
        return lambda: whole
    with this_mesh(line.mesh):  # a backward may come without a bound mesh
        handle = getattr(_ops, f"{name}_start")(*args, axes)
    return lambda: _ops.wait(handle)


def all_reduce(x: Tensor, line: AxisGroup, op: str, *, name: str) -> Tensor:
    """Returns `op` ("sum" or "max") over the group of ranks, the same on every rank."""
    if x.numel() == 0:
        return x.clone()
    channel = _channel_for(x, line)
    if channel is None:
        return start_op("loss_psum" if op == "sum" else "loss_pmax", line, _forget_value(x).contiguous())()
    out = x.clone(memory_format=torch.contiguous_format)
    flat = out.view(-1)
    (channel.all_reduce(flat, name=name) if op == "sum" else channel.maximum(flat, name=name)).result()
    return out


def all_gather_start(x: Tensor, line: AxisGroup) -> Callable[[], Tensor]:
    """Starts to gather the blocks of the group, stacked by index: `[...] -> [n, ...]`. Use of the result waits.

    Do not write to `x` until then.
    """
    n, shape = line.size, x.shape
    if x.numel() == 0:
        return lambda: x.new_empty((n, *shape))
    channel, own = _channel_for(x, line), _forget_value(x).contiguous().view(-1)
    if channel is None:
        arrive = start_op("loss_all_gather", line, own, n)
    else:
        arrive = channel.all_gather(own, [own.numel()] * n, settled=True).result

    def wait_blocks() -> Tensor:
        out = arrive().view(n, *shape)
        return out if line.in_order else out[list(line.ranks)]

    return wait_blocks


def reduce_scatter(x: Tensor, line: AxisGroup, *, name: str) -> Tensor:
    """Returns the sum over the line of the row of each rank's `x` that belongs to this index: `[n, ...] -> [...]`."""
    n, shape = line.size, x.shape[1:]
    if x.numel() == 0:
        return x.new_empty(shape)
    if not line.in_order:  # a channel sums in the order of the channel's ranks, not of the line
        each = [shape.numel()] * n
        return _sum_in_order(exchange_start(x.reshape(-1), each, each, line, name=name)().view(n, *shape))
    channel, flat = _channel_for(x, line), _forget_value(x).contiguous().view(-1)
    if channel is None:
        return start_op("loss_psum_scatter", line, flat, n)().view(shape)
    return channel.reduce_scatter(flat, [shape.numel()] * n).result().view(shape)


def exchange_start(
    x: Tensor, send: Sequence[int], recv: Sequence[int], line: AxisGroup, *, name: str
) -> Callable[[], Tensor]:
    """Sends `send[i]` elements of the flat `x` to each index i. The result waits for `recv[i]` elements from each.

    Do not write to `x` until then.
    """
    order = line.indices
    if not line.in_order:
        pieces = x.split(list(send))
        x, send, recv = torch.cat([pieces[i] for i in order]), [send[i] for i in order], [recv[i] for i in order]
    channel, flat, recv = _channel_for(x, line), _forget_value(x).contiguous(), list(recv)
    if channel is None:
        arrive = start_op("loss_exchange", line, flat, list(send), recv, name)
    else:
        arrived = flat.new_empty(sum(recv))
        pending = channel.exchange(flat.split_with_sizes(list(send)), arrived.split_with_sizes(recv), name=name)
        arrive = pending.then(lambda _: arrived).result

    def wait_parts() -> Tensor:
        out = arrive()
        return out if line.in_order else torch.cat([out.split_with_sizes(recv)[rank] for rank in line.ranks])

    return wait_parts


def _sum_in_order(rows: Tensor) -> Tensor:
    """Returns the sum over dim 0 from the first row to the last.

    16-bit floats are summed in 32 bits and rounded once.
    """
    return ordered_sum(list(rows.unbind(0)), None)
