"""The control plane: small CPU messages by which ranks agree on their next call, and learn which ranks failed.

An exchange is one all_reduce of three integers when ranks agree. A failing peer becomes a `RankError` with the peer's
rank.

Processes of the program that have ended are found by connections that failures of transfers do not close.

A process that has ended, for any reason, has closed its connections. A process that is slow, or stopped, has not.
Neither has a process with other communicators closed after a failure.
"""

import functools
import hashlib
import itertools
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from shardfn.core import Mesh, RankError, is_known

from ._calls import FLIGHT, Calls, CallWatch, flight_recorder_of
from ._failure import COURTESY, PATIENCE, Board, EndedGroup, TransportError, is_of_the_wire
from ._rounds import Kind, Rounds, notice_of

# Seconds to wait until other ranks report a failure, and until a waiting rank is woken and reports the failure.
GRACE, WAKING = 3.0, 1.0
# The number of lines of a rank's text that an error shows.
_SHOWN = 12
_WHAT = "what to run"
_DIFFERENCES = "differences"
_SAME_CALLS = (
    "\nAll ranks of a mesh make the same calls in the same order. Look for one under a condition that differs between"
    " ranks, such as `if mesh.rank == 0:`, or for a rank that has caught an error and gone on."
)


class Constant(NamedTuple):
    """Part of the ranks' agreement that stays the same from call to call.

    Attributes:
        text: text with a line for each fact.
        code: hash.
    """

    text: str
    code: int

    @staticmethod
    def of(text: str) -> "Constant":
        """Returns a text, hashed once."""
        return Constant(text, text_hash(text))


class Agreed(NamedTuple):
    """Results of the agreement on a call.

    Attributes:
        even: whether all ranks passed the same sizes.
        known: whether all ranks already have the results of a first call: for equal sizes, and for unequal sizes.
        sizes: sizes of each rank, if sizes differ.
    """

    even: bool = True
    known: tuple[bool, bool] = (True, True)
    sizes: tuple[tuple[int, ...], ...] = ()

    @property
    def ready(self) -> bool:
        """Returns whether all ranks have the results that this call needs, for the passed sizes."""
        return self.known[0 if self.even else 1]


class Control:
    """Gloo group over the whole mesh for agreement.

    The constructor is collective. On a single rank agreement does nothing.

    Attributes:
        size: the number of ranks.
        rank: this rank.
        lost: whether a peer was lost, so that no agreement is possible any more.
        wake: function that closes everything else at which another rank may wait for this rank.
        closing: lock of the thread that ends the communicators.
        calls: calls of this rank.
    """

    def __init__(self, mesh: Mesh) -> None:
        self.size = mesh.size
        self.rank = mesh.rank
        self._group: Any = mesh.new_group(mesh.axis_names, backend="gloo") if mesh.size > 1 else None
        self._mesh = mesh
        self.calls = Calls()
        self._flight = flight_recorder_of(mesh)
        self._rounds = Rounds(
            self._group, mesh.rank, *_errors_of(self), notice=notice_of(mesh), begin=self._begin_of(())
        )
        self._along: dict[tuple[str, ...], Rounds] = {}
        self.lost = self._shares = False
        # Both the rank's thread and the thread of `CallWatch` may end the communicators.
        self.closing = threading.RLock()
        self.wake: Callable[[], None] = lambda: None
        # Whether all ranks came to the last call on which this rank wanted to agree.
        self._met, self._meetings = False, 0
        self._timeout, self._agreement_timeout = mesh.timeout, mesh.agreement_timeout
        self._board = Board(self._new_name(), self.rank, self.size)
        if self._group is not None:
            self._presence = Presence(mesh)
            this = weakref.ref(self)
            report = functools.partial(_report_failure, this)
            self._watch = CallWatch(self.calls, self._board, self.rank, report, self._flight)
            mesh.at_close("control", lambda why: _say_goodbye(this(), why))

    def exchange(self, value: int) -> list[int]:
        """Returns every rank's value (60 bits and a sign), in rank order. See `Rounds.exchange`."""
        return self._rounds.exchange(value)

    def gather(self, value: object) -> list[object]:
        """Returns every rank's picklable value, in rank order."""
        return self._rounds.gather(value)

    def along(self, axes: tuple[str, ...]) -> Rounds:
        """Returns the rounds of only the ranks along some axes. Other ranks take no part.

        Collective over the mesh the first time. Failures of a rank still go to the whole mesh.
        """
        names = tuple(a for a in self._mesh.axis_names if a in self._mesh.axes(axes))
        if self._mesh.axis_size(names) == self.size:
            return self._rounds
        if names not in self._along:
            if self._mesh.axis_size(names) > 1:
                self.meet()
            group = self._mesh.new_group(names, backend="gloo") if names else None
            self._along[names] = Rounds(group, self.rank, *_errors_of(self), begin=self._begin_of(names))
            if self._shares:
                self._along[names].share(self._timeout)
        return self._along[names]

    def agree(
        self,
        what: str,
        text: str,
        constant: Constant | None = None,
        sizes: tuple[int, ...] = (),
        known: tuple[bool, bool] = (True, True),
        remedy: Callable[[list[str]], str] = lambda texts: "",
        *,
        begins: bool = False,
    ) -> Agreed:
        """Raises the same error on all ranks unless all pass the same texts. Equal texts cost a single exchange.

        Ranks that differ at the beginning of a call keep their communicators: no transfer of the call has begun.

        Args:
            what: the subject of the agreement, for the error.
            text: text with a line for each fact. The first line is this rank's next call.
            constant: further facts that must be the same.
            sizes: numbers that may differ.
            known: the results that this rank has. See `Agreed`. Ranks may differ.
            remedy: function from the texts of all ranks to further lines of the error.
            begins: whether this agreement is the first message of a call, named by `begin`.

        Returns:
            The permitted differences between ranks.

        Raises:
            RankError: lists the texts of the ranks.
        """
        self.calls.inside += 1
        try:
            return self._agree_on(what, text, constant, sizes, known, remedy, begins)
        finally:
            self.calls.inside -= 1

    def _agree_on(
        self,
        what: str,
        text: str,
        constant: Constant | None,
        sizes: tuple[int, ...],
        known: tuple[bool, bool],
        remedy: Callable[[list[str]], str],
        begins: bool,
    ) -> Agreed:
        code = constant.code if constant else 0
        kind, limit = (Kind.CALL, self._agreement_timeout) if begins else (Kind.INNER, None)
        # Every rank gets the same list, here and from both gathers below, so all ranks take the same branch and no rank
        # waits without the rest. `known[1]` is exchanged only if sizes differ: then the codes differ, too.
        codes = self._rounds.exchange(text_hash(f"{text}\n{code}\n{sizes}\n{known[0]}"), kind, limit)
        self._met = True
        self.calls.agreed()
        if len(set(codes)) == 1:
            return Agreed(True, known)
        rows: list[Any] = self.gather((text, code, sizes, known))
        told = [(text, code) for text, code, *_ in rows]
        if len({text for text, _ in told}) == 1 < len({code for _, code in told}):
            rests = self.gather(constant.text if constant else "")
            told = [(f"{text}\n{rest}", code) for (text, code), rest in zip(told, rests, strict=True)]
        texts = [text for text, _ in told]
        if len(set(texts)) > 1:
            error = _make_disagreement(what, texts, remedy(texts))
            error.before_transfers = begins
            raise error
        passed = tuple(sizes for *_, sizes, _ in rows)
        even = len(set(passed)) == 1
        at_even, at_uneven = (all(flags) for flags in zip(*(known for *_, known in rows), strict=True))
        return Agreed(even, (at_even, at_uneven), () if even else passed)

    def _begin_of(self, axes: tuple[str, ...]) -> Callable[[str], object] | None:
        """Returns the function that reports a round of the ranks along some axes to the flight recorder, if any."""
        flight = self._flight
        if flight is None:
            return None
        names = axes or self._mesh.axis_names
        ranks = tuple(self._mesh.along(names))
        return lambda kind: flight.add(kind, names, ranks)

    def share(self) -> None:
        """Lets rounds of ranks of a single host go through memory from now on. Collective, after an agreement."""
        if not self._shares:
            self._shares = True
            for rounds in (self._rounds, *self._along.values()):
                rounds.share(self._timeout)

    def shared(self) -> list[tuple[Rounds, int]]:
        """Returns the rounds, and the bytes of memory that this rank has set aside for each."""
        return [(rounds, rounds.shared_bytes) for rounds in (self._rounds, *self._along.values())]

    def meet(self) -> None:
        """Waits for all ranks, before groups are made: making a group is a wait from which no rank can be woken.

        Raises:
            RankError: a rank has left the call, or does not arrive within `agreement_timeout`.
        """
        if self._group is None or isinstance(self._group, EndedGroup):
            return
        name, self._meetings = f"meeting {self._meetings}", self._meetings + 1
        deadline, pause = time.monotonic() + self._agreement_timeout.total_seconds(), 0.001
        here = self._board.count(1, name)
        while here < self.size:
            others = self.size - 1
            left = len(self._board.absent()) < others
            if left or self._board.silent or time.monotonic() > deadline:
                error = TransportError("not all ranks came to make a channel")
                raise self.failure(error) from error
            time.sleep(pause)
            pause = min(2 * pause, 0.05)
            here = self._board.count(0, name)

    def begin(self, call: str) -> None:
        """Records this rank's next call, for the errors of ranks that wait for this rank in vain."""
        self._met = False
        self.calls.begin(call)

    def mismatch(self, calls: list[str]) -> RankError:
        """Returns the error to raise where ranks meet in a message at different places of a program.

        Ends the control plane.
        """
        error = _make_disagreement(_WHAT, calls, "")
        # For an outer call, which fails at the next message.
        self._board.put(_DIFFERENCES, str(error))
        self._board.leave()
        self._board.wait_for_all(COURTESY)
        self.close()
        self.wake()
        return error

    def failure(self, error: BaseException) -> RankError:
        """Returns the error to raise when a transfer failed.

        Names the failed ranks and their errors, or missing ranks.
        """
        self.lost = True
        self._board.leave()
        # Noted as having left before any connection closes: ranks that wake must not take this rank for missing.
        self.close()  # wakes the ranks that wait for this rank in turn
        self.wake()
        if differences := self._board.get(_DIFFERENCES):
            return RankError(differences)
        told = self._board.read() or self._look_around(error)
        if self._flight is not None and (why := self._board.get(FLIGHT)):
            self._flight.write(why)
        if any(self.rank in about for _, about in told):
            title = f"the other ranks have given up waiting for this one, rank {self.rank}."
        else:
            title = f"another rank failed while rank {self.rank} was waiting for it."
        lines = [f"{title} The state passed in is unchanged, unless its update had begun."]
        return RankError("\n".join([*lines, *(f"  - {text}" for text, _ in told)]))

    def is_theirs(self, error: BaseException) -> bool:
        """Returns whether an error of this rank only reports that another rank failed."""
        if self._group is None:
            return False
        in_torch = isinstance(error, dist.DistError)
        return is_of_the_wire(error) or (in_torch and bool(self._board.read() or self._presence.gone()))

    def tell(self, what: str) -> None:
        """Posts an error of only this rank. Then gives ranks with separate errors a moment to leave."""
        # Posted before this rank counts as having left, so that other ranks find the reason.
        self._board.post(f"rank {self.rank} {what}")
        self._board.leave()
        self._board.wait_for_all(COURTESY)

    def leave(self) -> None:
        """Notes that this rank has left the step by an error that other ranks raise too."""
        self._board.leave()

    def close(self) -> None:
        """Ends the control plane: ranks that wait for this rank wake, and read the message on the board."""
        if self._group is None:
            return
        with self.closing:
            self.lost = True
            self._watch.stop()
            for rounds in (self._rounds, *self._along.values()):
                rounds.close()
            self._group = EndedGroup()

    def _look_around(self, error: BaseException) -> list[tuple[str, list[int]]]:
        """Finds the missing ranks and posts their numbers, unless another rank was quicker.

        Ranks that waited wake and leave at once. A rank that does not leave, or comes later, is the missing rank.
        """
        start, came = time.monotonic(), dict[int, float]()
        if self._flight is not None:  # the thread of a rank that hangs prints the recorder of that rank
            self._board.put(FLIGHT, f"rank {self.rank} has waited in vain in {self.calls.last}")
        while True:
            # Local: each rank looks separately, and two may find out the same fact, shown once by `Board.read`.
            told, gone, absent = self._board.read(), self._presence.gone(), self._board.absent()
            if told:
                return told
            after = time.monotonic() - start
            for rank in range(self.size):
                if rank != self.rank and rank not in absent:
                    came.setdefault(rank, after)
            late = absent or [rank for rank, seconds in came.items() if seconds > WAKING]
            if gone or (late and not absent) or after > GRACE or self._board.silent:
                break
            time.sleep(0.05)
        what = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        if gone:
            text = f"{_name_ranks(gone)} died without a word ({what}). Restart the job from the last checkpoint."
        elif self._board.silent:
            text, late = self._cut_off(), []
        elif late:
            text = self._describe_missing(late)
        else:
            text = f"a connection between ranks broke, though all of them are there ({what})."
        late = [] if gone else late
        self._board.post(text, late)
        return [(text, late)]

    def _describe_missing(self, absent: list[int]) -> str:
        """Returns the line on ranks with a living process: the call in which other ranks wait."""
        here = _name_ranks([r for r in range(self.size) if r not in absent])
        name, limit = ("timeout", self._timeout) if self._met else ("agreement_timeout", self._agreement_timeout)
        seconds = "" if limit is None else f" for {limit.total_seconds():g} s"
        more = "" if limit is None else f", now make_mesh({name}={limit.total_seconds():g})"
        did = "reached {0}, but did not continue" if self._met else "did not reach {0}"
        return (
            f"{_name_ranks(absent)} {did.format(self.calls.last)}; {here} waited{seconds}. The process is there: it is"
            " slow, stopped, cut off, or at another call; `py-spy dump --pid` on its host shows where. If it is slow,"
            f" give it a longer timeout{more}."
        )

    def _cut_off(self) -> str:
        """Returns the line for a store out of reach: only this rank's wait is known."""
        seconds = "" if self._timeout is None else f" for {self._timeout.total_seconds():g} s"
        return (
            f"{_name_ranks([self.rank])} waited{seconds} in {self.calls.last}, then {PATIENCE:g} s for the job's store,"
            " by which ranks report to one another who failed. The link to the node of rank 0, which has the store, is"
            " cut, or its process is stopped."
        )

    def _new_name(self) -> str:
        """Returns a name common to all ranks, and new among the control planes of the store."""
        if self._group is None:
            return ""
        now = torch.tensor([time.time_ns() if self.rank == 0 else 0])
        dist.all_reduce(now, op=dist.ReduceOp.MAX, group=self._group)
        return f"{self._group.group_name}.{int(now)}"


def text_hash(text: str) -> int:
    """Returns a 60-bit hash of `text` that is the same in every process."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 4


def _errors_of(
    control: Control,
) -> tuple[Callable[[BaseException], RankError], Callable[[], str], Callable[[list[str]], RankError]]:
    """Returns `failure`, the call and `mismatch` of a control plane, without a reference cycle."""
    this, calls = weakref.ref(control), control.calls

    def make_failure(error: BaseException) -> RankError:
        live = this()
        return RankError(f"the step's communicators are gone ({error}).") if live is None else live.failure(error)

    def make_mismatch(texts: list[str]) -> RankError:
        live = this()
        return _make_disagreement(_WHAT, texts, "") if live is None else live.mismatch(texts)

    return make_failure, lambda: calls.last, make_mismatch


def _report_failure(this: "weakref.ref[Any]", first: str, own: str) -> None:
    """Ends a control plane with ranks that wait in different calls. Called by a thread."""
    control: Control | None = this()
    if control is not None and not control.lost:
        texts = f"  - rank 0: {first}\n  - rank {control.rank}: {own}"
        control._board.put(_DIFFERENCES, f"ranks disagree on {_WHAT}:\n{texts}{_SAME_CALLS}")
        control.close()
        control.wake()


def _make_disagreement(what: str, texts: list[str], remedy: str) -> RankError:
    """Returns the error of ranks that differ, at different calls with the remedy."""
    calls = {text.partition("\n")[0] for text in texts}
    apart = len(calls) > 1 and not any(call.startswith("raised ") for call in calls)
    return RankError(f"ranks disagree on {what}:\n" + _find_differences(texts) + remedy + _SAME_CALLS * apart)


def _say_goodbye(control: Control | None, why: str) -> None:
    """Leaves word that a rank goes for good, in case another rank waits."""
    if control is not None:
        control._watch.stop()
    if control is not None and not control.lost and dist.is_initialized():  # the program may have ended it itself
        control._board.post(f"rank {control.rank} {why}, while another one waited for it.")


def _name_ranks(ranks: list[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def _find_differences(texts: list[str]) -> str:
    """Returns the lines that only some ranks have, or for ranks at different calls only the calls."""
    lines = [t.splitlines() or [""] for t in texts]
    if len({mine[0] for mine in lines}) > 1:  # an error has several lines
        lines = [mine if mine[0].startswith("raised ") else mine[:1] for mine in lines]
    same = set(lines[0]).intersection(*lines[1:])
    facts = [{_strip_path(line) for line in mine} for mine in lines]
    out = []
    for rank, mine in enumerate(lines):
        own = [line for line in mine if line not in same]
        # An optimizer that is built otherwise has mostly equal facts, at other places.
        apart = [line for line in own if not all(_strip_path(line) in theirs for theirs in facts)]
        once: dict[Any, str] = {}
        for line in apart or own:
            once.setdefault(_strip_path(line), line)
        own = [*once.values()] or ["(nothing that the others lack)"]
        own = [*own[:_SHOWN], *([f"... and {len(own) - _SHOWN} lines more"] if len(own) > _SHOWN else [])]
        out.append("\n".join(f"  - rank {rank}: {line}" for line in own))
    return "\n".join(out)


def _strip_path(line: str) -> tuple[str, str]:
    """Returns a line's name, without the path, and the value."""
    path, equals, value = line.partition(" = ") if " = " in line else line.partition(": ")
    return (path.rpartition(".")[2], value) if equals else (line, "")


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
