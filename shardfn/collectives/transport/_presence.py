"""Finds the processes of the program that have ended, by connections that failures of transfers do not close.

A process that has ended, however it ended, has closed its connections. One that is slow, or stopped, has not; neither
has one whose other communicators have been closed after a failure.
"""

import itertools

import torch
import torch.distributed as dist

from shardfn.core import Mesh, is_known

# The tags of messages that are never received.
_TAGS = itertools.count(1 << 20)
# By ranks, one for the process: it outlives meshes, as the end of a mesh is not the end of its processes.
_GROUPS: dict[tuple[int, ...], dist.ProcessGroup] = {}


class Presence:
    """Whether the other ranks of a mesh are there. Making one is collective over the mesh."""

    def __init__(self, mesh: Mesh) -> None:
        if mesh.ranks not in _GROUPS or not is_known(_GROUPS[mesh.ranks]):
            _GROUPS[mesh.ranks] = mesh.group_for_good()
        self._others = [r for r in range(mesh.size) if r != mesh.rank]
        self._group = _GROUPS[mesh.ranks]

    def gone(self) -> list[int]:
        """Returns the ranks whose process is known to have ended. It may take a moment until that is noticed."""
        return [r for r in self._others if not self._can_reach(r)] if is_known(self._group) else []

    def _can_reach(self, rank: int) -> bool:
        try:
            # It is never received: only whether it can be sent counts. So the test is local, and ranks need not make it
            # together.
            self._group.send([torch.zeros(1)], rank, next(_TAGS))
        except RuntimeError:
            return False
        return True
