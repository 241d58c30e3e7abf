"""The channels of a mesh: a channel of each kind for each set of axes.

A loss's collectives have the channels of the mesh's steps, or channels on the mesh's groups.
"""

from collections.abc import Callable
from typing import ClassVar

from shardfn.core import Mesh, PerMesh

from ._channel import Channel


class Channels:
    """Channels of each kind for each set of axes, so that gathers and reductions have separate queues.

    Channels are made on first request. The request is collective: all ranks must ask in the same order.

    Args:
        mesh: the mesh.
        meet: function that waits for all ranks before groups are made, as groups need all ranks.
        apart: whether the loss's channels, too, have separate groups, which may end with the channels after a failure.
            With another backend than gloo the channels have the mesh's groups in any case: each group would cost memory
            on the device.

    Attributes:
        once: None. In a capture, a function that traces equal ops once.
    """

    once: ClassVar[None] = None

    def __init__(self, mesh: Mesh, meet: Callable[[], None] = lambda: None, *, apart: bool = True) -> None:
        self._mesh, self._meet = mesh, meet
        self._apart = apart and mesh.backend == "gloo" and mesh.makes_groups
        # In the order of the first requests, the same on all ranks: `anew` makes channels in the same order.
        self._made: dict[tuple[str, tuple[str, ...]], Channel] = {}

    def gather(self, axes: tuple[str, ...]) -> Channel:
        """Returns the channel that gathers along `axes`."""
        return self._get_channel("gather", axes)

    def reduce(self, axes: tuple[str, ...]) -> Channel:
        """Returns the channel that reduces along `axes`."""
        return self._get_channel("reduce", axes)

    def relay(self, axes: tuple[str, ...]) -> Channel:
        """Returns the channel of reductions' second hops along `axes`. These start when the first hops have arrived."""
        return self._get_channel("relay", axes)

    def between(self, axes: tuple[str, ...]) -> Channel:
        """Returns the channel from rank to rank, through the host on any device."""
        return self._get_channel("between", axes)

    def loss(self, axes: tuple[str, ...]) -> Channel:
        """Returns the channel of the collectives that a loss calls along `axes`."""
        return self._get_channel("loss", axes)

    def loss_along_each(self) -> None:
        """Makes the loss's channel along each axis, if groups are separate: later not all ranks may ask."""
        for axis in self._mesh.axes(self._mesh.axis_names) if self._apart else ():
            self.loss((axis,))

    def shared(self) -> list[tuple[Channel, int]]:
        """Returns the channels that go through memory, and the bytes that this rank has set aside for each."""
        return [(x, x.shared_bytes) for x in self._made.values() if x.shared_bytes]

    def flush(self) -> None:
        """Waits until every block sent by this rank has left."""
        for channel in self._made.values():
            channel.flush()

    def close(self) -> None:
        """Ends all channels for good. Transfers under way fail, here and on the other ranks."""
        for channel in self._made.values():
            channel.close()

    def end_memory_of_loss(self) -> None:
        """Ends the way through memory of the loss's channels, after all transfers have been waited for."""
        for (kind, _), channel in self._made.items():
            if kind == "loss":
                channel.end_memory()

    @property
    def num_made(self) -> int:
        """Returns how many channels have been made. After a failure a rank may have more channels than another."""
        return len(self._made)

    def anew(self, num: int, meet: Callable[[], None] = lambda: None) -> "Channels":
        """Returns the first `num` channels, made again. Collective.

        Args:
            num: the number of channels, the same on all ranks.
            meet: function as above.
        """
        fresh = Channels(self._mesh, meet)
        for kind, axes in list(self._made)[:num]:
            fresh._get_channel(kind, axes)
        return fresh

    def _get_channel(self, kind: str, axes: tuple[str, ...]) -> Channel:
        key = (kind, axes)
        if key not in self._made:
            if self._mesh.axis_size(axes) > 1:
                self._meet()
            if kind == "loss":
                group = None if self._apart else self._mesh.group(axes)
                self._made[key] = Channel(self._mesh, axes, group=group, of_loss=True)
            else:
                self._made[key] = Channel(self._mesh, axes, "gloo" if kind == "between" else None)
        return self._made[key]


LOSS_CHANNELS: PerMesh[Channels] = PerMesh()


def loss_channel(mesh: Mesh, axes: tuple[str, ...]) -> Channel:
    """Returns the channel of the collectives that a loss calls, from the mesh's steps, if there is a channel.

    Else a channel on the mesh's group along `axes`: the first transfer is collective over the ranks along these axes.
    """
    channels = LOSS_CHANNELS.get(mesh)
    if channels is None:
        channels = LOSS_CHANNELS.put(mesh, Channels(mesh, apart=False))
        mesh.at_close("channels of the loss", lambda why: channels.end_memory_of_loss())
    return channels.loss(axes)


def set_loss_channels(mesh: Mesh, channels: Channels) -> None:
    """Lets the collectives of a loss use a step's channels, in place of channels on the mesh's groups."""
    before = LOSS_CHANNELS.get(mesh)
    if before is not None and before is not channels:
        before.close()
    LOSS_CHANNELS.put(mesh, channels)
    mesh.at_close("channels of the loss", lambda why: channels.end_memory_of_loss())


def forget_loss_channels(mesh: Mesh, channels: Channels) -> None:
    """Lets the collectives of a loss use the mesh's groups again, as these channels have ended."""
    if LOSS_CHANNELS.get(mesh) is channels:
        del mesh.resources[LOSS_CHANNELS]
