"""What leaves and gradients travel on: channels, in hops and in codes as the layout says."""

from collections.abc import Sequence

from shardfn.collectives import AnyChannel, AnyChannels, CodedGather, CodedReduce, TwoHops

from ._layout import LeafLayout, Unit

GatherChannel = AnyChannel | TwoHops | CodedGather


def gather_channels(leaves: Sequence[LeafLayout], units: Sequence[Unit], channels: AnyChannels) -> list[GatherChannel]:
    """For each unit, what it is gathered on. Collective the first time, as it makes channels."""
    made: dict[object, GatherChannel] = {}
    out: list[GatherChannel] = []
    for unit in units:
        leaf = leaves[unit.leaves[0]]
        key = leaf.use_axes, leaf.near, leaf.gather_code, leaf.dtypes.compute
        if key not in made:
            made[key] = _gather_channel(channels, leaf)
        out.append(made[key])
    return out


def reduce_channel(channels: AnyChannels, leaf: LeafLayout) -> AnyChannel | CodedReduce:
    """What the gradient of a leaf is reduced on. Collective the first time, as it makes channels."""
    if leaf.reduce_code is None:
        return channels.reduce(leaf.reduce_axes)
    return CodedReduce(channels, leaf.reduce_axes, leaf.near, leaf.reduce_code)


def _gather_channel(channels: AnyChannels, leaf: LeafLayout) -> GatherChannel:
    plain = TwoHops(channels, leaf.use_axes, leaf.near) if leaf.near else channels.gather(leaf.use_axes)
    return plain if leaf.gather_code is None else CodedGather(plain, leaf.gather_code, leaf.dtypes.compute)
