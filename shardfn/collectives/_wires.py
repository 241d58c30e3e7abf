"""Wires carry leaves that travel together along a route, in a single message.

A route has the hops of a single leaf. Leaves of a single message have equal hops, so a wire runs the hops once for all
leaves: the wire casts this rank's blocks, packs the blocks, and sends the message over the channels of the route's
hops, in the route's code.

    wire          starts from                     arrives as
    GatherWire    pieces of the leaves            the wholes; after `bring`, which crosses the far axes, the second hop
    SumWire       this rank's summands, whole     this rank's rows of the sums; or its deal of sums that are wanted
                                                  whole, which `join` brings together

Local hops, such as from a memory to another or into a code in which a leaf is kept, are left to the caller.

In a capture a wire traces ops once for leaves that travel alike, such as the layers of a stack.
"""

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from shardfn.core import Pending

from ._route import AllGather, Psum, PsumScatter, Route
from ._traced import AnyChannel, AnyChannels, Once
from ._zero_plus_plus import QuantizedGather, QuantizedReduce, Quantizer, TwoHops
from .transport import Packing, dealt, is_sole_owner

GatherChannel = AnyChannel | TwoHops | QuantizedGather
ReduceChannel = AnyChannel | QuantizedReduce


class _Tracer:
    """Runs the parts of a wire in a capture, where parts of equal keys are traced once.

    Args:
        once: function of the channels.
        way: route of the leaves.
        packing: the places of the leaves in the message.
    """

    def __init__(self, once: Once, way: Route, packing: Packing) -> None:
        # A route is the same object for leaves that travel alike. The first and the last of many ranks' bounds tell
        # cuts of one tensor apart.
        cuts = ((x.whole, x.dim, x.bounds[:1], x.bounds[-1:], len(x.bounds)) for x in packing.leaves)
        self._once, self._key = once, (id(way), *cuts)

    def run(self, what: str, f: Callable[..., Sequence[Tensor]], tensors: Sequence[Tensor]) -> list[Tensor]:
        return list(self._once((what, self._key), f, tensors))

    def send(
        self, what: str, f: Callable[[list[Tensor]], Pending[Tensor]], tensors: Sequence[Tensor]
    ) -> Pending[Tensor]:
        (out,) = self.run(what, lambda *own: [f([*own]).result()], tensors)
        return Pending.of(out)


class GatherWire:
    """Carries pieces of leaves to wholes. The constructor is collective, the first time along the axes.

    Args:
        way: the route of each leaf.
        packing: the places of the pieces in the message.
        channel: channel of the route, from `gather_channels`.
        once: function of the channels that traces equal ops once, or None outside of a capture.

    Attributes:
        packing: the packing.
        axes: axes of the gather.
        size: the number of ranks along the axes.
        dtype: dtype of leaves on the wire, and on arrival.
        in_two: whether the gather has two hops.
    """

    def __init__(self, way: Route, packing: Packing, channel: GatherChannel, once: Once | None = None) -> None:
        self.packing, self._channel = packing, channel
        self._tracer = None if once is None else _Tracer(once, way, packing)
        self.axes, self.size = channel.axes, channel.size
        self.dtype = _travels_as(way)
        self.in_two = sum(isinstance(hop, AllGather) for hop in way.hops) > 1

    def start(self, pieces: Sequence[Tensor]) -> Pending[Tensor]:
        """Begins to send this rank's pieces. With two hops: the second hop, of the first hop's result."""
        return self._begin(pieces) if self._tracer is None else self._tracer.send("gather", self._begin, pieces)

    def _begin(self, pieces: Sequence[Tensor]) -> Pending[Tensor]:
        message = pieces[0] if self.in_two else self._pack_pieces(pieces)
        return self._channel.all_gather(message, self.packing.sizes)

    def bring(self, pieces: Sequence[Tensor]) -> Pending[Tensor]:
        """Begins the first of two hops: pieces of the ranks with this rank's index along the near axes."""
        return self._bring(pieces) if self._tracer is None else self._tracer.send("bring", self._bring, pieces)

    def _bring(self, pieces: Sequence[Tensor]) -> Pending[Tensor]:
        assert isinstance(self._channel, TwoHops | QuantizedGather)
        return self._channel.bring(self._pack_pieces(pieces), self.packing.sizes)

    def start_into(self, pieces: Sequence[Tensor], into: Tensor | None) -> Pending[Tensor]:
        """Runs `start` between steps, where this thread only waits, into memory of the caller, or new."""
        assert not isinstance(self._channel, TwoHops | QuantizedGather)
        return self._channel.all_gather(self._pack_pieces(pieces), self.packing.sizes, into, idle=True)

    def unpack(self, message: Tensor) -> list[Tensor]:
        """Returns the whole leaves of a message."""
        if self._tracer is None:
            return self.packing.unpack(message)
        return self._tracer.run("unpack", self.packing.unpack, [message])

    def put(self, message: Tensor, wholes: Sequence[Tensor]) -> None:
        """Writes the leaves of a message to tensors of the caller."""
        (self.packing.put if self._tracer is None else self.packing.unpack_into)(message, wholes)

    def _pack_pieces(self, pieces: Sequence[Tensor]) -> Tensor:
        return self.packing.pack([piece.to(self.dtype) for piece in pieces])


class SumWire:
    """Carries gradients of leaves to sums. The constructor is collective, the first time along the axes.

    A wire serves a single step, and a single transfer at a time.

    Args:
        channels: the communicators.
        way: the route of each leaf.
        packing: the places in the message of rows, or of wholes.

    Attributes:
        packing: the packing.
        scatters: whether each rank gets rows of the leaves. Else sums are wanted whole.
        size: the number of ranks along the axes of the first hop.
        index: index of this rank among these ranks.
        axes: the axes.
    """

    def __init__(self, channels: AnyChannels, way: Route, packing: Packing) -> None:
        self.packing, self.scatters = packing, way.scatters
        self._channel = channel = _reduce_channel(channels, way)
        self._tracer = None if channels.once is None else _Tracer(channels.once, way, packing)
        self.axes, self.size, self.index = channel.axes, channel.size, channel.index
        # A message in which sums will be joined: by then the message's summands have left.
        self._message: Tensor | None = None
        self._joins = None if self.scatters else channels.gather(self.axes)

    @property
    def is_alone(self) -> bool:
        """Returns whether gradients reach the optimizer unchanged, only from this rank. In a capture: no."""
        return self.size == 1 and self._tracer is None and not isinstance(self._channel, QuantizedReduce)

    @property
    def sums_in_one(self) -> bool:
        """Returns whether `sum_whole` has the bits of `start` and `join`."""
        return not self.scatters and self._channel.sums_in_one

    def start(self, grads: list[Tensor], *, joins: bool) -> Pending[Tensor]:
        """Begins to send gradients. The list is emptied, to free each gradient once it is in the message.

        Args:
            grads: gradients of the leaves, in the dtype of the wire.
            joins: whether `join` may follow.

        Returns:
            Pending of this rank's part, 1-D.
        """
        if self._tracer is None or not self.scatters:  # sums that are wanted whole keep their message
            return self._begin(grads, joins)
        return self._tracer.send("reduce", lambda own: self._begin(own, joins=False), grads)

    def _begin(self, grads: list[Tensor], joins: bool) -> Pending[Tensor]:
        message = self._lay_grads(grads)
        self._keep(message, joins)
        return self._channel.reduce_scatter(message, self._block_sizes(message), reuse=not self.scatters)

    def sum_whole(self, grads: list[Tensor]) -> Pending[Tensor]:
        """Runs `start` and `join` in a single transfer. See `sums_in_one`."""
        message = self._lay_grads(grads)
        # The message is summed in place. Memory that another tensor shares is copied first.
        return self._channel.all_reduce(message if is_sole_owner(message) else message.clone())

    def exchange(self, tensors: list[Tensor], *, joins: bool) -> Pending[Tensor]:
        """Begins to send each rank a part of these tensors, without a sum.

        Returns:
            Pending with the parts from all ranks for this rank, in rank order.
        """
        assert not isinstance(self._channel, QuantizedReduce)
        message = self.packing.lay(tensors)
        self._keep(message, joins)
        return self._channel.all_to_all(message, self._block_sizes(message))

    def join(self, part: Tensor) -> Pending[Tensor]:
        """Begins to bring together the ranks' parts of sums that are wanted whole."""
        assert self._joins is not None
        out, self._message = self._message, None
        assert out is not None
        sizes = self._block_sizes(out)
        in_place = out.untyped_storage()._cdata == part.untyped_storage()._cdata
        if out.dtype != part.dtype or not (in_place or is_sole_owner(out)):
            out = None
        return self._joins.all_gather(part, sizes, out)

    def split(self, part: Tensor) -> list[Tensor]:
        """Returns the pieces of leaves in this rank's part, as views."""
        if self._tracer is None:
            return self.packing.split(part, self.index)
        return self._tracer.run("split", functools.partial(_view_pieces, self.packing.shapes(self.index)), [part])

    def _lay_grads(self, grads: list[Tensor]) -> Tensor:
        message = (self.packing.laid if self._tracer is None else self.packing.lay)(grads)
        grads.clear()
        return message

    def _keep(self, message: Tensor, joins: bool) -> None:
        """Keeps a message in which `join` can bring sums together."""
        if joins and not self.scatters and self.size > 1:
            self._message = message

    def _block_sizes(self, message: Tensor) -> Sequence[int]:
        return self.packing.sizes if self.scatters else dealt(message.numel(), self.size)


def _view_pieces(shapes: Sequence[torch.Size], flat: Tensor) -> list[Tensor]:
    pieces = flat.split_with_sizes([s.numel() for s in shapes]) if len(shapes) > 1 else [flat]
    return [p.view(s) for p, s in zip(pieces, shapes, strict=True)]


def gather_wires(channels: AnyChannels, ways: Sequence[tuple[Route, Packing]]) -> list[GatherWire]:
    """Returns a wire for each route and packing. Routes that are the same object share channels."""
    made: dict[int, GatherChannel] = {}
    for way, _ in ways:
        if id(way) not in made:
            made[id(way)] = _gather_channel(channels, way)
    return [GatherWire(way, packing, made[id(way)], channels.once) for way, packing in ways]


def _gather_channel(channels: AnyChannels, way: Route) -> GatherChannel:
    pairs = [(hop, before) for hop, before in zip(way.hops, way.stops, strict=False) if isinstance(hop, AllGather)]
    if not pairs:
        return channels.gather(())
    (last, cut), gathered = pairs[-1], {a for hop, _ in pairs for a in hop.axes}
    axes = tuple(a for a in cut.spec.dim_axes(last.dim) if a in gathered)
    plain = channels.gather(axes) if len(pairs) == 1 else TwoHops(channels, axes, last.axes)
    return plain if way.quantization is None else QuantizedGather(plain, Quantizer(*way.quantization), way.dst.dtype)


def _reduce_channel(channels: AnyChannels, way: Route) -> ReduceChannel:
    """Returns the channel that sums along a route, up to rows if these are wanted. Collective the first time."""
    scatters = [hop for hop in way.hops if isinstance(hop, PsumScatter)]
    if not scatters:
        return channels.reduce(tuple(a for hop in way.hops if isinstance(hop, Psum) for a in hop.axes))
    cut = next(after for hop, after in zip(way.hops, way.stops[1:], strict=True) if hop is scatters[-1])
    summed = {a for hop in scatters for a in hop.axes}
    axes = tuple(a for a in cut.spec.dim_axes(scatters[0].dim) if a in summed)
    if way.quantization is None:
        return channels.reduce(axes)
    return QuantizedReduce(channels, axes, scatters[0].axes if len(scatters) > 1 else (), Quantizer(*way.quantization))


def _travels_as(way: Route) -> torch.dtype:
    """Returns the dtype of a leaf at the start of the first gather, or without a gather on arrival."""
    if isinstance(way.src.quantization, str):  # the bytes of the codes
        return torch.uint8
    pairs = zip(way.hops, way.stops, strict=False)
    return next((before.dtype for hop, before in pairs if isinstance(hop, AllGather)), way.dst.dtype)
