"""The collectives that a loss calls, as ops of a captured graph. The transfers of the step are in `_wire_ops.py`.

    loss_psum_start(x, axes)                       -> handle, like x        the sum over the ranks
    loss_pmax_start(x, axes)                       -> handle, like x        the maximum
    loss_all_gather_start(own, num, axes)          -> handle [num * numel]  the blocks of all ranks, one after another
    loss_psum_scatter_start(rows, num, axes)       -> handle [numel / num]  the own block of the sum, in rank order
    loss_exchange_start(flat, send, recv, name, axes) -> handle [sum(recv)] part r to rank r, and the part from each

Each op has a twin without `_start` that waits at once: a compiler without knowledge of transfers might write to a
tensor while a transfer reads the tensor. Handles, waits and axes are as in `_wire_ops.py`. The channel is the loss's
channel of the bound channels, else of the bound mesh. Tensors are contiguous.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from shardfn.collectives.transport import Channel, loss_channel

from ._env import current_mesh
from ._wire_ops import channels_of_graph, under_way

_LIBRARY = torch.library.Library("shardfn", "FRAGMENT")


def channel_along(axes: str) -> Channel | None:
    """Returns the channel of a loss's collectives along axes joined by commas, or None without axes.

    Raises:
        RuntimeError: no mesh with these axes is bound.
    """
    if not axes:
        return None
    names, channels = tuple(axes.split(",")), channels_of_graph()
    if channels is not None:
        return channels.loss(names)
    mesh = current_mesh()
    if mesh.axes(names) != names:
        raise RuntimeError(
            f"a collective along {axes!r} runs where no mesh with these axes is bound, as in the backward of a compiled"
            " function after the end of its shard_map. Compile the whole with sf.jit."
        )
    return loss_channel(mesh, names)


def _channel_of(axes: str) -> Channel:
    channel = channel_along(axes)
    assert channel is not None
    return channel


# psum


def _loss_psum_start(x: Tensor, axes: str) -> Tensor:
    out = x.clone(memory_format=torch.contiguous_format)
    return under_way(out, _channel_of(axes).all_reduce(out.view(-1), name="psum"))


# pmax


def _loss_pmax_start(x: Tensor, axes: str) -> Tensor:
    out = x.clone(memory_format=torch.contiguous_format)
    return under_way(out, _channel_of(axes).maximum(out.view(-1), name="pmax"))


# all_gather


def _loss_all_gather_start(own: Tensor, num: int, axes: str) -> Tensor:
    out = own.new_empty(num * own.numel())
    return under_way(out, _channel_of(axes).all_gather(own, [own.numel()] * num, out, settled=True))


# psum_scatter


def _loss_psum_scatter_start(rows: Tensor, num: int, axes: str) -> Tensor:
    own = rows.numel() // num
    return under_way(rows.new_empty(0), _channel_of(axes).reduce_scatter(rows, [own] * num))


# all_to_all, ppermute


def _loss_exchange_start(flat: Tensor, send: Sequence[int], recv: Sequence[int], name: str, axes: str) -> Tensor:
    out = flat.new_empty(sum(recv))
    parts, into = flat.split_with_sizes(list(send)), out.split_with_sizes(list(recv))
    return under_way(out, _channel_of(axes).exchange(parts, into, name=name).then(lambda _: out))


def define(
    library: torch.library.Library, schema: str, start: Callable[..., Tensor], fake: Callable[..., Tensor]
) -> None:
    """Defines an op that starts a transfer, `NAME_start(...) -> Tensor`, and a twin `NAME` that waits at once."""
    name = schema.partition("_start(")[0]

    def run_and_wait(*args: Any) -> Tensor:
        return torch.ops.shardfn.wait(start(*args))

    for op, text, impl in ((f"{name}_start", schema, start), (name, schema.replace("_start(", "(", 1), run_and_wait)):
        library.define(text)
        library.impl(op, impl, "CompositeExplicitAutograd")
        torch.library.register_fake(f"shardfn::{op}", fake, lib=library)


def _fake_like(x: Tensor, axes: str) -> Tensor:
    return x.new_empty(x.shape)


def _fake_blocks(own: Tensor, num: int, axes: str) -> Tensor:
    return own.new_empty(num * own.numel())


def _fake_block(rows: Tensor, num: int, axes: str) -> Tensor:
    return rows.new_empty(rows.numel() // num)


def _fake_parts(flat: Tensor, send: Sequence[int], recv: Sequence[int], name: str, axes: str) -> Tensor:
    return flat.new_empty(sum(recv))


define(_LIBRARY, "loss_psum_start(Tensor x, str axes) -> Tensor", _loss_psum_start, _fake_like)
define(_LIBRARY, "loss_pmax_start(Tensor x, str axes) -> Tensor", _loss_pmax_start, _fake_like)
define(_LIBRARY, "loss_all_gather_start(Tensor own, int num, str axes) -> Tensor", _loss_all_gather_start, _fake_blocks)
define(
    _LIBRARY, "loss_psum_scatter_start(Tensor rows, int num, str axes) -> Tensor", _loss_psum_scatter_start, _fake_block
)
_EXCHANGE = "loss_exchange_start(Tensor flat, int[] send, int[] recv, str name, str axes) -> Tensor"
define(_LIBRARY, _EXCHANGE, _loss_exchange_start, _fake_parts)
