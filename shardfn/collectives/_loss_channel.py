"""The channels of the collectives that a loss calls: one for each set of axes of a mesh, on the mesh's own groups.

A channel of the step is made by all ranks of the mesh together. One of a loss is made at its first transfer, by the
ranks along its axes alone, as other ranks may be in another loss, or in none; so it has the group that exists.
"""

from shardfn.core import Mesh

from ._channel import Channel


def loss_channel(mesh: Mesh, axes: tuple[str, ...]) -> Channel:
    """The channel of a mesh along `axes`. The first call for them is collective over the ranks along them."""
    made, group = _made(mesh), mesh.group(axes)
    there = made.get(axes)
    if there is not None and there.group is group:
        return there
    if there is not None:  # the mesh has made its group anew
        there.close()
    mesh.at_close("loss channels", lambda why: end_loss_channels(mesh))
    made[axes] = Channel(mesh, axes, group=group)
    return made[axes]


def loss_channels(mesh: Mesh) -> list[Channel]:
    """Those of a mesh so far."""
    return list(_made(mesh).values())


def end_loss_channels(mesh: Mesh) -> None:
    """Ends them, and wakes the ranks that wait there; their groups stay."""
    made = _made(mesh)
    while made:
        made.popitem()[1].close()


def _made(mesh: Mesh) -> dict[tuple[str, ...], Channel]:
    return mesh.resources.setdefault("loss channels", {})
