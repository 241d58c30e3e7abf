"""Transfers between memories as torch ops, so that a captured graph holds each transfer as a node.

    to_host_start(x) -> handle                     to_host_into_start(into, x) -> handle
    to_device_start(x, device) -> handle           to_device_into_start(into, x) -> handle
    rows_to_device_start(x, rows, device) -> handle        of x's shape, with some of its rows
    rows_to_host_start(into, x, places) -> handle          into[places] = x
    read_start(value, lo, hi, shape, dtype) -> handle      rows lo:hi of a value on disk
    read_into_start(into, value, lo, hi) -> handle
    flat(value) -> value                           as a single dim
    writer(shape, dtype) -> writer                 room for a value on disk
    write_start(writer, lo, rows) -> handle        rows from lo on
    finish(writer) -> value                        waits for all writes
    wait(handle) -> the value
    host_empty(shape, dtype) -> tensor             uninitialised host memory

A value on disk is not a tensor: `value` and `writer` are tokens, int64 tensors of a single element that identify the
value by number. A value lives as long as the memory of a token does. The value of a transfer that fills existing
memory, or the disk, is unused. The source must not be written before the `wait`. As in `shardfn.collectives`, handles
are placeholders for values, and only the value may be looked at.

A value that is too large to be moved whole for each use, such as a KV cache on the host, is moved in rows. Only the
bytes of these rows are moved and counted in the ledger.
"""

import contextlib
import itertools
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, cast

import numpy as np
import torch
from jaxtyping import Int, Int64, Shaped
from torch import Tensor
from torch.fx.node import has_side_effect

from shardfn import core
from shardfn.core import Pending

from ._host import host_empty
from ._ledger import default_device, on_host, record_move
from ._traced import capturing, traced_rows_to_device, traced_rows_to_host
from ._transfer import copies_to_device, on_thread, to_device, to_host


def rows_to_device(
    x: Shaped[Tensor, "n ..."], rows: Int[Tensor, "..."], device: torch.device | str | None = None
) -> Pending[Tensor]:
    """Starts the copy of some rows of a host tensor to a device. Not differentiable.

    Args:
        x: host tensor, contiguous. On CUDA, only tensors from `host_empty` are copied asynchronously.
        rows: indices of dim 0 on the CPU, in any order and with repetitions, for example [3, 0, 3].
        device: target device. Default: the accelerator if available, else the CPU.

    Returns:
        A tensor of `x`'s shape on the device, in flight. Other rows are not initialised. `x` must not be used until the
        copy is done. In a capture, the transfer is an op of the graph.

    Raises:
        ValueError: `rows` are not on the CPU, or (in a graph, when it runs) are out of range.

    Example:
        >>> x = torch.arange(6).view(3, 2)
        >>> rows_to_device(x, torch.tensor([2, 0, 2])).result()[[0, 2]]
        tensor([[0, 1],
                [4, 5]])
    """
    x = x.detach()
    place = torch.device(device) if device is not None else default_device()
    if rows.device.type != "cpu":
        raise ValueError(f"rows must be on the CPU, got {rows.device}. Pass rows.cpu().")
    if capturing():
        return traced_rows_to_device(x, rows, place)
    runs = _row_runs(rows.numpy().reshape(-1), len(x))
    out = torch.empty(x.shape, dtype=x.dtype, device=place)
    record_move("host", "device", sum(hi - lo for lo, hi in runs) * x[:1].nbytes)
    return copies_to_device(out, [(out[lo:hi], x[lo:hi]) for lo, hi in runs])


def rows_to_host(
    x: Shaped[Tensor, "n ..."], out: Shaped[Tensor, "..."], places: Sequence[Int[Tensor, " n"]]
) -> Pending[Tensor]:
    """Starts the copy of rows of a device tensor into places of a host tensor. Not differentiable.

        out[places[0][i], places[1][i], ...] = x[i]

    Args:
        x: device tensor.
        out: host tensor to write to.
        places: indices of the first dims of `out`, on the CPU. Rows of the same place must be equal.

    Returns:
        `out`, in flight. `out` and `x` must not be used until the copy is done. In a capture, the transfer is an op of
        the graph.

    Raises:
        ValueError: `places` are not on the CPU.

    Example:
        >>> out = torch.zeros(2, 2, 3)
        >>> rows_to_host(torch.ones(1, 3), out, [torch.tensor([1]), torch.tensor([0])]).result()[1]
        tensor([[1., 1., 1.],
                [0., 0., 0.]])
    """
    x = x.detach()
    if any(at.device.type != "cpu" for at in places):
        raise ValueError("places must be on the CPU. Pass .cpu() of each place.")
    if capturing():
        return traced_rows_to_host(x, out, places)
    at = tuple(p.long() for p in places)
    if x.is_cuda:  # through a separate buffer: the host writes the rows to `out` when the buffer is filled
        return to_host(x).then(lambda rows: out.index_put_(at, rows))
    record_move("device", "host", x.nbytes)
    return on_thread("down", out, out.index_put_, at, x)


def _row_runs(rows: np.ndarray, num: int) -> list[tuple[int, int]]:
    """Returns the rows in order as ranges, `(lo, hi)`, that do not touch."""
    if len(rows) and not (0 <= rows.min() and rows.max() < num):
        raise ValueError(f"rows must be in 0 to {num - 1}, got {rows.min()} to {rows.max()}.")
    wanted = np.zeros(num + 2, np.int8)
    wanted[rows + 1] = 1
    edges = np.flatnonzero(np.diff(wanted)).tolist()
    return list(zip(edges[::2], edges[1::2], strict=True))


_LIBRARY = torch.library.Library("shardfn_memory", "DEF")
_LIBRARY.define("to_host_start(Tensor x) -> Tensor")
_LIBRARY.define("to_host_into_start(Tensor(a!) into, Tensor x) -> Tensor")
_LIBRARY.define("to_device_start(Tensor x, Device device) -> Tensor")
_LIBRARY.define("to_device_into_start(Tensor(a!) into, Tensor x) -> Tensor")
_LIBRARY.define("rows_to_device_start(Tensor x, Tensor rows, Device device) -> Tensor")
_LIBRARY.define("rows_to_host_start(Tensor(a!) into, Tensor x, Tensor[] places) -> Tensor")
_LIBRARY.define("read_start(Tensor value, int lo, int hi, int[] shape, ScalarType dtype) -> Tensor")
_LIBRARY.define("read_into_start(Tensor(a!) into, Tensor value, int lo, int hi) -> Tensor")
_LIBRARY.define("flat(Tensor value) -> Tensor")
_LIBRARY.define("writer(int[] shape, ScalarType dtype) -> Tensor")
_LIBRARY.define("write_start(Tensor(a!) writer, int lo, Tensor rows) -> Tensor")
_LIBRARY.define("finish(Tensor(a!) writer) -> Tensor(a!)")
_LIBRARY.define("wait(Tensor(a) handle) -> Tensor(a)")
_LIBRARY.define("host_empty(int[] shape, ScalarType dtype) -> Tensor")

# By storage of the handle: transfers in flight. By number: the values of tokens.
_IN_FLIGHT = core.OfProgram[dict[int, tuple[Tensor, core.Pending[Any]]]]("transfers between memories in flight", dict)
_NAMED: dict[int, Any] = {}
_NUMBERS = itertools.count()
_POOL = core.Ambient[Any]("pool that a captured program writes to")


@contextlib.contextmanager
def bind_pool(pool: Any = None) -> Iterator[None]:
    """Binds the pool that captured programs write to. At the end no transfer is pending, even after an error.

    Args:
        pool: a `Pool`, or None for programs that write nothing to disk.

    Example:
        >>> with bind_pool():
        ...     torch.ops.shardfn_memory.wait(torch.ops.shardfn_memory.to_host_start(torch.ones(2)))
        tensor([1., 1.])
    """
    try:
        with _POOL.bound(pool):
            yield
            _wait_in_flight()
    finally:
        while _IN_FLIGHT.here():
            with contextlib.suppress(Exception):  # the error that ended the program is raised
                _wait_in_flight()


def _wait_in_flight() -> None:
    """Waits for transfers without a `wait`, because the memory may be the caller's."""
    pending = _IN_FLIGHT.here()
    while pending:
        pending.popitem()[1][1].result()


def token_of(value: Any) -> Int64[Tensor, "1"]:
    """Returns a tensor that represents a value on disk, or a writer, in a captured program.

    Example:
        >>> stored_of(token_of("anything"))
        'anything'
    """
    number = next(_NUMBERS)
    with on_host():
        token = torch.tensor([number])
    _NAMED[number] = value
    weakref.finalize(token.untyped_storage(), _NAMED.pop, number, None)
    return token


def stored_of(token: Int64[Tensor, "1"]) -> Any:
    """Returns the value of a token."""
    return _NAMED[int(token)]


def _start_transfer(pending: core.Pending[Any]) -> Tensor:
    with on_host():
        handle = torch.empty(0)
    _IN_FLIGHT.here()[handle.untyped_storage()._cdata] = handle, pending
    return handle


def _wait_transfer(handle: Tensor) -> Tensor:
    kept, pending = _IN_FLIGHT.here().pop(handle.untyped_storage()._cdata)
    value = pending.result()
    return value if isinstance(value, Tensor) else kept


def _to_host_start(x: Tensor) -> Tensor:
    return _start_transfer(to_host(x))


def _to_host_into_start(into: Tensor, x: Tensor) -> Tensor:
    return _start_transfer(to_host(x, into))


def _to_device_start(x: Tensor, device: torch.device) -> Tensor:
    return _start_transfer(to_device(x, device))


def _to_device_into_start(into: Tensor, x: Tensor) -> Tensor:
    return _start_transfer(to_device(x, into.device, into))


def _rows_to_device_start(x: Tensor, rows: Tensor, device: torch.device) -> Tensor:
    return _start_transfer(rows_to_device(x, rows, device))


def _rows_to_host_start(into: Tensor, x: Tensor, places: Sequence[Tensor]) -> Tensor:
    # The wait must not return existing memory: a ledger would count the bytes again.
    return _start_transfer(rows_to_host(x, into, places).then(lambda _: None))


def _read_start(value: Tensor, lo: int, hi: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    del shape, dtype
    stored: core.Stored = stored_of(value)
    return _start_transfer(stored.read(lo, hi))


def _read_into_start(into: Tensor, value: Tensor, lo: int, hi: int) -> Tensor:
    stored: core.Stored = stored_of(value)
    return _start_transfer(stored.read(lo, hi, into))


def _flat_value(value: Tensor) -> Tensor:
    stored: core.Stored = stored_of(value)
    return token_of(stored.flat())


def _open_writer(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return token_of(cast(Any, _POOL.innermost()).writer(torch.Size(shape), dtype))


def _write_start(writer: Tensor, lo: int, rows: Tensor) -> Tensor:
    return _start_transfer(stored_of(writer).write(lo, rows))


def _finish_writer(writer: Tensor) -> Tensor:
    # Under the number of the writer: from now on the writer's token represents the value.
    number = int(writer)
    _NAMED[number] = _NAMED[number].finish()
    return writer


def _host_empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return host_empty(tuple(shape), dtype)


for _name, _impl in (
    ("to_host_start", _to_host_start),
    ("to_host_into_start", _to_host_into_start),
    ("to_device_start", _to_device_start),
    ("to_device_into_start", _to_device_into_start),
    ("rows_to_device_start", _rows_to_device_start),
    ("rows_to_host_start", _rows_to_host_start),
    ("read_start", _read_start),
    ("read_into_start", _read_into_start),
    ("flat", _flat_value),
    ("writer", _open_writer),
    ("write_start", _write_start),
    ("finish", _finish_writer),
    ("wait", _wait_transfer),
    ("host_empty", _host_empty),
):
    _LIBRARY.impl(_name, _impl, "CompositeExplicitAutograd")


def _empty_like(x: Tensor, device: torch.device | str) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=device)


def _empty_handle(*args: Any) -> Tensor:
    del args
    return torch.empty(0)


def _empty_tensor(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.empty(tuple(shape), dtype=dtype)


def _empty_token(*args: Any) -> Tensor:
    del args
    return torch.empty(1, dtype=torch.int64)


for _name, _fake in (
    ("to_host_start", lambda x: _empty_like(x, "cpu")),
    ("to_host_into_start", _empty_handle),
    ("to_device_start", _empty_like),
    ("to_device_into_start", _empty_handle),
    ("rows_to_device_start", lambda x, rows, device: _empty_like(x, device)),
    ("rows_to_host_start", _empty_handle),
    ("read_start", lambda value, lo, hi, shape, dtype: _empty_tensor(shape, dtype)),
    ("read_into_start", _empty_handle),
    ("flat", _empty_token),
    ("writer", _empty_token),
    ("write_start", _empty_handle),
    ("finish", lambda writer: writer),
    ("wait", lambda handle: handle),
    ("host_empty", _empty_tensor),
):
    torch.library.register_fake(f"shardfn_memory::{_name}", _fake, lib=_LIBRARY)

# Ops with side effects, kept in the graph although the values are unused.
for _name in (
    *("to_host_into_start", "to_device_into_start", "rows_to_host_start", "read_into_start", "write_start"),
    *("wait", "finish"),
):
    has_side_effect(getattr(torch.ops.shardfn_memory, _name).default)
