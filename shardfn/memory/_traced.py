"""Transfers while a program is captured: each transfer and each wait becomes an op of the graph.

Callers write one program: `to_host`, `to_device` and `host_empty` add ops to the graph in a capture, and move data
otherwise. A `TracedPool` replaces the pool. A value on disk is not a tensor. So a graph holds a token of the value (see
`_ops.py`).
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Int64, Shaped
from torch import Tensor

from shardfn._torch import FAKE, PROXY, dispatch_mode
from shardfn.core import MemoryKind, Pending

_ops: Any = torch.ops.shardfn_memory
_MODES = FAKE, PROXY


def capturing() -> bool:
    """Returns whether a program is being captured, on tensors without data."""
    return any(dispatch_mode(mode) is not None for mode in _MODES)


def _recorded_result(handle: Tensor, out: Tensor | None = None) -> Pending[Any]:
    """Returns a value that arrives when the graph runs: the wait is recorded at the first use.

    Args:
        handle: handle of the started transfer.
        out: the tensor that the transfer fills, if it exists.
    """
    here: list[Tensor] = []

    def take_result() -> Tensor:
        if not here:
            arrived = _ops.wait(handle)
            here.append(arrived if out is None else out)
        return here[0]

    return Pending(take_result)


def traced_to_host(x: Tensor, out: Tensor | None) -> Pending[Any]:
    """Records `to_host` as an op."""
    return _recorded_result(_ops.to_host_start(x) if out is None else _ops.to_host_into_start(out, x), out)


def traced_to_device(x: Tensor, device: torch.device, out: Tensor | None) -> Pending[Any]:
    """Records `to_device` as an op."""
    return _recorded_result(_ops.to_device_start(x, device) if out is None else _ops.to_device_into_start(out, x), out)


def traced_rows_to_device(x: Tensor, rows: Tensor, device: torch.device) -> Pending[Any]:
    """Records `rows_to_device` as an op."""
    return _recorded_result(_ops.rows_to_device_start(x, rows, device))


def traced_rows_to_host(x: Tensor, out: Tensor, places: Sequence[Tensor]) -> Pending[Any]:
    """Records `rows_to_host` as an op."""
    return _recorded_result(_ops.rows_to_host_start(out, x, list(places)), out)


def traced_host_empty(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Records `host_empty` as an op."""
    return _ops.host_empty(shape, dtype)


class TracedStored:
    """A value on disk, in a capture: `Stored`.

    Args:
        token: tensor in the graph.
        shape: shape of the tensor.
        dtype: dtype of the elements.
    """

    quantization: tuple[int, int] | None = None

    def __init__(self, token: Int64[Tensor, "1"], shape: torch.Size, dtype: torch.dtype) -> None:
        self.token, self.shape, self.dtype = token, torch.Size(shape), dtype

    @property
    def kind(self) -> MemoryKind:
        """Returns the memory kind: "disk"."""
        return "disk"

    @property
    def nbytes(self) -> int:
        """Returns the bytes of the value."""
        return math.prod(self.shape) * self.dtype.itemsize

    def flat(self) -> "TracedStored":
        """Returns the same value with a single dim."""
        return TracedStored(_ops.flat(self.token), torch.Size([math.prod(self.shape)]), self.dtype)

    def load(self) -> Shaped[Tensor, "..."]:
        """Returns the whole value."""
        return self.read().result()

    def read(self, lo: int = 0, hi: int | None = None, out: Tensor | None = None) -> Pending[Any]:
        """Reads rows `lo:hi` of dim 0."""
        hi = (self.shape[0] if self.shape else 1) if hi is None else hi
        if out is not None:
            return _recorded_result(_ops.read_into_start(out, self.token, lo, hi), out)
        shape = (hi - lo, *self.shape[1:]) if self.shape else ()
        return _recorded_result(_ops.read_start(self.token, lo, hi, shape, self.dtype))


class TracedWriter:
    """The writer of a value in chunks, in a capture."""

    def __init__(self, shape: torch.Size, dtype: torch.dtype) -> None:
        self._shape, self._dtype = torch.Size(shape), dtype
        self._token = _ops.writer(self._shape, dtype)

    def write(self, lo: int, rows: Shaped[Tensor, "..."]) -> Pending[Any]:
        """Writes rows from `lo` on."""
        return _recorded_result(_ops.write_start(self._token, lo, rows))

    def finish(self) -> TracedStored:
        """Returns the value, when all rows are written."""
        return TracedStored(_ops.finish(self._token), self._shape, self._dtype)


class TracedPool:
    """Placeholder of a pool in a capture. `bind_pool` binds the pool when the graph runs."""

    def write(self, x: Shaped[Tensor, "..."]) -> Pending[TracedStored]:
        """Writes a host tensor."""
        writer = self.writer(x.shape, x.dtype)
        going, here = writer.write(0, x), list[TracedStored]()

        def finish_write() -> TracedStored:
            if not here:
                going.result()
                here.append(writer.finish())
            return here[0]

        return Pending(finish_write)

    def writer(self, shape: tuple[int, ...] | torch.Size, dtype: torch.dtype) -> TracedWriter:
        """Returns a value to be written in chunks of rows."""
        return TracedWriter(torch.Size(shape), dtype)
