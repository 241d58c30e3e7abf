"""Transfers between device and host: asynchronous values with an explicit wait.

On CUDA a transfer is a copy between pinned and device memory on a separate stream for each direction. Without an
accelerator a transfer is a copy too, by a thread for each direction. Traffic, residency and overlap are the same, with
RAM as the link. Ren et al., ZeRO-Offload, 2021, https://arxiv.org/abs/2101.06840

`put` moves a tensor between memory kinds. `put` is an identity with a transpose.
"""

import concurrent.futures
import functools
import os
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from jaxtyping import Shaped
from torch import Tensor

from shardfn import core

from ._host import host_empty
from ._ledger import default_device, record_move
from ._lock import Threads
from ._traced import capturing, traced_to_device, traced_to_host

T = TypeVar("T")


def of_futures(value: T, futures: Sequence[concurrent.futures.Future[Any]]) -> core.Pending[T]:
    """Returns a transfer that is done when all of `futures` are. The error is the first future's error."""
    futures = tuple(futures)

    def wait_for_event() -> None:
        # Waits for all before raising the first error: no thread may still write into memory that the caller reuses.
        for error in [future.exception() for future in futures]:
            if error is not None:
                raise error

    def wait_for_all() -> T:
        wait_for_event()
        return value

    return core.Pending(wait_for_all, lambda: all(f.done() for f in futures), wait_for_event)


def to_host(x: Shaped[Tensor, "..."], out: Shaped[Tensor, "..."] | None = None) -> core.Pending[Tensor]:
    """Starts the copy of a device tensor to the host. Not differentiable. `put` is.

    Args:
        x: device tensor, any shape and dtype.
        out: host tensor of that shape and dtype to fill, or None for a new tensor.

    Returns:
        The host tensor, in flight. `x` and `out` must not be used until the copy is done. In a capture, the transfer is
        an op of the graph.

    Raises:
        ValueError: `out` differs in shape or dtype, or is not a CPU tensor.

    Example:
        >>> to_host(torch.arange(3.0)).result()
        tensor([0., 1., 2.])
    """
    x = x.detach()
    if capturing():
        return traced_to_host(x, out)
    if out is None:
        out = host_empty(x.shape, x.dtype)
    _check_out(x, out, torch.device("cpu"))
    record_move("device", "host", x.nbytes)
    if x.is_cuda:
        return _copy_cuda(out, [(out, x)], x.device, "down")
    return on_thread("down", out, _copy_parts, [(out, x)])


def to_device(
    x: Shaped[Tensor, "..."], device: torch.device | str | None = None, out: Shaped[Tensor, "..."] | None = None
) -> core.Pending[Tensor]:
    """Starts the copy of a host tensor to a device. Not differentiable. `put` is.

    Args:
        x: host tensor, any shape and dtype. On CUDA, only tensors from `host_empty` are copied asynchronously.
        device: target device. Default: the device of `out`, else the accelerator if available, else the CPU.
        out: tensor of that shape and dtype to fill, on the device, or None for a new tensor.

    Returns:
        The device tensor, in flight. `x` and `out` must not be used until `done()` or after `wait()`. In a capture, the
        transfer is an op of the graph.

    Raises:
        ValueError: `out` differs in shape, dtype or device.

    Example:
        >>> to_device(to_host(torch.ones(2)).result()).result()
        tensor([1., 1.])
    """
    x = x.detach()
    place = torch.device(device) if device is not None else out.device if out is not None else default_device()
    if capturing():
        return traced_to_device(x, place, out)
    if out is None:
        out = torch.empty(x.shape, dtype=x.dtype, device=place)
    _check_out(x, out, place)
    record_move("host", "device", x.nbytes)
    return copies_to_device(out, [(out, x)])


def send(
    x: Shaped[Tensor, "..."],
    src: core.MemoryKind,
    dst: core.MemoryKind,
    device: torch.device,
    out: Shaped[Tensor, "..."] | None = None,
) -> core.Pending[Tensor]:
    """Starts the copy of a tensor from the device to the host, or back. Not differentiable. `put` is.

    Args:
        x: tensor of `src`.
        src: "device" or "host".
        dst: "device" or "host".
        device: target device, if `dst` is "device".
        out: tensor of `dst` to fill, or None for a new tensor.

    Returns:
        The tensor of `dst`, in flight: `x` for equal memories without `out`.

    Example:
        >>> send(torch.ones(2), "host", "device", torch.device("cpu")).result()
        tensor([1., 1.])
    """
    if src == dst:
        return core.Pending.of(x if out is None else out.copy_(x))
    return to_host(x, out) if core.is_device(src) else to_device(x, device, out)


def copies_to_device(out: Tensor, parts: Sequence[tuple[Tensor, Tensor]]) -> core.Pending[Tensor]:
    """Returns a device tensor, in flight, with parts copied from the host: `(part, source)` for each part."""
    if out.is_cuda:
        return _copy_cuda(out, parts, out.device, "up")
    return on_thread("up", out, _copy_parts, parts)


def on_thread(way: str, out: Tensor, run: Callable[..., object], *args: Any) -> core.Pending[Tensor]:
    """Returns a tensor, in flight, that a call by the thread of one direction fills."""
    return of_futures(out, [_thread(way).submit(run, *args)])


def _check_out(x: Tensor, out: Tensor, device: torch.device) -> None:
    wrong = [
        f"{what} {found}, expected {wanted}"
        for what, found, wanted in (
            ("shape", tuple(out.shape), tuple(x.shape)),
            ("dtype", out.dtype, x.dtype),
            ("device", out.device.type, device.type),
        )
        if found != wanted
    ]
    if wrong:
        raise ValueError(f"out has {'; '.join(wrong)}. A transfer copies bytes: cast or reshape before or after it.")


def _copy_parts(parts: Sequence[tuple[Tensor, Tensor]]) -> None:
    for out, x in parts:
        out.copy_(x)


def _copy_cuda(
    out: Tensor, parts: Sequence[tuple[Tensor, Tensor]], device: torch.device, way: str
) -> core.Pending[Tensor]:
    stream, event = _copy_stream(device.index, way), torch.cuda.Event()
    # After the computation of the source, and after earlier uses of the memory of a fresh `out`.
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for part, x in parts:
            part.copy_(x, non_blocking=True)
        event.record(stream)
    for side in (out, *(x for _, x in parts)):
        if side.is_cuda:
            side.record_stream(stream)

    def is_ready() -> Tensor:
        if way == "up":
            torch.cuda.current_stream(device).wait_event(event)
        else:
            event.synchronize()
        return out

    # A pinned source need not be kept alive: torch's allocator waits for the copy. A pageable source is copied
    # immediately.
    return core.Pending(is_ready, event.query, event.synchronize)


@functools.cache
def _copy_stream(index: int, way: str) -> "torch.cuda.Stream":
    del way
    return torch.cuda.Stream(index)


@functools.cache
def _thread(way: str) -> Threads:
    """Returns the thread of a direction. Copies of a direction stay in order, as on a stream."""
    return Threads(1, f"shardfn-{way}")


# A forked child does not have its parent's threads.
if hasattr(os, "register_at_fork"):  # Windows does not fork
    os.register_at_fork(after_in_child=_thread.cache_clear)


def put(
    x: Shaped[Tensor, "..."], kind: core.MemoryKind, device: torch.device | str | None = None
) -> Shaped[Tensor, "..."]:
    """Copies a tensor to another memory kind: an identity whose transpose copies back.

    The call waits for the copy. `put` composes with `torch.func`: grad, vjp, jvp, vmap, and nestings such as jvp of
    grad.

    Args:
        x: device tensor for `kind="host"`, host tensor for `kind="device"`. Any shape.
        kind: "host" or "device". Values on disk are not tensors: write them with `Pool.write`.
        device: target device for `kind="device"`. Default: the accelerator if available, else the CPU. For
            `kind="host"`, the device of the cotangents. Default: the device of `x`.

    Returns:
        The copy.

    Raises:
        ValueError: `kind` is neither "host" nor "device".

    Example:
        >>> x = torch.ones(2, requires_grad=True)
        >>> put(3 * put(x, "host"), "device").sum().backward()
        >>> x.grad
        tensor([3., 3.])
    """
    if kind not in core.TENSOR_KINDS:
        raise ValueError(
            f"put(x, {kind!r}): the kind must be 'host' or 'device'. For the disk, `pool.write(x)` gives a"
            " DiskTensor, and `.read()` reads it back. Neither is differentiable."
        )
    place = torch.device(device) if device is not None else default_device() if core.is_device(kind) else x.device
    return _MemoryPut.apply(x, kind, place)


def _other(kind: core.MemoryKind) -> core.MemoryKind:
    (other,) = core.TENSOR_KINDS - {kind}
    return other


class _MemoryPut(torch.autograd.Function):
    """Autograd function of both directions."""

    @staticmethod
    def forward(x: Tensor, kind: core.MemoryKind, device: torch.device) -> Tensor:
        return send(x, _other(kind), kind, device).result()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, core.MemoryKind, torch.device], output: Tensor) -> None:
        _, ctx.kind, ctx.device = inputs

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None]:
        return _MemoryPut.apply(grad_outputs[0], _other(ctx.kind), ctx.device), None, None

    @staticmethod
    def jvp(ctx: Any, *grad_inputs: Tensor | None) -> Tensor:
        tangent = grad_inputs[0]
        assert tangent is not None
        return _MemoryPut.apply(tangent, ctx.kind, ctx.device)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, None, None], *args: Any) -> tuple[Tensor, int]:
        return _MemoryPut.apply(*args), in_dims[0] or 0


class Fetch(core.Pending[Tensor]):
    """Transfer of a piece to the device, in up to two steps: disk to host, host to device.

    Args:
        source: piece: a tensor on the host, or a pending transfer to the host.
        device: device of the result.
    """

    def __init__(self, source: Tensor | core.Pending[Tensor], device: torch.device) -> None:
        super().__init__()
        self._source: Tensor | core.Pending[Tensor] | None = source
        self._device = device
        self._moving: core.Pending[Tensor] | None = None

    def move(self) -> None:
        """Begins the step to the device, and waits for the disk."""
        if self._source is not None:
            host = self._source if isinstance(self._source, Tensor) else self._source.result()
            self._moving, self._source = to_device(host, self._device), None

    def move_if_ready(self) -> None:
        """Begins the step to the device, unless this would wait."""
        if isinstance(self._source, Tensor) or (self._source is not None and self._source.done()):
            self.move()

    def done(self) -> bool:
        """Returns whether `result()` would return immediately."""
        return self._moving is not None and self._moving.done()

    def result(self) -> Tensor:
        """Waits for the piece, and returns a tensor on the device."""
        self.move()
        assert self._moving is not None
        return self._moving.result()
