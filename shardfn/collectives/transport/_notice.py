"""`Notice`: a number that any rank may raise, and that all ranks learn in the same round.

A notice rides on agreements.
"""

import dataclasses

from shardfn.core import Mesh, PerMesh


@dataclasses.dataclass
class Notice:
    """Number that the ranks of a mesh exchange without a separate message.

    Each exchange of the mesh's control plane carries the number, so all ranks that have come to the same call have the
    same number.

    Attributes:
        mine: number of this rank. May be set at any time, for example from a signal's handler. The greatest number
            counts.
        told: the greatest number of all ranks, as of the last exchange, which never falls.
    """

    mine: int = 0
    told: int = 0


_NOTICE: PerMesh[Notice] = PerMesh()


def notice_of(mesh: Mesh) -> Notice:
    """Returns the notice of a mesh. The notice outlives communicators, which are made again after a failure.

    Example:
        >>> from shardfn.core import make_mesh
        >>> mesh = make_mesh({"dp": 1}, device="cpu")
        >>> notice_of(mesh) is notice_of(mesh), notice_of(mesh).told
        (True, 0)
    """
    return _NOTICE.of(mesh, Notice)
