"""Whether the ranks of a channel share memory.

Each rank tries all other offers, and memory is used only if all succeed.
"""

import datetime
import os
import pathlib
import platform
import warnings
from collections.abc import Iterable
from typing import Any

import torch.distributed as dist

from ._memory import LaneOp, Lanes
from ._segment import NotSharedError

# The variable by which a user chooses the channel, and its default.
VARIABLE, DEFAULT = "SHARDFN_CHANNEL", "memory"
_WAYS = ("memory", "gloo")
# The warnings that this process has given.
_SAID: set[str] = set()


class MemoryWork:
    """Counterpart of torch's `Work` for a transfer through memory."""

    def __init__(self, lanes: Lanes, entry: LaneOp, asked: int) -> None:
        self._lanes, self._entry, self._asked = lanes, entry, asked

    def wait(self) -> None:
        """Waits, and raises `TransportError` if the transfer failed."""
        self._lanes.wait(self._entry, self._asked)

    def is_completed(self) -> bool:
        """Returns whether `wait` would return, or raise, at once."""
        return self._lanes.state(self._entry, self._asked) != 0


def wished() -> str:
    """Returns the user's choice: "memory", for ranks with shared memory, or "gloo" in any case.

    Raises:
        ValueError: the choice is neither.
    """
    way = os.environ.get(VARIABLE) or DEFAULT
    if way not in _WAYS:
        raise ValueError(
            f"{VARIABLE} must be one of {', '.join(map(repr, _WAYS))}, got {way!r}. Set one of these, or nothing."
        )
    return way


def chosen_channel() -> str:
    """Returns a line with the user's choice, for agreements of the ranks, empty for the default."""
    way = wished()
    return "" if way == DEFAULT else f"{VARIABLE}={way}"


def shared_lanes(group: Any, timeout: datetime.timedelta | None, ring: int | None = None) -> Lanes | None:
    """Returns the lanes of a gloo group, or None, with a warning and the reason if lanes were to be expected.

    If the user has chosen gloo, the result is None at once. Else the call is collective over the group: either all
    ranks get lanes or no rank does.
    """
    if wished() == "gloo":
        return None
    lanes, why = None, ""
    try:
        lanes = Lanes(group.size(), group.rank(), None if timeout is None else timeout.total_seconds(), ring)
    except NotSharedError as error:
        why = str(error)
    told = _gather_values((_identify_machine(), lanes and lanes.offer, why), group)
    same = all(machine == _identify_machine() for machine, *_ in told)
    reasons = _join_reasons(reason for *_, reason in told)
    if same and not reasons:
        assert lanes is not None
        try:
            lanes.open([offer for _, offer, _ in told])
        except NotSharedError as error:
            why = str(error)
        reasons = _join_reasons(_gather_values(why, group))
        if not reasons:
            return lanes
    if lanes is not None:
        lanes.close()
    if same and group.rank() == 0:  # the ranks of several machines are expected to share no memory
        rank, reason = reasons[0]
        _warn_unshared(f"rank {dist.get_process_group_ranks(group)[rank]}: {reason}")
    return None


def _join_reasons(said: Iterable[str]) -> list[tuple[int, str]]:
    return [(rank, reason) for rank, reason in enumerate(said) if reason]


def _warn_unshared(reason: str) -> None:
    if not _SAID:
        _SAID.add(reason)
        warnings.warn(
            f"ranks of one machine talk by gloo and not through memory, as they share no memory: {reason}."
            f" {VARIABLE}=gloo asks for just that.",
            stacklevel=2,
        )


def _gather_values(value: object, group: Any) -> list[Any]:
    out: list[Any] = [None] * group.size()
    dist.all_gather_object(out, value, group=group)
    return out


def _identify_machine() -> str:
    """Returns a text equal for processes of a single kernel and network, such as containers on the host's network.

    A host's name does not identify a host: two machines may share a name. Network namespaces without a common loopback
    count as separate hosts.
    """
    try:
        kernel = pathlib.Path("/proc/sys/kernel/random/boot_id").read_text()
        return f"{kernel} {os.readlink('/proc/self/ns/net')}"
    except OSError:
        return platform.node()
