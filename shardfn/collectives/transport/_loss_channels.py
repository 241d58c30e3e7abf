"""The channels of the collectives that a loss calls: those of the mesh's steps, or ones on its own groups."""

from shardfn.core import Mesh, PerMesh

from ._channel import Channel
from ._channels import Channels

LOSS_CHANNELS: PerMesh[Channels] = PerMesh()


def loss_channel(mesh: Mesh, axes: tuple[str, ...]) -> Channel:
    """Returns the channel of the collectives that a loss calls: that of the mesh's steps, if it has made any.

    Else one on the mesh's group along `axes`, whose first transfer is collective over the ranks along them.
    """
    channels = LOSS_CHANNELS.get(mesh)
    if channels is None:
        channels = LOSS_CHANNELS.put(mesh, Channels(mesh, apart=False))
        mesh.at_close("channels of the loss", lambda why: channels.end_memory_of_loss())
    return channels.loss(axes)


def set_loss_channels(mesh: Mesh, channels: Channels) -> None:
    """Lets the collectives of a loss go by a step's channels, in place of those on the mesh's own groups."""
    before = LOSS_CHANNELS.get(mesh)
    if before is not None and before is not channels:
        before.close()
    LOSS_CHANNELS.put(mesh, channels)
    mesh.at_close("channels of the loss", lambda why: channels.end_memory_of_loss())


def forget_loss_channels(mesh: Mesh, channels: Channels) -> None:
    """Lets the collectives of a loss go by the mesh's own groups again, as these channels have ended."""
    if LOSS_CHANNELS.get(mesh) is channels:
        del mesh.resources[LOSS_CHANNELS]
