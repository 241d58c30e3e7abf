"""The channels of the collectives that a loss calls: channels of the mesh's steps, or on the mesh's groups."""

from shardfn.core import Mesh, PerMesh

from ._channel import Channel
from ._channels import Channels

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
