"""Pieces of leaves between memory kinds: `put`, the identity with a transpose, and pieces in flight to the device."""

from typing import Any

import torch
from jaxtyping import Shaped
from torch import Tensor

from shardfn.core import TENSOR_KINDS, MemoryKind, Pending, is_device

from ._ledger import default_device
from ._transfer import send, to_device


def put(x: Shaped[Tensor, "..."], kind: MemoryKind, device: torch.device | str | None = None) -> Shaped[Tensor, "..."]:
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
    if kind not in TENSOR_KINDS:
        raise ValueError(
            f"put(x, {kind!r}): the kind must be 'host' or 'device'. For the disk, `pool.write(x)` gives a"
            " DiskTensor, and `.read()` reads it back. Neither is differentiable."
        )
    place = torch.device(device) if device is not None else default_device() if is_device(kind) else x.device
    return _MemoryPut.apply(x, kind, place)


def _other(kind: MemoryKind) -> MemoryKind:
    (other,) = TENSOR_KINDS - {kind}
    return other


class _MemoryPut(torch.autograd.Function):
    """Autograd function of both directions."""

    @staticmethod
    def forward(x: Tensor, kind: MemoryKind, device: torch.device) -> Tensor:
        return send(x, _other(kind), kind, device).result()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, MemoryKind, torch.device], output: Tensor) -> None:
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


class Fetch(Pending[Tensor]):
    """Transfer of a piece to the device, in up to two steps: disk to host, host to device.

    Args:
        source: piece: a tensor on the host, or a pending transfer to the host.
        device: device of the result.
    """

    def __init__(self, source: Tensor | Pending[Tensor], device: torch.device) -> None:
        super().__init__()
        self._source: Tensor | Pending[Tensor] | None = source
        self._device = device
        self._moving: Pending[Tensor] | None = None

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
