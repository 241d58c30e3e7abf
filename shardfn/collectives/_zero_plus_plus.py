"""ZeRO++: messages of quantised tensors, and gathers in two hops.

A message of quantised tensors is bytes, with its scales and its codes.

    encode(flat, sizes, c)          blocks of up to c elements => a message each
    decode(messages, sizes, c)      the inverse
    decode_sum(messages, num, n)    of num messages of n elements, in sequence: the sum, in fp32, in their order
    decode_sum_encode(messages, num)  the same for several blocks at once, each sum encoded again

A message is [scales, fp32][codes][0 to 3 bytes of padding]. The elements, with zeros up to c, are one row of
`shardfn.kernels.quantize`. So all messages of a transfer have the same length, no scale is shared between ranks, and an
infinity or NaN stays as before. In a captured graph each call is one node.

Channels whose transfers are quantised: a `Channel`'s interface, messages of a `Quantizer` on the wire.

    all_gather       own block => message; all messages => all blocks, this rank's own rounded like all
    reduce_scatter   one hop:   the messages of all blocks go to their ranks, which add them up
                     two hops:  near ranks exchange and add the blocks of the nodes at their near index, encode the
                                sums, exchange them across the far axes and add again

Every rank decodes the same bytes, so all ranks hold the same bits. The result of `reduce_scatter` is the sum, in fp32,
for any number of hops, without division on the way.

Wang et al., ZeRO++, 2023, https://arxiv.org/abs/2306.10209 (qwZ, qgZ)

A gather in two hops: across nodes once, and within a node as often as the whole is wanted (ZeRO++'s hpZ).

    block of rank (f, g)             f along the far axes, g along the near axes
    bring       far axes:            [A_0g] [A_1g] => [A_0g, A_1g]       the secondary piece of near rank g
    all_gather  near axes:           the secondary pieces => [A_00, A_01, A_10, A_11], in the order of ranks

Both hops only move bits, so the whole is equal to the result of a single hop. A block enters each node once, where a
single hop sends the block to every rank of the node, for example 8 times. All blocks travel at the size of the largest.

Wang et al., ZeRO++: Extremely Efficient Collective Communication for Giant Model Training, 2023,
https://arxiv.org/abs/2306.10209
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from shardfn.core import Pending
from shardfn.kernels import dequantize, dequantize_sum, dequantize_sum_quantize, quantize

from ._traced import AnyChannel, AnyChannels
from ._wire_ops import as_runs

_LIBRARY = torch.library.Library("shardfn", "FRAGMENT")
_LIBRARY.define("encode(Tensor flat, int[] runs, int c, int bits, int block) -> Tensor")
_LIBRARY.define("decode(Tensor messages, int[] runs, int c, int bits, int block, ScalarType dtype) -> Tensor")
_LIBRARY.define("decode_sum(Tensor messages, int num, int n, int c, int bits, int block) -> Tensor")
_LIBRARY.define("decode_sum_encode(Tensor messages, int num, int c, int bits, int block) -> Tensor")
_ops = torch.ops.shardfn


class TwoHops:
    """The gather along `axes`, in two hops: along the far axes, then along `near`.

    The constructor is collective over the mesh.

    Attributes:
        axes: all axes, in the mesh's order.
        size: number of ranks along the axes.
        index: index of this rank among these ranks.
    """

    def __init__(self, channels: AnyChannels, axes: tuple[str, ...], near: tuple[str, ...]) -> None:
        self._far: AnyChannel = channels.gather(tuple(a for a in axes if a not in near))
        self._near: AnyChannel = channels.gather(tuple(a for a in axes if a in near))
        self._grid = NearFar(axes, self._far, self._near)
        self.axes, self.size, self.index = axes, self._far.size * self._near.size, self._grid.index

    def bring(self, own: Tensor, sizes: Sequence[int]) -> Pending[Tensor]:
        """Brings blocks across the far axes: from ranks with this rank's index along the near axes.

        Args:
            own: this rank's block. See `Channel.all_gather`.
            sizes: number of elements of each rank's block, along all axes.
        """
        c = max(sizes)
        flat = own.reshape(-1) if own.numel() == c else torch.nn.functional.pad(own.reshape(-1), (0, c - own.numel()))
        return self._far.all_gather(flat, [c] * self._far.size)

    def all_gather(self, brought: Tensor, sizes: Sequence[int]) -> Pending[Tensor]:
        """Gathers along the near axes: from the result of `bring` to the blocks of all ranks, in order."""
        pending = self._near.all_gather(brought, [brought.numel()] * self._near.size)
        return pending.then(lambda out: _trim_padding(self._grid.to_ranks(out), sizes))


class NearFar:
    """Blocks of the same size in the order of ranks along all axes, or of (near index, far index).

    Args:
        axes: all axes.
        far: a channel along the far axes.
        near: a channel along the near axes.

    Attributes:
        index: this rank's index along all axes.
    """

    def __init__(self, axes: tuple[str, ...], far: AnyChannel, near: AnyChannel) -> None:
        self._axes, self._shape = axes, {**near.shape, **far.shape}
        at = near.index * far.size + far.index
        coords = dict(zip(self._shape, _split_index(at, tuple(self._shape.values())), strict=True))
        self.index = functools.reduce(lambda i, a: i * self._shape[a] + coords[a], axes, 0)

    def to_ranks(self, flat: Tensor) -> Tensor:
        """Reorders blocks by (near, far) to blocks by rank."""
        now = list(self._shape)
        return flat.view(*self._shape.values(), -1).permute(*(now.index(a) for a in self._axes), -1).reshape(-1)

    def from_ranks(self, flat: Tensor) -> Tensor:
        """Reorders blocks by rank to blocks by (near, far)."""
        now = flat.view(*(self._shape[a] for a in self._axes), -1)
        return now.permute(*(self._axes.index(a) for a in self._shape), -1).reshape(-1)


def _split_index(n: int, sizes: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(n // math.prod(sizes[i + 1 :]) % size for i, size in enumerate(sizes))


def _trim_padding(flat: Tensor, sizes: Sequence[int]) -> Tensor:
    """Returns blocks without padding."""
    runs, c, parts, start = as_runs(sizes), max(sizes), list[Tensor](), 0
    if len(runs) == 2:
        return flat
    for num, n in zip(runs[::2], runs[1::2], strict=True):
        parts.append(flat[start : start + num * c].view(num, c)[:, :n].reshape(-1))
        start += num * c
    return torch.cat(parts)


class Quantizer(NamedTuple):
    """Rounding of elements to `bits` bits each, for example 8 bits, with a scale for each `block` elements.

    Example:
        >>> code = Quantizer(8, 256)
        >>> message = code.encode(torch.tensor([-1.0, 0.5]), [2], 2)
        >>> message.numel(), code.decode(message, [2], 2, torch.float32)
        (8, tensor([-1.0000,  0.5000]))
    """

    bits: int
    block: int

    def length(self, c: int) -> int:
        """Returns the bytes of a message of c elements."""
        return _message_length(c, self.bits, self.block)

    def encode(self, flat: Tensor, sizes: Sequence[int], c: int) -> Tensor:
        """Returns a message of c elements for each block of `flat`, uint8."""
        return _ops.encode(flat, as_runs(sizes), c, *self)

    def decode(self, messages: Tensor, sizes: Sequence[int], c: int, dtype: torch.dtype) -> Tensor:
        """Returns the blocks that messages encode."""
        return _ops.decode(messages, as_runs(sizes), c, *self, dtype)

    def sum(self, messages: Tensor, num: int, n: int, c: int) -> Tensor:
        """Returns the sum of one block's messages from `num` ranks, fp32 [n]."""
        return _ops.decode_sum(messages, num, n, c, *self)

    def sum_again(self, messages: Tensor, num: int, c: int) -> Tensor:
        """Returns the messages of the sums of blocks, from the messages of `num` ranks, rank by rank."""
        return _ops.decode_sum_encode(messages, num, c, *self)


def _message_length(c: int, bits: int, block: int) -> int:
    return -(-(4 * -(-c // block) + -(-c * bits // 8)) // 4) * 4


def _encode_runs(flat: Tensor, runs: Sequence[int], c: int, bits: int, block: int) -> Tensor:
    rows, start = list[Tensor](), 0
    for num, n in zip(runs[::2], runs[1::2], strict=True):
        x = flat[start : start + num * n].view(num, n)
        rows.append(x if n == c else torch.nn.functional.pad(x, (0, c - n)))
        start += num * n
    x = rows[0] if len(rows) == 1 else torch.cat(rows)
    return _join_message(*quantize(x.float() if x.dtype == torch.float64 else x, bits=bits, block=block))


def _decode_runs(messages: Tensor, runs: Sequence[int], c: int, bits: int, block: int, dtype: torch.dtype) -> Tensor:
    num, narrow = sum(runs[::2]), torch.float32 if dtype == torch.float64 else dtype
    codes, scales = _split_messages(messages.view(num, -1), c, bits, block)
    x = dequantize(codes, scales, c, bits=bits, block=block, dtype=narrow)
    rows, start = list[Tensor](), 0
    for num, n in zip(runs[::2], runs[1::2], strict=True):
        rows.append(x[start : start + num, :n].reshape(-1))
        start += num
    return (rows[0] if len(rows) == 1 else torch.cat(rows)).to(dtype)


def _decode_sum(messages: Tensor, num: int, n: int, c: int, bits: int, block: int) -> Tensor:
    codes, scales = _split_messages(messages.view(num, 1, -1), c, bits, block)
    total = dequantize_sum(codes, scales, c, bits=bits, block=block).view(-1)
    return total if n == c else total[:n].clone()


def _decode_sum_encode(messages: Tensor, num: int, c: int, bits: int, block: int) -> Tensor:
    codes, scales = _split_messages(messages.view(num, -1, _message_length(c, bits, block)), c, bits, block)
    return _join_message(*dequantize_sum_quantize(codes, scales, c, bits=bits, block=block))


def _join_message(codes: Tensor, scales: Tensor) -> Tensor:
    parts = [scales.view(torch.uint8), codes.view(torch.uint8)]
    padding = -sum(x.shape[1] for x in parts) % 4
    if padding:
        parts.append(codes.new_zeros(len(codes), padding, dtype=torch.uint8))
    return torch.cat(parts, 1).view(-1)


def _split_messages(messages: Tensor, c: int, bits: int, block: int) -> tuple[Tensor, Tensor]:
    begin = 4 * -(-c // block)
    codes = messages[..., begin : begin + -(-c * bits // 8)].contiguous()
    scales = messages[..., :begin].contiguous().view(torch.float32)
    return codes.view(torch.int8) if bits == 8 else codes, scales


for _name, _impl in (
    ("encode", _encode_runs),
    ("decode", _decode_runs),
    ("decode_sum", _decode_sum),
    ("decode_sum_encode", _decode_sum_encode),
):
    _LIBRARY.impl(_name, _impl, "CompositeExplicitAutograd")


@torch.library.register_fake("shardfn::encode", lib=_LIBRARY)
def _(flat: Tensor, runs: Sequence[int], c: int, bits: int, block: int) -> Tensor:
    return flat.new_empty(sum(runs[::2]) * _message_length(c, bits, block), dtype=torch.uint8)


@torch.library.register_fake("shardfn::decode", lib=_LIBRARY)
def _(messages: Tensor, runs: Sequence[int], c: int, bits: int, block: int, dtype: torch.dtype) -> Tensor:
    total = sum(num * n for num, n in zip(runs[::2], runs[1::2], strict=True))
    return messages.new_empty(total, dtype=dtype)


@torch.library.register_fake("shardfn::decode_sum", lib=_LIBRARY)
def _(messages: Tensor, num: int, n: int, c: int, bits: int, block: int) -> Tensor:
    return messages.new_empty(n, dtype=torch.float32)


@torch.library.register_fake("shardfn::decode_sum_encode", lib=_LIBRARY)
def _(messages: Tensor, num: int, c: int, bits: int, block: int) -> Tensor:
    return messages.new_empty(messages.numel() // num)


class QuantizedGather:
    """All_gather of blocks that are sent quantized.

    Args:
        inner: a channel that gathers bytes.
        quantizer: rounding of the elements.
        dtype: dtype of the result.
    """

    def __init__(self, inner: AnyChannel | TwoHops, quantizer: Quantizer, dtype: torch.dtype) -> None:
        self.axes, self.size, self.index = inner.axes, inner.size, inner.index
        self._inner, self._quantizer, self._dtype = inner, quantizer, dtype

    def bring(self, own: Tensor, sizes: Sequence[int]) -> Pending[Tensor]:
        """Brings blocks quantized: see `TwoHops.bring`. Memory and wire are half, or a quarter, of bf16."""
        assert isinstance(self._inner, TwoHops)
        return self._inner.bring(self._encode_block(own, max(sizes)), self._message_lengths(sizes))

    def all_gather(self, own: Tensor, sizes: Sequence[int]) -> Pending[Tensor]:
        """Gathers the blocks: see `Channel.all_gather`. With two hops the second, from the result of `bring`."""
        c = max(sizes)
        message = own if isinstance(self._inner, TwoHops) else self._encode_block(own, c)
        pending = self._inner.all_gather(message, self._message_lengths(sizes))
        return pending.then(lambda messages: self._quantizer.decode(messages, sizes, c, self._dtype))

    def _encode_block(self, own: Tensor, c: int) -> Tensor:
        return self._quantizer.encode(own.reshape(-1), [own.numel()], c)

    def _message_lengths(self, sizes: Sequence[int]) -> list[int]:
        return [self._quantizer.length(max(sizes))] * len(sizes)


class QuantizedReduce:
    """Reduce_scatter of blocks that are sent quantized. The constructor is collective over the mesh.

    Args:
        channels: the communicators.
        axes: all axes, in the mesh's order.
        near: the axes of the first sum, or () for a single hop.
        quantizer: rounding of the elements.
    """

    def __init__(
        self, channels: AnyChannels, axes: tuple[str, ...], near: tuple[str, ...], quantizer: Quantizer
    ) -> None:
        self._quantizer = quantizer
        self._first: AnyChannel = channels.reduce(near or axes)
        self._far: AnyChannel | None = channels.relay(tuple(a for a in axes if a not in near)) if near else None
        self._grid = None if self._far is None else NearFar(axes, self._far, self._first)
        self.axes, self.sums_in_one = axes, False
        self.size = self._first.size * (1 if self._far is None else self._far.size)
        self.index = self._first.index if self._grid is None else self._grid.index

    def reduce_scatter(self, flat: Tensor, sizes: Sequence[int], *, reuse: bool = False) -> Pending[Tensor]:
        """Sums blocks as `Channel.reduce_scatter`. The result is in fp32."""
        del reuse
        quantizer, own, c, near, far = self._quantizer, sizes[self.index], max(sizes), self._first, self._far
        messages, length = quantizer.encode(flat, sizes, c), quantizer.length(c)
        if self._grid is None or far is None:
            pending = near.all_to_all(messages, [length] * near.size)
            return pending.then(lambda arrived: quantizer.sum(arrived, near.size, own, c))

        def go_on(arrived: Tensor) -> Pending[Tensor]:
            pending = far.all_to_all(quantizer.sum_again(arrived, near.size, c), [length] * far.size)
            return pending.then(lambda messages: quantizer.sum(messages, far.size, own, c))

        first = near.all_to_all(self._grid.from_ranks(messages), [far.size * length] * near.size)
        return Relayed(far, first, go_on)

    def all_reduce(self, flat: Tensor) -> Pending[Tensor]:
        """Refuses whole gradients: they are not quantised."""
        raise AssertionError("a gradient that is summed whole cannot be sent quantized")


class Relayed(Pending[Tensor]):
    """Transfer in two hops, in flight. The second hop starts in `done` or `result`, in the order of the first hops.

    Args:
        far: the channel of the second hop, used only by relays. The hop starts when this rank finds the first hop done.
        first: the first hop.
        go_on: function that starts the second hop from the result of the first.
    """

    def __init__(self, far: AnyChannel, first: Pending[Tensor], go_on: Callable[[Tensor], Pending[Tensor]]) -> None:
        super().__init__()
        self._line, self._first, self._go_on = far.line, first, go_on
        self._second: Pending[Tensor] | None = None
        # The channel has a single queue for all transfers in flight, in the order in which the first hops began. Second
        # hops start only in this order, in any order of questions: the order is the same on all ranks, arrivals are
        # not.
        self._line.append(self)

    def done(self) -> bool:
        """Returns whether `result()` would return at once."""
        while self._line and self._line[0]._first.done():
            self._line[0].pass_on()
        return self._second is not None and self._second.done()

    def result(self) -> Tensor:
        """Returns the value, and waits for it."""
        while self._second is None:
            self._line[0].pass_on()
        return self._second.result()

    def pass_on(self) -> None:
        """Waits for the first hop and starts the second. Only the head of the queue is passed on.

        A transfer that fails stays the head: the next transfer to be asked raises the same error.
        """
        self._second = self._go_on(self._first.result())
        self._line.popleft()
