"""Compares the calls of ranks that wait in different calls, where no message does.

A call that begins with an agreement is compared by the agreement's message. A bound call sends no message of this kind:
the call may wait in a transfer for a rank that waits in the agreement of another call, a deadlock. So each rank keeps a
list of calls since ranks last agreed, and while a call lasts a thread compares the list with rank 0's list, through the
job's store. A short call pays a fraction of a microsecond.

The flight recorder of a rank keeps the last collectives. When ranks wait in vain, each rank prints its own. The thread
prints the recorder of a rank that does not return from a call.
"""

import collections
import contextlib
import copy
import dataclasses
import datetime
import json
import pathlib
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable
from types import CodeType

import torch
from torch import Tensor

from shardfn.core import Mesh, PerMesh, columns

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
        """Returns the place of the current call, or None between two calls."""
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
        flight: flight recorder of the mesh, or None. Any rank may ask for it by `Board.put`.
    """

    def __init__(
        self,
        calls: Calls,
        board: Board,
        rank: int,
        report: Callable[[str, str], None],
        flight: "FlightRecorder | None" = None,
    ) -> None:
        self._calls, self._board, self._rank, self._report, self._flight = calls, board, rank, report, flight
        # A copy: a store that is held by another wait for long must not silence the board of failures.
        self._flight_board = copy.copy(board)
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
        """Compares the current call if the call has lasted for a while. Prints the recorder if a rank has asked."""
        if self._flight is not None and (why := self._flight_board.get(FLIGHT)):
            self._flight.write(why)
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


FLIGHT = "flight"  # name of the text on the board by which a rank asks all ranks for their recorders
_OWN = tuple(f"{path}/" for path in (pathlib.Path(__file__).parents[2], pathlib.Path(torch.__file__).parent))
_LINES = 8  # of the program's stack


@dataclasses.dataclass(slots=True)
class FlightEntry:
    """A collective that a rank has begun.

    Attributes:
        number: number of the collective among those of the same op and axes, from 1 on. Equal numbers belong together.
        op: name of the op.
        axes: mesh axes.
        ranks: ranks of the mesh along these axes.
        shape: shape of this rank's tensor.
        dtype: dtype of the tensor, or None for an agreement.
        began: time of the beginning, by `time.time`.
        waited: time at which this rank had waited for the result, or None before.
        file: file of the program's line.
        line: number of the line, outside of shardfn and torch.
    """

    number: int
    op: str
    axes: tuple[str, ...]
    ranks: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype | None
    began: float
    waited: float | None
    file: str
    line: int


class FlightRecorder:
    """Last collectives of a rank, the oldest first.

    Args:
        mesh: mesh of the collectives. Its `flight_recorder` is the number of collectives that are kept.

    Attributes:
        entries: last collectives.

    Example:
        >>> from shardfn.core import make_mesh
        >>> recorder = flight_recorder_of(make_mesh(flight_recorder=2))
        >>> for size in (1, 2, 3):
        ...     entry = recorder.add("psum", ("dp",), (0, 1), torch.zeros(size))
        >>> [(entry.number, entry.shape) for entry in recorder.entries]
        [(2, (2,)), (3, (3,))]
    """

    def __init__(self, mesh: Mesh) -> None:
        self.entries: collections.deque[FlightEntry] = collections.deque(maxlen=mesh.flight_recorder)
        self._name = f"rank {mesh.rank} of {mesh.size}"
        self._counts = collections.Counter[tuple[str, tuple[str, ...]]]()
        self._printed = 0  # number of collectives at the last print
        self._printing = threading.Lock()

    @property
    def num(self) -> int:
        """Returns the number of collectives so far."""
        return sum(self._counts.values())

    def add(self, op: str, axes: tuple[str, ...], ranks: tuple[int, ...], x: Tensor | None = None) -> FlightEntry:
        """Keeps a collective that begins, and returns the entry.

        Args:
            op: name of the op.
            axes: mesh axes.
            ranks: ranks along the axes.
            x: this rank's tensor. The recorder keeps only its shape and dtype.
        """
        self._counts[op, axes] += 1
        shape, dtype = ((), None) if x is None else (tuple(x.shape), x.dtype)
        number, now = self._counts[op, axes], time.time()
        entry = FlightEntry(number, op, axes, ranks, shape, dtype, now, None, *_find_line())
        self.entries.append(entry)
        return entry

    def __str__(self) -> str:
        """Returns a table with a line for each collective, the newest last."""
        head = "op", "axes", "number", "ranks", "shape", "dtype", "began", "state", "line"
        return columns([head, *map(_describe_entry, [*self.entries])])

    def write(self, why: str) -> None:
        """Prints the table and the place of the program on stderr, once for the same collectives.

        Args:
            why: reason in words.
        """
        with self._printing:
            if self._printed == self.num + 1:
                return
            self._printed = self.num + 1
        title = (
            f"shardfn: {self._name}: {why}. The last {len(self.entries)} of {self.num} collectives, the newest last:"
        )
        main = sys._current_frames().get(threading.main_thread().ident or 0)
        stack = [] if main is None else [x for x in traceback.extract_stack(main) if not x.filename.startswith(_OWN)]
        places = "".join(traceback.format_list(stack[-_LINES:]))
        with contextlib.suppress(OSError, ValueError):  # stderr is closed
            print(f"{title}\n{self}\nThe program is at:\n{places}", end="", file=sys.stderr, flush=True)


_RECORDERS: PerMesh[FlightRecorder] = PerMesh()


def flight_recorder_of(mesh: Mesh) -> FlightRecorder | None:
    """Returns the flight recorder of a mesh, or None for a mesh without one.

    Example:
        >>> from shardfn.core import make_mesh
        >>> flight_recorder_of(make_mesh()) is None
        True
    """
    return _RECORDERS.of(mesh, lambda: FlightRecorder(mesh)) if mesh.flight_recorder else None


_IS_OWN: dict[CodeType, bool] = {}


def _find_line() -> tuple[str, int]:
    """Returns file and number of the innermost line outside of shardfn and torch, or of the outermost line."""
    frame = sys._getframe(2)
    while True:
        code, back = frame.f_code, frame.f_back
        own = _IS_OWN.get(code)
        if own is None:
            own = _IS_OWN[code] = code.co_filename.startswith((*_OWN, "<"))
        if not own or back is None:
            return code.co_filename, frame.f_lineno
        frame = back


def _describe_entry(entry: FlightEntry) -> tuple[str, ...]:
    began = datetime.datetime.fromtimestamp(entry.began).strftime("%H:%M:%S.%f")
    state = "not waited for" if entry.waited is None else f"done in {entry.waited - entry.began:.6f} s"
    what = ",".join(map(str, entry.ranks)), str(list(entry.shape)), str(entry.dtype or "").removeprefix("torch.")
    return (
        *(entry.op, ",".join(entry.axes), str(entry.number), *what, began, state),
        f"{entry.file}:{entry.line}",
    )
