"""The step's communicators while it is captured.

Transfers become ops of the graph, and each rank agrees only with itself.

The classes replace `Channels` and `Control`, without messages: ranks compare their sequences of collectives once, after
the capture.

Messages from a rank to another, as ops of a captured graph. The other ops of the wire are in `_wire_ops.py`.

    send_start(x, to, tag, axes)                               -> handle [0]    x to a single rank along the axes
    receive_start(shape, dtype, device, source, tag, axes)     -> handle        that rank's message of the same tag
    sent(handle)                                               ends a send: the tensor that it read may be written

`wait` gives the value of a receive. A tag names a single message of a step between two ranks, so messages pair in any
order. A send is ended by a separate op, without a value, and the op stays in a graph without a user.
"""

import collections
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx.node import has_side_effect

from shardfn.collectives.transport import Agreed, Calls, Channel, Channels, Constant, Control, Rounds
from shardfn.core import Mesh, Pending

from ._wire_ops import as_runs, channels_of_graph, ended, under_way

_LIBRARY = torch.library.Library("shardfn", "FRAGMENT")
_LIBRARY.define("send_start(Tensor x, int to, int tag, str axes) -> Tensor")
_LIBRARY.define("receive_start(int[] shape, ScalarType dtype, Device device, int source, int tag, str axes) -> Tensor")
_LIBRARY.define("sent(Tensor handle) -> ()")


# send


def _send_start(x: Tensor, to: int, tag: int, axes: str) -> Tensor:
    return under_way(x.new_empty(0), channels_of_graph().between(tuple(axes.split(","))).send(x, to, tag))


def _end_send(handle: Tensor) -> None:
    ended(handle).result()


# receive


def _receive_start(
    shape: Sequence[int], dtype: torch.dtype, device: torch.device, source: int, tag: int, axes: str
) -> Tensor:
    channel = channels_of_graph().between(tuple(axes.split(",")))
    like = torch.empty(shape, dtype=dtype, device="meta")
    return under_way(torch.empty(0, dtype=dtype, device=device), channel.arrival(like, source, tag))


for _name, _impl in (("send_start", _send_start), ("sent", _end_send), ("receive_start", _receive_start)):
    _LIBRARY.impl(_name, _impl, "CompositeExplicitAutograd")


@torch.library.register_fake("shardfn::send_start", lib=_LIBRARY)
def _(x: Tensor, to: int, tag: int, axes: str) -> Tensor:
    return x.new_empty(0)


@torch.library.register_fake("shardfn::sent", lib=_LIBRARY)
def _(handle: Tensor) -> None:
    del handle


@torch.library.register_fake("shardfn::receive_start", lib=_LIBRARY)
def _(shape: Sequence[int], dtype: torch.dtype, device: torch.device, source: int, tag: int, axes: str) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=device)


has_side_effect(torch.ops.shardfn.send_start.default)
has_side_effect(torch.ops.shardfn.sent.default)


_ops = torch.ops.shardfn


class TracedChannel:
    """`Channel` with ops of the graph for transfers. Every start is followed by a wait. Passes separate the two."""

    def __init__(self, mesh: Mesh, axes: tuple[str, ...]) -> None:
        self.axes = mesh.axes(axes)
        self.shape = {a: mesh.shape[a] for a in self.axes}
        self.size = mesh.axis_size(self.axes)
        self.index = mesh.axis_index(self.axes)
        self.sums_in_one = self.size == 2 and mesh.backend in ("gloo", "fake")
        self._name, self._device = ",".join(self.axes), mesh.device
        self.line: collections.deque[Any] = collections.deque()

    def all_gather(
        self, own: Tensor, sizes: Sequence[int], into: Tensor | None = None, *, idle: bool = False
    ) -> Pending[Tensor]:
        """Gathers blocks: see `Channel.all_gather`."""
        del idle
        flat = own.reshape(-1)
        if self.size == 1:
            return Pending(lambda: flat if into is None else into.copy_(flat))
        if into is None:
            out = _ops.wait(_ops.all_gather_start.runs(flat, as_runs(sizes), self._name))
            return Pending.of(out)
        _ops.wait(_ops.all_gather_into_start.runs(into, flat, as_runs(sizes), self._name))
        return Pending.of(into)

    def reduce_scatter(self, flat: Tensor, sizes: Sequence[int], *, reuse: bool = False) -> Pending[Tensor]:
        """Sums and scatters blocks: see `Channel.reduce_scatter`."""
        del reuse
        if self.size == 1:
            return Pending.of(flat)
        out = _ops.wait(_ops.psum_scatter_start.runs(flat, as_runs(sizes), self.index, self._name))
        return Pending.of(out)

    def all_to_all(self, flat: Tensor, sizes: Sequence[int]) -> Pending[Tensor]:
        """Exchanges blocks: see `Channel.all_to_all`."""
        if self.size == 1:
            return Pending.of(flat)
        out = _ops.wait(_ops.all_to_all_start.runs(flat, as_runs(sizes), self.index, self._name))
        return Pending.of(out)

    def all_reduce(self, flat: Tensor) -> Pending[Tensor]:
        """Sums a tensor: see `Channel.all_reduce`. Here the result is a new tensor."""
        out = _ops.wait(_ops.psum_start([flat], self._name))
        return Pending.of(out)

    def send(self, x: Tensor, to: int, tag: int) -> Pending[Tensor]:
        """Starts sending a tensor, see `Channel.send`. Waits when the result is read."""
        handle = _ops.send_start(x, to, tag, self._name)

        def finish_send() -> Tensor:
            _ops.sent(handle)
            return x

        return Pending(finish_send)

    def arrival(self, like: Tensor, source: int, tag: int) -> Pending[Tensor]:
        """Starts receiving a tensor, see `Channel.arrival`. Waits when the result is read."""
        handle = _ops.receive_start(list(like.shape), like.dtype, self._device, source, tag, self._name)
        return Pending(lambda: _ops.wait(handle))

    def flush(self) -> None:
        """Does nothing, as no transfer is in flight."""


# Returns `f(*tensors)`, for a key that determines the ops of `f`.
Once = Callable[[Hashable, Callable[..., Sequence[Tensor]], Sequence[Tensor]], Sequence[Tensor]]


class TracedChannels:
    """`Channels` for a capture.

    Args:
        mesh: the mesh.
        once: function of a key, a function and tensors, which traces the function once for each key.
    """

    def __init__(self, mesh: Mesh, once: Once) -> None:
        self._mesh, self.once = mesh, once

    def gather(self, axes: tuple[str, ...]) -> TracedChannel:
        """Returns the channel that gathers along `axes`."""
        return TracedChannel(self._mesh, axes)

    def reduce(self, axes: tuple[str, ...]) -> TracedChannel:
        """Returns the channel that reduces along `axes`."""
        return TracedChannel(self._mesh, axes)

    def relay(self, axes: tuple[str, ...]) -> TracedChannel:
        """Returns the channel that reduces: a graph's transfers start in the graph's order."""
        return TracedChannel(self._mesh, axes)

    def between(self, axes: tuple[str, ...]) -> TracedChannel:
        """Returns the channel from rank to rank."""
        return TracedChannel(self._mesh, axes)

    def flush(self) -> None:
        """Does nothing, as no transfer is in flight."""


class TracedControl:
    """`Control` for a capture: every rank is taken to pass the same values as this rank."""

    def __init__(self, mesh: Mesh) -> None:
        self.size = mesh.size
        self.rank = mesh.rank
        self.calls = Calls()

    def exchange(self, value: int) -> list[int]:
        """Returns this rank's value, once for all ranks: there may be a thousand ranks, and a thousand exchanges."""
        return [value]

    def gather(self, value: object) -> list[object]:
        """Returns this rank's value for each rank."""
        return [value] * self.size

    def along(self, axes: tuple[str, ...]) -> "TracedControl":
        """Returns this control: the other ranks are taken to pass the same values as this rank."""
        del axes
        return self

    def agree(
        self,
        what: str,
        text: str,
        constant: Constant | None = None,
        sizes: tuple[int, ...] = (),
        known: tuple[bool, bool] = (True, True),
        remedy: Callable[[list[str]], str] | None = None,
        *,
        begins: bool = False,
    ) -> Agreed:
        """Returns agreement without a message, because no other rank takes part in a trace."""
        del what, text, constant, sizes, remedy, begins
        return Agreed(True, known)

    def begin(self, call: str) -> None:
        """Does nothing, as no rank waits."""

    def share(self) -> None:
        """Does nothing, as no message is sent."""


# The engine's communicators: the wire, or a replacement while the step is captured.
AnyChannel = Channel | TracedChannel
AnyChannels = Channels | TracedChannels
AnyControl = Control | TracedControl
AnyRounds = Rounds | Control | TracedControl
