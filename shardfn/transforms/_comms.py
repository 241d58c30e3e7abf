"""The communicators of a mesh's steps."""

import contextlib
from collections.abc import Callable, Iterator

from shardfn.collectives import AnyChannels, AnyControl, Channels, Control
from shardfn.core import Mesh, RankError


class Comms:
    """Channels and control plane, and whether they can still be trusted.

    Attributes:
        mesh: the mesh.
        channels: asynchronous traffic.
        control: agreement between ranks.
        mark: is told which part of the step begins: "forward", "backward" or "update"; only a capture takes note.
        broken: set when a step failed half-way: transfers may be left over, so the next step makes new ones.
    """

    def __init__(
        self,
        mesh: Mesh,
        channels: AnyChannels,
        control: AnyControl,
        mark: Callable[[str], None] = lambda phase: None,
    ) -> None:
        self.mesh, self.channels, self.control, self.mark = mesh, channels, control, mark
        self.broken = False


def comms_of(mesh: Mesh) -> Comms:
    """The communicators of a mesh, made on first use and again after a failure, which is collective.

    All steps on a mesh share them, as they run one after another, in the same order on all ranks.
    """
    comms = mesh.resources.get("comms")
    if comms is None or comms.broken:
        comms = mesh.resources["comms"] = Comms(mesh, Channels(mesh), Control(mesh))
    return comms


@contextlib.contextmanager
def losing_no_peer(comms: Comms) -> Iterator[None]:
    """Turns the error of a lost peer into a `RankError` that names it; after any error, communicators are made anew."""
    try:
        yield
    except BaseException as error:
        comms.broken = comms.mesh.size > 1
        may_be_theirs = isinstance(error, RuntimeError) and not isinstance(error, RankError)
        if may_be_theirs and comms.control.lost_a_peer():
            raise comms.control.failure(error) from error
        raise
