"""Compares the calls of ranks that wait in different calls, where no message does.

A call that begins with an agreement is compared by the agreement's message. A bound call sends no message of this kind:
the call may wait in a transfer for a rank that waits in the agreement of another call, a deadlock. So each rank keeps a
list of calls since ranks last agreed, and while a call lasts a thread compares the list with rank 0's list, through the
job's store. A short call pays a fraction of a microsecond.
"""

import collections
import json
import threading
import time
import weakref
from collections.abc import Callable

from ._failure import Board

# Seconds between two looks of the thread; between two comparisons of a single call: at first, and at most.
_LOOK, _FIRST, _LONGEST = 0.2, 0.2, 5.0
# The number of calls that are compared.
_KEPT = 64


class Calls:
    """Calls of this rank on a control plane, since all ranks last agreed on a call.

    Attributes:
        last: the last call, in words.
        inside: how many blocks of calls are open; above 0 the rank may wait for other ranks.
    """

    def __init__(self) -> None:
        self.last, self.inside = "the first agreement", 0
        self._names: collections.deque[str] = collections.deque(maxlen=_KEPT)
        # Agreements so far, the same on all ranks of a control plane, and calls since the last agreement.
        self._at = (0, 0)

    def begin(self, call: str) -> None:
        """Notes the next call."""
        self.last = call
        self._names.append(call)
        agreed, num = self._at
        self._at = agreed, num + 1

    def agreed(self) -> None:
        """Notes that all ranks have agreed on the last call."""
        self._names.clear()
        self._at = self._at[0] + 1, 0

    @property
    def at(self) -> tuple[int, int] | None:
        """Returns the place of the call under way, or None between two calls."""
        return self._at if self.inside else None

    def as_text(self) -> str:
        """Returns the list, for `first_difference` on another rank."""
        return json.dumps([*self._at, list(self._names)])

    def first_difference(self, theirs: str) -> tuple[str, str] | None:
        """Returns the first call of another rank, and of this rank, at the same place and with different names.

        Example:
            >>> mine, theirs = Calls(), Calls()
            >>> mine.begin("step 0"), theirs.begin("bound f")
            (None, None)
            >>> mine.first_difference(theirs.as_text())
            ('bound f', 'step 0')
        """
        agreed, num, names = json.loads(theirs)
        own, (own_agreed, num_rank_outputs) = list(self._names), self._at
        if agreed != own_agreed:
            return None
        for place in range(max(num - len(names), num_rank_outputs - len(own)), min(num, num_rank_outputs)):
            pair = names[place - num], own[place - num_rank_outputs]
            if pair[0] != pair[1]:
                return pair
        return None


class CallWatch:
    """Watch that compares this rank's calls with rank 0's while a call lasts, until `stop`.

    Args:
        calls: calls of this rank.
        board: board of the control plane.
        rank: this rank.
        report: function of rank 0's call and this rank's call, called if the two differ. It ends the control plane.
    """

    def __init__(self, calls: Calls, board: Board, rank: int, report: Callable[[str, str], None]) -> None:
        self._calls, self._board, self._rank, self._report = calls, board, rank, report
        self._stopped = threading.Event()
        # The call that was seen last, the time of the call's next comparison, and the next pause.
        self._seen: tuple[int, int] | None = None
        self._due, self._pause = 0.0, _FIRST
        threading.Thread(
            target=_watch_calls, args=(weakref.ref(self), self._stopped), name="shardfn-calls", daemon=True
        ).start()

    def stop(self) -> None:
        """Ends the thread."""
        self._stopped.set()

    def look(self) -> None:
        """Compares the call under way if the call has lasted for a while."""
        at, now = self._calls.at, time.monotonic()
        if at is None or at != self._seen:
            self._seen, self._pause, self._due = at, _FIRST, now + _FIRST
            return
        if now < self._due:
            return
        self._due, self._pause = now + self._pause, min(2 * self._pause, _LONGEST)
        try:
            if self._rank == 0:
                self._board.put("calls", self._calls.as_text())
            elif (theirs := self._board.get("calls")) and (pair := self._calls.first_difference(theirs)):
                if self._calls.at == at and not self._stopped.is_set():
                    self.stop()
                    self._report(*pair)
        except RuntimeError:  # the list has changed, so the call is over
            pass


def _watch_calls(watch: "weakref.ref[CallWatch]", stopped: threading.Event) -> None:
    """Looks again and again, without holding the watch, so that the watch ends with the control plane."""
    while not stopped.wait(_LOOK):
        this = watch()
        if this is None:
            return
        this.look()
        del this
