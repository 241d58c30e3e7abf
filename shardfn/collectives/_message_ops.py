"""Messages from one rank to another, as ops of a captured graph. The other ops of the wire are in `_wire_ops.py`.

    send_start(x, to, tag, axes)                               -> handle [0]    x to one rank along the axes
    receive_start(shape, dtype, device, source, tag, axes)     -> handle        that rank's message of the same tag
    sent(handle)                                               ends a send: the tensor that it read may be written

`wait` gives the value of a receive. A tag names a single message of a step between two ranks, so messages pair in any
order. A send is ended by a separate op, without a value, and the op stays in a graph without a user.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.fx.node import has_side_effect

from ._wire_ops import channels_of_graph, ended, under_way

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
