"""The channels that carry out a route where transfers overlap with compute, with its hops and codes.

The hops of a route that are a rank's own, casts and moves between memories, are left to the caller.
"""

from collections.abc import Sequence

from ._code import Code
from ._coded import CodedGather, CodedReduce
from ._hops import TwoHops
from ._route import AllGather, Encode, Psum, PsumScatter, Route
from ._traced import AnyChannel, AnyChannels

GatherChannel = AnyChannel | TwoHops | CodedGather
ReduceChannel = AnyChannel | CodedReduce


def gather_channels(channels: AnyChannels, ways: Sequence[Route]) -> list[GatherChannel]:
    """`gather_channel` for each route; routes that are one object share theirs."""
    made: dict[int, GatherChannel] = {}
    for way in ways:
        if id(way) not in made:
            made[id(way)] = gather_channel(channels, way)
    return [made[id(way)] for way in ways]


def gather_channel(channels: AnyChannels, way: Route) -> GatherChannel:
    """The channel that gathers along a route. Collective the first time, as it makes channels."""
    pairs = [(hop, before) for hop, before in zip(way.hops, way.stops, strict=False) if isinstance(hop, AllGather)]
    if not pairs:
        return channels.gather(())
    (last, cut), gathered = pairs[-1], {a for hop, _ in pairs for a in hop.axes}
    axes = tuple(a for a in cut.spec.dim_axes(last.dim) if a in gathered)
    plain = channels.gather(axes) if len(pairs) == 1 else TwoHops(channels, axes, last.axes)
    code = code_of(way)
    return plain if code is None else CodedGather(plain, code, way.dst.dtype)


def reduce_channel(channels: AnyChannels, way: Route) -> ReduceChannel:
    """The channel that sums along a route, up to the rows if it leads to rows. Collective the first time."""
    scatters = [hop for hop in way.hops if isinstance(hop, PsumScatter)]
    code = code_of(way)
    if not scatters:
        return channels.reduce(tuple(a for hop in way.hops if isinstance(hop, Psum) for a in hop.axes))
    cut = next(after for hop, after in zip(way.hops, way.stops[1:], strict=True) if hop is scatters[-1])
    summed = {a for hop in scatters for a in hop.axes}
    axes = tuple(a for a in cut.spec.dim_axes(scatters[0].dim) if a in summed)
    if code is None:
        return channels.reduce(axes)
    return CodedReduce(channels, axes, scatters[0].axes if len(scatters) > 1 else (), code)


def code_of(way: Route) -> Code | None:
    """The code in which a leaf travels along a route; None = its elements, uncoded."""
    return next((Code(*hop.code) for hop in way.hops if isinstance(hop, Encode)), None)
