"""The process groups that a mesh has made, and their end: with the mesh, not with the process.

torch keeps every group, with connections and threads, until a program destroys the group. So a mesh records groups, and
destroys the groups in `close`. The collector finds a lost mesh at another time on each rank, and perhaps on another
thread, where waiting is not allowed. So a lost mesh's groups are only put on a list, and are destroyed when the next
mesh is made, or at the end of the program.
"""

import collections
import contextlib
import datetime
import gc
import itertools
import os
import weakref
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from shardfn._torch import default_group, is_registered, registered_group

# A queue of transfers that this rank has sent and not waited for: pairs of work and tensors.
Sends = collections.deque[tuple[Any, Any]]
# Some backends end a group together with the other ranks: groups end in the order of their creation.
_NUMBERS = itertools.count()


class MadeGroups:
    """Groups that a mesh has made and may end. The object does not know the mesh, and so can outlive the mesh.

    A peer may still be receiving this rank's last message from a group's memory. So the end waits for `sends` first.
    Users of the groups have waited for all other transfers.
    """

    def __init__(self) -> None:
        self.number, self.process = next(_NUMBERS), os.getpid()
        self._groups: list[dist.ProcessGroup] = []
        self._sends: list[Sends] = []

    def add(self, group: dist.ProcessGroup) -> None:
        """Writes down a group."""
        self._groups.append(group)

    def forget_ended(self) -> None:
        """Lets go of groups that have been destroyed: the last reference ends their threads."""
        self._groups = [*filter(is_known, self._groups)]

    def watch(self, sends: Sends) -> None:
        """Makes the end wait for the transfers that a queue then holds."""
        self._sends.append(sends)

    def unwatch(self, sends: Sends) -> None:
        """Removes a queue, whose transfers the end then does not wait for."""
        self._sends = [x for x in self._sends if x is not sends]

    def end(self) -> None:
        """Destroys the groups, when this rank's last transfers have left, or failed."""
        for sends in self._sends:
            while sends:
                with contextlib.suppress(RuntimeError):  # the peer is gone
                    sends.popleft()[0].wait()
        for group in filter(is_known, self._groups):
            dist.destroy_process_group(group)
        self._groups, self._sends = [], []


class NamedGroups:
    """Maker of groups of some of the program's ranks, with only these ranks: names do not depend on torch's count.

    Ranks make groups of the same ranks in the same order, so all ranks agree on a group's name.

    Args:
        ranks: ranks of the program, in order, with this rank.
    """

    def __init__(self, ranks: Sequence[int]) -> None:
        self._name = f"shardfn:{name_of(ranks, 'groups')}"
        self._numbers = itertools.count()

    def new(self, line: Sequence[int], backend: str | None, timeout: datetime.timedelta | None) -> dist.ProcessGroup:
        """Returns a group of some of these ranks.

        Collective over all ranks: each rank makes the group of the ranks in line with it.
        """
        return registered_group(line, f"{self._name}:{next(self._numbers)}:{line[0]}", backend, timeout)


def name_of(ranks: Sequence[int], kind: str) -> str:
    """Returns a name for a new object of some ranks, which make objects of a kind in the same order."""
    counts = _COUNTS.setdefault(default_group(), collections.Counter[str]())
    key = f"{kind}.{'.'.join(map(str, ranks))}"
    counts[key] += 1
    return f"{key}:{counts[key]}"


# By default group: how many objects of a kind there have been of the same ranks.
_COUNTS: weakref.WeakKeyDictionary[Any, "collections.Counter[str]"] = weakref.WeakKeyDictionary()
_LOST: list[MadeGroups] = []


def end_with(owner: object, made: MadeGroups) -> None:
    """Makes groups end some time after `owner` is gone: see `end_lost`."""
    weakref.finalize(owner, _LOST.append, made).atexit = False


def end_lost() -> None:
    """Ends the groups of meshes that are garbage."""
    gc.collect()  # mesh and communicators know one another
    while _LOST:
        _LOST.pop(min(range(len(_LOST)), key=lambda i: _LOST[i].number)).end()


def is_known(group: dist.ProcessGroup) -> bool:
    """Returns whether a group has not been destroyed."""
    return is_registered(group)
