"""`Notice`: a number that any rank may raise, and that all come to know in the same round. It rides on agreements."""

import dataclasses

from shardfn.core import Mesh, PerMesh


@dataclasses.dataclass
class Notice:
    """A number that the ranks of a mesh exchange without a message of its own.

    Each exchange of the mesh's control plane carries it, so all ranks that have come to the same call have the same
    one.

    Attributes:
        mine: this rank's number; may be set at any time, from a signal's handler too. The greatest counts.
        told: the greatest of all ranks, as of the last exchange; it never falls.
    """

    mine: int = 0
    told: int = 0


_NOTICE: PerMesh[Notice] = PerMesh()


def notice_of(mesh: Mesh) -> Notice:
    """Returns the notice of a mesh. It outlives communicators that are made anew after a failure.

    Example:
        >>> from shardfn.core import make_mesh
        >>> mesh = make_mesh({"dp": 1}, device="cpu")
        >>> notice_of(mesh) is notice_of(mesh), notice_of(mesh).told
        (True, 0)
    """
    return _NOTICE.of(mesh, Notice)
