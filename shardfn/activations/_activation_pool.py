"""Pools of files for activations on disk. Files are never committed, and each file is deleted with the value."""

import os
import pathlib

from shardfn.capture import CaptureError, capturing
from shardfn.collectives import current_mesh
from shardfn.memory import POOLS, AnyPool, Pool, TracedPool

from ._offloaded_value import PoolOf

# A pool for each directory. The pool owns the directory until the process ends.
_POOLS: dict[pathlib.Path, Pool] = {}


def pool_of(directory: str | os.PathLike[str] | None) -> PoolOf:
    """Returns the pool under a directory, or without a directory the pool of the surrounding step.

    The pool is made when the first value goes to disk.

    Raises:
        ValueError: (when called) there is neither a directory nor a step with a disk.
        CaptureError: (when called) in a capture, with a directory.
    """

    def find_pool() -> AnyPool:
        mesh = current_mesh()
        if capturing() and directory is not None:
            raise CaptureError(
                "a captured step has one disk, its own: leave out directory= of offload and remat, and let the step"
                " have one: Zero(disk=Disk(...)) with leaves on disk."
            )
        if directory is None:
            pools = list((POOLS.get(mesh) or {}).values())
            if not pools:
                raise ValueError(
                    "a policy sends activations to disk, but there is no directory. Pass directory= to offload or"
                    " remat, or let the step have a disk: Zero(disk=Disk(...)) with leaves on it."
                )
            return TracedPool() if capturing() else pools[0]
        place = (pathlib.Path(directory) / f"activations{mesh.rank}").absolute()
        if place not in _POOLS:
            _POOLS[place] = Pool(place)
        return _POOLS[place]

    return find_pool
