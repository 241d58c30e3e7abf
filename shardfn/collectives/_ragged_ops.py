"""Exchanges of rows whose numbers are data, as ops of a captured graph. Other transfers are in `_wire_ops.py`.

    ragged_places_start(output_offsets, input_offsets, send_sizes, recv_sizes, rows, capacity, looks, axes)
        -> handle, like output_offsets      compares the places of all ranks; where the rows for this rank go
    ragged_all_to_all_start(x, input_offsets, send_sizes, offsets, sizes, rows, axes)
        -> handle [rows, ...]               the rows from each rank at their places, zeros elsewhere; rows of -1 end
                                            with the last that arrives

Places are integers for each rank along the axes, in the order of the group, or several rows of such integers, one after
another (of a batch). Rows that arrive at the same place are added in the same order. An axis of a single rank has the
name "".

The check comes before the exchange, as the exchange's op needs the check's result. So all ranks raise the same error,
and nothing has been sent.

The collectives that a loss calls, as ops of a captured graph. The transfers of the step are in `_wire_ops.py`.

    loss_psum_start(x, axes)                       -> handle, like x        the sum over the ranks
    loss_pmax_start(x, axes)                       -> handle, like x        the maximum
    loss_all_gather_start(own, num, axes)          -> handle [num * numel]  the blocks of all ranks, in sequence
    loss_psum_scatter_start(rows, num, axes)       -> handle [numel / num]  the own block of the sum, in rank order
    loss_exchange_start(flat, send, recv, name, axes) -> handle [sum(recv)] part r to rank r, and the part from each

Each op has a twin without `_start` that waits at once: a compiler without knowledge of transfers might write to a
tensor while a transfer reads the tensor. Handles, waits and axes are as in `_wire_ops.py`. The channel is the loss's
channel of the bound channels, else of the bound mesh. Tensors are contiguous.
"""

import zlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardfn.collectives.transport import Channel, loss_channel
from shardfn.core import Pending, raise_all

from ._axis_group import current_mesh
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


# The number of integers that a rank sends before its places: whether the rank has refused the call, the bytes of the
# words and a checksum, the number of rows, and the number of rows with room.
HEAD = 5


class Header(NamedTuple):
    """Facts that a rank sends to the other ranks before an exchange.

    Attributes:
        words: dtype and shape of the rank's rows, or the reason why the rank has refused the call.
        refused: whether the rank has refused the call.
        rows: number of rows of the operand.
        capacity: number of rows with room in the result. -1 means any number.
    """

    words: str
    refused: bool = False
    rows: int = 0
    capacity: int = 0


# ragged_places


def compared_places(channel: Channel | None, axes: str, told: Header, places: Tensor) -> Pending[Tensor]:
    """Returns the places of all ranks, `[ranks, 4, batch, ranks]`, if the places fit.

    Args:
        channel: the channel, or None for only this rank.
        axes: names, for errors.
        told: this rank's facts.
        places: `[4, batch, ranks]`, int64: input offsets, sizes sent, output offsets, sizes received. Where a rank has
            no output offsets, -1, rows go behind one another.

    Raises:
        ValueError: (of the result) ranks differ, or the places do not fit, with the same text on all ranks.
    """
    words = told.words.encode()
    head = [told.refused, len(words), zlib.crc32(words), told.rows, told.capacity]
    own = torch.cat([torch.tensor(head, dtype=torch.int64), places.reshape(-1)])
    if channel is None:
        return Pending(lambda: _check_headers([told], [head], own[HEAD:].view(1, *places.shape), "this rank"))

    own = own.to(channel.device)

    def compare_flat(flat: Tensor) -> Tensor:
        each = flat.cpu().view(channel.size, -1)
        heads = each[:, :HEAD].tolist()
        # Words are sent only for an error, as all ranks find in the same way.
        all_told = [Header("", *h[:1], *h[3:]) for h in heads]
        if any(h[0] for h in heads) or len({h[2] for h in heads}) > 1:
            most = max(h[1] for h in heads)
            mine = torch.tensor(list(words.ljust(most, b"\0")), dtype=torch.uint8, device=channel.device)
            texts = channel.all_gather(mine, [most] * channel.size, settled=True).result().view(channel.size, -1)
            told_words = [bytes(t.tolist()[: h[1]]).decode() for t, h in zip(texts, heads, strict=True)]
            all_told = [t._replace(words=w) for t, w in zip(all_told, told_words, strict=True)]
        return _check_headers(all_told, heads, each[:, HEAD:].view(channel.size, *places.shape), f"of {axes!r}")

    return channel.all_gather(own, [own.numel()] * channel.size, settled=True).then(compare_flat)


def _check_headers(told: Sequence[Header], heads: Sequence[Sequence[int]], places: Tensor, of: str) -> Tensor:
    name = "this rank" if len(told) == 1 else f"rank {{}} {of}"
    names = [name.format(r) for r in range(len(told))]
    title = "ragged_all_to_all: "
    refused = [f"{names[r]}: {t.words}" for r, t in enumerate(told) if t.refused]
    raise_all(ValueError, title + "operands do not go together. Nothing was sent:", refused)
    if len({h[2] for h in heads}) > 1:
        lines = [f"{names[r]}: {t.words}" for r, t in enumerate(told)]
        raise_all(ValueError, title + "ranks differ in the dtype or the shape of a row. Nothing was sent:", lines)
    raise_all(ValueError, title + "places do not fit. Nothing was sent:", _find_problems(told, places, names))
    return places


def _find_problems(told: Sequence[Header], places: Tensor, names: Sequence[str]) -> list[str]:
    starts, sizes, offsets, wanted = places.unbind(1)  # each [senders, batch, receivers], `wanted` the other way round
    asked = wanted.transpose(0, 2)
    rows = torch.tensor([t.rows for t in told]).view(-1, 1, 1)
    room = torch.tensor([t.capacity for t in told])
    some, exact = sizes > 0, room < 0  # a place of no rows may be anywhere
    ends = torch.where(some, offsets + sizes, 0)
    bad = (sizes < 0) | ~exact & ((asked < 0) | (sizes != asked))
    bad |= some & ((starts < 0) | (starts + sizes > rows) | ~exact & ((offsets < 0) | (offsets + sizes > room)))
    order = torch.where(some, offsets, -1).argsort(0)
    begins, stops = torch.where(some, offsets, 0).gather(0, order), ends.gather(0, order)
    overlap = (begins[1:] < stops[:-1]) & some.gather(0, order)[:-1] & ~exact
    if not bad.any() and not overlap.any():
        return []
    found = list[str]()
    n = len(told)
    for r, b, j in ((r, b, j) for r in range(n) for b in range(places.shape[2]) for j in range(n)):
        at, size, to, want = (int(x[r, b, j]) for x in (starts, sizes, offsets, asked))
        if size < 0 or (want < 0 and not exact[j]):
            found += [f"{names[r]}: send_sizes[{j}] must be 0 or more, got {size}"] * (size < 0)
            found += [f"{names[j]}: recv_sizes[{r}] must be 0 or more, got {want}"] * (want < 0 and not exact[j])
        elif size != want and not exact[j]:
            found.append(f"{names[r]} sends {size} rows to {names[j]}, whose recv_sizes[{r}] is {want}. Use one number")
        elif size:
            if at < 0 or at + size > told[r].rows:
                found.append(
                    f"{names[r]}: input_offsets[{j}] is {at} and send_sizes[{j}] {size}, beyond the {told[r].rows} rows"
                    " of x"
                )
            if not exact[j] and (to < 0 or to + size > told[j].capacity):
                found.append(
                    f"{names[r]}: output_offsets[{j}] is {to} and send_sizes[{j}] {size}, beyond the"
                    f" {told[j].capacity} rows that out has on {names[j]}. Give it more, or send fewer"
                )
    for i, b, j in overlap.nonzero().tolist():
        one, other = (int(order[k, b, j]) for k in (i, i + 1))
        ranges = [f"rows {int(offsets[r, b, j])} to {int(ends[r, b, j])} of {names[r]}" for r in (one, other)]
        found.append(f"{names[j]}: two ranks write the same rows of out: {' and '.join(ranges)}. Move one of them")
    return found


def _ragged_places_start(
    output_offsets: Tensor,
    input_offsets: Tensor,
    send_sizes: Tensor,
    recv_sizes: Tensor,
    rows: int,
    capacity: int,
    looks: str,
    axes: str,
) -> Tensor:
    channel = channel_along(axes)
    n, index = (1, 0) if channel is None else (channel.size, channel.index)
    places = torch.stack(
        [x.reshape(-1, n).long().cpu() for x in (input_offsets, send_sizes, output_offsets, recv_sizes)]
    )
    pending = compared_places(channel, axes, Header(looks, False, rows, capacity), places)
    handle = output_offsets.new_empty(output_offsets.shape, dtype=torch.int64)
    return under_way(handle, pending.then(lambda all: handle.copy_(all[:, 2, :, index].t().reshape(handle.shape))))


# ragged_all_to_all


def _ragged_all_to_all_start(
    x: Tensor,
    input_offsets: Tensor,
    send_sizes: Tensor,
    offsets: Tensor,
    sizes: Tensor,
    rows: int,
    axes: str,
) -> Tensor:
    channel = channel_along(axes)
    n = 1 if channel is None else channel.size
    starts, leaving, places, coming = (t.reshape(-1, n).tolist() for t in (input_offsets, send_sizes, offsets, sizes))
    if rows < 0:
        rows = max(
            (p + s for pair in zip(places, coming, strict=True) for p, s in zip(*pair, strict=True) if s), default=0
        )
    x, out = x.contiguous(), x.new_zeros((rows, *x.shape[1:]))
    parts = [_join_pieces([_slice_rows(x, a[j], s[j]) for a, s in zip(starts, leaving, strict=True)]) for j in range(n)]
    targets = [[_slice_rows(out, a[j], s[j]) for a, s in zip(places, coming, strict=True)] for j in range(n)]
    apart = _are_apart([(a, s) for pair in zip(places, coming, strict=True) for a, s in zip(*pair, strict=True)])
    direct = apart and len(places) == 1
    into = [t[0] if direct else x.new_empty((sum(map(len, t)), *x.shape[1:])) for t in targets]

    def place_rows(_: object) -> Tensor:
        for block, at in () if direct else zip(into, targets, strict=True):
            for target, piece in zip(at, block.split([len(t) for t in at]), strict=True):
                target.copy_(piece) if apart else target.add_(piece)
        return out

    if channel is None:
        into[0].copy_(parts[0])
        return under_way(out, Pending.of(None).then(place_rows))
    return under_way(out, channel.exchange(parts, into, name="ragged_all_to_all").then(place_rows))


def _slice_rows(x: Tensor, start: int, size: int) -> Tensor:
    return x[start : start + size] if size else x[:0]


def _join_pieces(pieces: list[Tensor]) -> Tensor:
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def _are_apart(places: list[tuple[int, int]]) -> bool:
    """Returns whether no row is in two places."""
    end = 0
    for start, size in sorted(p for p in places if p[1]):
        if start < end:
            return False
        end = start + size
    return True


def _fake_places(output_offsets: Tensor, *args: Any) -> Tensor:
    return output_offsets.new_empty(output_offsets.shape, dtype=torch.int64)


def _fake_arrived(x: Tensor, *args: Any) -> Tensor:
    *_, rows, _ = args
    return x.new_empty((rows, *x.shape[1:]))


_PLACES = "Tensor output_offsets, Tensor input_offsets, Tensor send_sizes, Tensor recv_sizes"
_COMPARED = f"ragged_places_start({_PLACES}, int rows, int capacity, str looks, str axes) -> Tensor"
_ENDS = "Tensor input_offsets, Tensor send_sizes, Tensor offsets, Tensor sizes"
_EXCHANGED = f"ragged_all_to_all_start(Tensor x, {_ENDS}, int rows, str axes) -> Tensor"
define(_LIBRARY, _COMPARED, _ragged_places_start, _fake_places)
define(_LIBRARY, _EXCHANGED, _ragged_all_to_all_start, _fake_arrived)
