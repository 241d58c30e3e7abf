"""What goes over the wire: torch's functional collectives on buffers whose first dim counts ranks or rows.

They are the ops that a tracer captures. No gradients and no odd sizes here; every function reports to the traffic
counter under the name of the primitive that it serves.
"""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from shardfn.core import AbstractGroup

from ._line import Line
from ._traffic import record
from ._where import recording

_ops = torch.ops._c10d_functional
# What every backend sends as it is. Where nothing is computed on the way, others travel as bytes.
_KNOWN = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
_KNOWN += (torch.int8, torch.uint8, torch.int32, torch.int64, torch.bool)


def _unknown(x: Tensor) -> Tensor:
    """`x` without the value that a tracer remembers of a constant: else it would run the collective there and then."""
    if not isinstance(x, FakeTensor) or x.constant is None:
        return x
    return torch.empty(x.shape, dtype=x.dtype, device=x.device).copy_(x)


def all_reduce(x: Tensor, line: Line, op: str, *, name: str) -> Tensor:
    """`op` ("sum" or "max") over the line; the same on every rank."""
    if x.numel() == 0:
        return x.clone()
    record(name, line.axes, 2 * x.numel() * x.element_size() * (line.size - 1) // line.size, dtype=x.dtype)
    return _ops.wait_tensor(_ops.all_reduce(_unknown(x).contiguous(), op, line.wire))


def all_gather(x: Tensor, line: Line, *, name: str) -> Tensor:
    """The blocks of the line stacked by index: `[...] -> [n, ...]`."""
    return all_gather_start(x, line, name=name)()


def all_gather_start(x: Tensor, line: Line, *, name: str) -> Callable[[], Tensor]:
    """`all_gather` under way; the result waits for it. `x` is not to be written until then."""
    n, shape = line.size, x.shape
    if x.numel() == 0:
        return lambda: x.new_empty((n, *shape))
    record(name, line.axes, x.numel() * x.element_size() * (n - 1), dtype=x.dtype)
    own = _unknown(x).contiguous()
    known = x.dtype in _KNOWN
    own = own if known else own.view(-1).view(torch.uint8)
    under_way = _ops.all_gather_into_tensor(own, n, line.wire)

    def wait() -> Tensor:
        out = _ops.wait_tensor(under_way)
        out = (out if known else out.view(x.dtype)).view(n, *shape)
        return out if line.in_order else out[list(line.ranks)]

    return wait


def reduce_scatter(x: Tensor, line: Line, *, name: str) -> Tensor:
    """The sum over the line of the row of each rank's `x` that belongs to this index: `[n, ...] -> [...]`."""
    n, shape = line.size, x.shape[1:]
    if x.numel() == 0:
        return x.new_empty(shape)
    if _sums_at_home(line):
        each = [shape.numel()] * n
        return _sum_in_order(exchange(x.reshape(-1), each, each, line, name=name).view(n, *shape))
    record(name, line.axes, shape.numel() * x.element_size() * (n - 1), dtype=x.dtype)
    rows = x if line.in_order else x[line.indices]
    out = _ops.reduce_scatter_tensor(_unknown(rows).contiguous().view(-1), "sum", n, line.wire)
    return _ops.wait_tensor(out).view(shape)


def exchange(x: Tensor, send: Sequence[int], recv: Sequence[int], line: Line, *, name: str) -> Tensor:
    """Sends `send[i]` elements of the flat `x` to each index i; returns the `recv[i]` elements from each, in order."""
    return exchange_start(x, send, recv, line, name=name)()


def exchange_start(
    x: Tensor, send: Sequence[int], recv: Sequence[int], line: Line, *, name: str
) -> Callable[[], Tensor]:
    """`exchange` under way; the result waits for it. `x` is not to be written until then."""
    record(name, line.axes, (x.numel() - send[line.index]) * x.element_size(), dtype=x.dtype)
    order = line.indices
    if not line.in_order:
        pieces = x.split(list(send))
        x, send, recv = torch.cat([pieces[i] for i in order]), [send[i] for i in order], [recv[i] for i in order]
    flat, known = _unknown(x).contiguous(), x.dtype in _KNOWN
    flat, width = (flat, 1) if known else (flat.view(torch.uint8), x.dtype.itemsize)
    sizes = [n * width for n in recv], [n * width for n in send]
    under_way = _ops.all_to_all_single(flat, *sizes, line.wire)

    def wait() -> Tensor:
        out = _ops.wait_tensor(under_way)
        out = out if known else out.view(x.dtype)
        return out if line.in_order else torch.cat([out.split(list(recv))[rank] for rank in line.ranks])

    return wait


def _sums_at_home(line: Line) -> bool:
    """The one place that chooses how to reduce-scatter: gloo's own is an all-reduce, which sends twice the bytes.

    A graph has the exchange and the sums, whatever it will run on, and whoever traces it. Memory sums in the order of
    the group's ranks, so where axes are named in another order the sum is made here, too, in theirs.
    """
    group = line.group
    assert group is not None
    if line.wire != group.group_name and line.in_order and not recording() and get_proxy_mode() is None:
        return False
    return (group.backend if isinstance(group, AbstractGroup) else dist.get_backend(group)) == "gloo"


def _sum_in_order(rows: Tensor) -> Tensor:
    """The sum over dim 0 from the first row to the last; 16-bit floats are summed in 32 bits and rounded once."""
    wide = torch.float32 if rows.dtype in (torch.bfloat16, torch.float16) else rows.dtype
    total = rows[0].to(wide) + rows[1]
    for row in rows[2:].unbind(0):
        total.add_(row)
    return total.to(rows.dtype)
