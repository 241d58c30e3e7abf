"""Channels whose transfers are quantised: a `Channel`'s interface, messages of a `Quantizer` on the wire.

    all_gather       own block => message; all messages => all blocks, this rank's own rounded like the others'
    reduce_scatter   one hop:   the messages of all blocks go to their ranks, which add them up
                     two hops:  near ranks exchange and add the blocks of the nodes at their near index, encode the
                                sums, exchange them across the far axes and add again

Every rank decodes the same bytes, so all ranks hold the same bits. The result of `reduce_scatter` is the sum, in fp32,
for any number of hops, without division on the way.

Wang et al., ZeRO++, 2023, https://arxiv.org/abs/2306.10209 (qwZ, qgZ)
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from shardfn.core import Pending

from ._hops import NearFar, TwoHops
from ._quantizer import Quantizer
from ._traced import AnyChannel, AnyChannels


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
        raise AssertionError("a gradient that is summed whole does not travel in a code")


class Relayed(Pending[Tensor]):
    """Transfer in two hops, under way. The second hop starts in `done` or `result`, in the order of the first hops.

    Args:
        far: the channel of the second hop, used only by relays. The hop starts when this rank finds the first hop done.
        first: the first hop.
        go_on: function that starts the second hop from the result of the first.
    """

    def __init__(self, far: AnyChannel, first: Pending[Tensor], go_on: Callable[[Tensor], Pending[Tensor]]) -> None:
        super().__init__()
        self._line, self._first, self._go_on = far.line, first, go_on
        self._second: Pending[Tensor] | None = None
        # The channel has a single queue for all transfers under way, in the order in which the first hops began. Second
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
