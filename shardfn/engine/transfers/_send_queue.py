"""Gradients on their way: units leave in an agreed order as they are complete, and arrive in that order."""

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor

from shardfn.core import IN_FLIGHT_BYTES, Pending

# Seconds that a step may spend waiting for gradients under way, so that they are at most `IN_FLIGHT_BYTES`.
PATIENCE = 2.0

Start = Callable[[int], tuple[Pending[Tensor], int]]
Keep = Callable[[int, Pending[Tensor]], None]


class SentUnit(NamedTuple):
    """A transfer of a single unit.

    Attributes:
        unit: number.
        pending: the transfer.
        nbytes: the bytes that are let go when it has left.
    """

    unit: int
    pending: Pending[Tensor]
    nbytes: int


class SendQueue:
    """The units of a single step's backwards, from complete to arrived.

    Ranks issue the same transfers in the same order: that of `order`, whatever their losses do. A backward begins with
    `begin`. A unit that is `complete` leaves with the next `send`, once all before it in the order have left.

    Args:
        order: the agreed order, empty: as units are complete, which a captured program does alike on all ranks.

    Attributes:
        seen: the order in which units became complete in the last backward.
        in_flight: bytes under way that are let go on arrival.
        patience: the seconds that are left of `PATIENCE`.
    """

    def __init__(self, order: Sequence[int]) -> None:
        self.expect(order)
        self.seen: list[int] = []
        # In this backward: units that are complete, units that do not leave, and the position in the order.
        self._complete, self._stays = set[int](), set[int]()
        self._next = 0
        # The oldest first, and collected in that order: sums of microbatches are added in one order always.
        self._sent: list[SentUnit] = []
        self.in_flight, self.patience = 0, PATIENCE

    def expect(self, order: Sequence[int]) -> None:
        """Sets the order, before any unit has left."""
        self.order, self._learns = list(order), not order

    def begin(self, stays: set[int]) -> None:
        """Starts a backward, after which the gradients of the units `stays` are kept on this rank."""
        self._next, self.seen, self._complete, self._stays = 0, [], set(), stays

    def complete(self, unit: int) -> None:
        """Notes that a unit has all of its gradients."""
        self.seen.append(unit)
        self._complete.add(unit)
        if self._learns and unit not in self.order:
            self.order.append(unit)

    # `start` and `keep` are arguments, and no attributes: a queue that knew its owner's methods would be a cycle, and
    # keep a step's gradients until the garbage collector comes.

    def send(self, start: Start) -> None:
        """Sends the units whose turn it is.

        Args:
            start: sends a unit, and returns the transfer and the bytes that it lets go.
        """
        while self._next < len(self.order):
            unit = self.order[self._next]
            if unit not in self._stays:
                if unit not in self._complete:
                    return
                pending, nbytes = start(unit)
                self._sent.append(SentUnit(unit, pending, nbytes))
                self.in_flight += nbytes
            self._next += 1

    def collect(self, keep: Keep, *, block: bool) -> None:
        """Hands the units that have arrived to `keep`. With `block`, waits for all."""
        while self._sent and (block or self._sent[0].pending.done()):
            unit, pending, nbytes = self._sent.pop(0)
            keep(unit, pending)
            self.in_flight -= nbytes

    def hold_back(self, keep: Keep) -> None:
        """Waits while too many bytes are in flight, so that whole gradients do not pile up on a slow network.

        The time of a backward's waits is bounded, because a rank in another branch of the loss may need this rank's
        next gather before it can send its part of a sum.
        """
        while self.in_flight > IN_FLIGHT_BYTES and self.patience > 0 and self._sent:
            start = time.monotonic()
            time.sleep(1e-4)
            self.collect(keep, block=False)
            self.patience -= time.monotonic() - start
