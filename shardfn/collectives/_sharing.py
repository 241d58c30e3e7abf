"""Whether the ranks of a channel share memory: each tries the offers of all others, and they do only if all succeed."""

import datetime
import os
import pathlib
import platform
import warnings
from typing import Any

import torch.distributed as dist

from ._memory import Entry, Lanes
from ._segment import NotSharedError

# The variable by which a user chooses, and what is chosen where it is not set.
VARIABLE, DEFAULT = "SHARDFN_CHANNEL", "gloo"
_WAYS = ("memory", "gloo")
# What has been warned of, once for the process.
_SAID: set[str] = set()


class MemoryWork:
    """What torch's `Work` is, of a transfer through memory."""

    def __init__(self, lanes: Lanes, entry: Entry, asked: int) -> None:
        self._lanes, self._entry, self._asked = lanes, entry, asked

    def wait(self) -> None:
        """Waits; raises `TransportError` if it failed."""
        self._lanes.wait(self._entry, self._asked)

    def is_completed(self) -> bool:
        """Whether `wait` would return, or raise, at once."""
        return self._lanes.state(self._entry, self._asked) != 0


def wished() -> str:
    """What the user has chosen: "memory" or "gloo".

    Raises:
        ValueError: it is neither.
    """
    way = os.environ.get(VARIABLE) or DEFAULT
    if way not in _WAYS:
        raise ValueError(f"{VARIABLE}={way!r} is none of {', '.join(map(repr, _WAYS))}; set one of them, or nothing.")
    return way


def shared_lanes(group: Any, timeout: datetime.timedelta | None) -> Lanes | None:
    """The way through memory of a gloo group, or None and, where it was to be expected, a warning that says why.

    Collective over the group; all of it get lanes, or none.
    """
    size, index = group.size(), group.rank()
    lanes, why = None, ""
    way = wished()
    if way == "memory":
        try:
            lanes = Lanes(size, index, None if timeout is None else timeout.total_seconds())
        except NotSharedError as error:
            why = str(error)
    # All ranks take part in both rounds whatever they wish: a variable may be set on some hosts only.
    told = _gathered((way, _machine(), os.getpid(), lanes and lanes.offer, why), group)
    if any(way != "memory" or machine != _machine() for way, machine, *_ in told):
        return None
    reasons = [(rank, reason) for rank, (*_, reason) in enumerate(told) if reason]
    if not reasons and lanes is not None:
        try:
            lanes.open([offer for *_, offer, _ in told])
        except NotSharedError as error:
            why = str(error)
        reasons = [(rank, reason) for rank, reason in enumerate(_gathered(why, group)) if reason]
    if not reasons:
        return lanes
    if lanes is not None:
        lanes.close()
    rank, reason = reasons[0]
    _warn(f"rank {dist.get_process_group_ranks(group)[rank]}: {reason}")
    return None


def _warn(reason: str) -> None:
    if not _SAID:
        _SAID.add(reason)
        warnings.warn(
            f"ranks of one machine talk by gloo, not through memory, as they share none: {reason}."
            f" {VARIABLE}=gloo asks for that.",
            stacklevel=2,
        )


def _gathered(value: object, group: Any) -> list[Any]:
    out: list[Any] = [None] * group.size()
    dist.all_gather_object(out, value, group=group)
    return out


def _machine() -> str:
    """The same for all that one kernel runs, containers as well; of another machine another."""
    try:
        return pathlib.Path("/proc/sys/kernel/random/boot_id").read_text()
    except OSError:
        return platform.node()
