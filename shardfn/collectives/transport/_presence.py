"""Finds the processes of the program that have ended, by connections that failures of transfers do not close.

A process that has ended, for any reason, has closed its connections. A process that is slow, or stopped, has not.
Neither has a process with other communicators closed after a failure.
"""

import itertools

import torch
import torch.distributed as dist

from shardfn.core import Mesh, is_known

# The tags of messages that are never received.
_TAGS = itertools.count(1 << 20)
# By ranks, for the whole process: the group outlives meshes, as the end of a mesh is not the end of the processes.
_GROUPS: dict[tuple[int, ...], dist.ProcessGroup] = {}


class Presence:
    """Test of whether the other ranks of a mesh are there. The constructor is collective over the mesh."""

    def __init__(self, mesh: Mesh) -> None:
        if mesh.ranks not in _GROUPS or not is_known(_GROUPS[mesh.ranks]):
            _GROUPS[mesh.ranks] = mesh.group_for_good()
        self._others = [r for r in range(mesh.size) if r != mesh.rank]
        self._group = _GROUPS[mesh.ranks]

    def gone(self) -> list[int]:
        """Returns the ranks with a process that is known to have ended. Notice of an end may take a moment."""
        return [r for r in self._others if not self._can_reach(r)] if is_known(self._group) else []

    def _can_reach(self, rank: int) -> bool:
        try:
            # The message is never received: only the success of sending counts. So the test is local, and ranks need
            # not test together.
            self._group.send([torch.zeros(1)], rank, next(_TAGS))
        except RuntimeError:
            return False
        return True
