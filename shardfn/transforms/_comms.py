"""The communicators of a step."""

from shardfn.collectives import Channels, Control
from shardfn.core import Mesh


class Comms:
    """Channels and control plane of a step, and whether they can still be trusted. Making them is collective.

    Attributes:
        mesh: the mesh.
        channels: the step's asynchronous traffic.
        control: agreement between ranks.
        broken: set when a step failed half-way: transfers may be left over, so the next step makes new ones.
    """

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.channels = Channels(mesh)
        self.control = Control(mesh)
        self.broken = False
