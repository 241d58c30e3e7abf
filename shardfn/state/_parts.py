"""Where summed gradients wait for the update: on the device, on the host, or on disk."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from shardfn.capture import capturing
from shardfn.collectives import may_be_added_to
from shardfn.core import IN_FLIGHT_BYTES, MemoryKind, Pending, Stored
from shardfn.memory import AnyPool, on_host, to_host

from ._ahead import Ahead
from ._stored import loaded

# Bytes of shares that may be on their way: the device holds them until they are on the host, which holds those that
# go on to the disk until they are there.
LEAVING_BYTES = IN_FLIGHT_BYTES


def added(before: Tensor | None, part: Tensor, key: int, summed: set[int]) -> Tensor:
    """`before + part`; in place where no other tensor shares the memory of `before`.

    A sum that was made here has its own memory. The first summand is autograd's, or came in a message: the
    caller holds an alias of it, and others may hold tensors that share its memory.

    Args:
        before: the sum so far; None = `part` is the first summand.
        part: the next summand, of the same dtype.
        key: the key of the sum.
        summed: the keys whose sum so far was made here; is changed.
    """
    if before is None:
        summed.discard(key)
        return part
    if capturing():  # a graph's memory is planned when it is compiled
        return before + part
    out = before.add_(part) if key in summed or may_be_added_to(before) else before + part
    summed.add(key)
    return out


class Parts:
    """This rank's shares of the summed gradients, by unit, each in its memory; later microbatches are added there.

    Args:
        homes: the memory of each unit.
        dtypes: in which each unit is added up.
        pool: the disk; needed by units that are kept there.
    """

    def __init__(self, homes: Sequence[MemoryKind], dtypes: Sequence[torch.dtype], pool: AnyPool | None) -> None:
        self._homes, self._dtypes, self._pool = homes, dtypes, pool
        # A unit that is kept elsewhere than on the device is in `_coming` (with the sum so far in `_at`, if there is
        # one), then in `_writing` if it goes on to disk, then in `_at`; one that the update has taken is in `_taken`
        # alone. `_leaving` are the bytes that the way of each still holds, the oldest first. The thread of an update
        # touches none of them: it gets its gradients by `Ahead.take`.
        self._at: dict[int, Tensor | Stored] = {}
        self._coming: dict[int, Pending[Tensor]] = {}
        self._writing: dict[int, Pending[Stored]] = {}
        self._leaving: dict[int, int] = {}
        # The units whose tensor in `_at` is a sum; see `added`.
        self._summed: set[int] = set()
        self._ahead: Ahead | None = None
        self._taken: dict[int, Pending[Any]] = {}

    def __contains__(self, unit: int) -> bool:
        return unit in self._at or unit in self._coming or unit in self._writing

    def __iter__(self) -> Iterator[int]:
        return iter(sorted({*self._at, *self._coming, *self._writing, *self._taken}))

    def give_to(self, ahead: Ahead) -> None:
        """From now on units that are complete go to an update that runs already, if it takes them."""
        self._ahead = ahead

    def is_taken(self, unit: int) -> bool:
        """Whether a unit has gone into the update."""
        return unit in self._taken

    def home(self, unit: int) -> MemoryKind:
        """The memory of a unit."""
        return self._homes[unit]

    def add(self, unit: int, part: Tensor, *, last: bool) -> None:
        """Adds a share that lies on the device; one that is kept elsewhere begins its way, and is added there.

        Args:
            unit: whose share.
            part: the share, in the dtype in which it travelled. Without other shares it stays on the device in this
                dtype, and a whole gradient travels on in it.
            last: whether nothing will be added to it any more.
        """
        if self._homes[unit] != "device":
            self._arrive(unit)
            if last and self._ahead is not None and unit in self._ahead.units:
                taken = self._ahead.take(unit, to_host(part), self._at.pop(unit, None), self._dtypes[unit])
                self._taken[unit] = taken
            else:
                self._coming[unit] = to_host(part)
            self._leaving[unit] = part.nbytes
            self._hold_back()
            return
        before = self._at.get(unit)
        assert before is None or isinstance(before, Tensor)
        part = added(before, part if before is None else part.to(self._dtypes[unit]), unit, self._summed)
        self._at[unit] = part if last else part.to(self._dtypes[unit])

    def finish(self, unit: int) -> None:
        """Ends the sum of a unit: nothing will be added any more."""
        x = self._at.get(unit)
        if isinstance(x, Tensor):
            self._at[unit] = x.to(self._dtypes[unit])

    def square(self, unit: int) -> Tensor | None:
        """The sum of squares, [1], of a unit that has gone into the update; waits for it. None for the others."""
        return self._ahead.square(unit) if self._ahead is not None and unit in self._taken else None

    def __getitem__(self, unit: int) -> Tensor | Stored:
        self._arrive(unit)
        return self._at[unit]

    def pop(self, unit: int) -> Tensor | Stored:
        """The share of a unit, which is let go."""
        self._arrive(unit)
        return self._at.pop(unit)

    def drop(self, unit: int) -> None:
        """Lets go of a unit, if it is there."""
        for place in (self._coming, self._writing, self._at):
            place.pop(unit, None)

    def _hold_back(self) -> None:
        """Sends on the shares that have arrived; waits for the oldest ones while too many are on their way."""
        for unit in [u for u in self._leaving if self._has_left(u)]:
            del self._leaving[unit]
        while sum(self._leaving.values()) > LEAVING_BYTES and len(self._leaving) > 1:
            oldest = next(iter(self._leaving))
            self._arrive(oldest)
            self._leaving.pop(oldest, None)

    def _has_left(self, unit: int) -> bool:
        coming = self._coming.get(unit)
        if coming is not None and coming.done():
            self._send_on(unit)
        coming = self._coming.get(unit) or self._writing.get(unit) or self._taken.get(unit)
        return coming is None or coming.done()

    def _arrive(self, unit: int) -> None:
        """Waits until a unit is at home, or has gone into the update."""
        if unit in self._taken:
            self._taken[unit].result()
        self._send_on(unit)
        writing = self._writing.pop(unit, None)
        if writing is not None:
            self._at[unit] = writing.result()

    def _send_on(self, unit: int) -> None:
        """Adds the share that comes to the host to the sum there, and sends the sum on to the disk."""
        coming = self._coming.pop(unit, None)
        if coming is None:
            return
        with on_host():
            part, before = coming.result().to(self._dtypes[unit]), self._at.pop(unit, None)
            if before is not None:
                part = loaded(before).add_(part)
        if self._homes[unit] == "host":
            self._at[unit] = part
        else:
            assert self._pool is not None
            self._writing[unit] = self._pool.write(part)
