"""The disk of a step: one pool of files a rank and directory, open as long as the mesh is."""

import pathlib

from shardfn.memory import Pool

from ._plan import Plan


def pool_of(plan: Plan) -> Pool | None:
    """The pool of a plan; None if it keeps nothing on disk."""
    if plan.zero.directory is None:
        return None
    pools = plan.mesh.resources.setdefault("pools", {})
    if plan.zero.directory not in pools:
        place = pathlib.Path(plan.zero.directory) / f"rank{plan.mesh.rank}"
        pools[plan.zero.directory] = Pool(place, checksum=plan.zero.checksum)
    return pools[plan.zero.directory]
