"""Scores: rewards by functions in Python that may fail, called with a time limit.

Calls of a function in Python that may fail: each has a time limit, and failures are outcomes.

Calls run in forks of this process, which are ended if they take too long. So a function needs no separate file, and
nothing that a function does, such as a crash, reaches the run.
"""

import collections
import contextlib
import math
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any, NamedTuple

import torch

from shardfn import core
from shardfn.engine import comms_of, losing_no_peer

from ._rollout import FAILURES, Rollout
from ._shapes import ADVANTAGES

Outcome = tuple[int, str, Any]  # row, kind, the value or the error's text
# Seconds after its limit at which a call ends by itself, should the process that ends it have died.
PATIENCE = 10.0


class Called(NamedTuple):
    """Function that is called in forks.

    Attributes:
        who: function of this room that makes the calls, for errors.
        function: function of a row's arguments.
        accept: function from a result to the outcome's value, by an error where the result is invalid.
        wanted: description of a result that is accepted, such as "a finite number".
    """

    who: str
    function: Callable[..., Any]
    accept: Callable[[Any], Any]
    wanted: str

    def text(self, outcome: Outcome) -> str:
        """Returns a failure in words."""
        row, kind, value = outcome
        words = {
            "raised": "raised {}",
            "late": "took more than {} seconds",
            "invalid": f"returned {{}}, which is not {self.wanted}",
            "died": "ended its process",
        }
        return f"row {row} {words[kind].format(value)}"


def outcomes_of(
    called: Called,
    calls: Sequence[Sequence[Any]],
    *,
    seconds: float,
    workers: int,
    mesh: core.Mesh | None = None,
    axis: core.Axes = None,
) -> list[Outcome]:
    """Returns the outcomes of all calls, in order. The ranks along `axis`, which make the same calls, divide them.

    Raises:
        ValueError: a number is out of range.
        NotImplementedError: this system has no fork.
    """
    if not 0 < seconds < math.inf or workers < 1:
        raise ValueError(f"{called.who}: seconds and workers must be positive and finite, got {seconds} and {workers}.")
    if not hasattr(os, "fork"):
        raise NotImplementedError(
            f"{called.who} calls a function in a fork, to be able to end it, and this system cannot fork. Call the"
            " function yourself, and for rewards pass rollout._replace(rewards=...)."
        )
    own = range(len(calls)) if mesh is None else range(mesh.axis_index(axis), len(calls), mesh.axis_size(axis))
    outcomes = list(_run_calls(called, calls, own, seconds, workers))
    return sorted(
        outcomes if mesh is None else _join_outcomes(called.who, outcomes, mesh, axis), key=lambda one: one[0]
    )


def count_kinds(outcomes: Sequence[Outcome]) -> dict[str, int]:
    """Returns the number of failures of each kind."""
    found = collections.Counter(kind for _, kind, _ in outcomes)
    return {kind: found[kind] for kind in FAILURES}


class _ForkWorker:
    """Fork that calls the function for some rows in turn."""

    def __init__(self, called: Called, calls: Sequence[Any], rows: collections.deque[int], seconds: float) -> None:
        self.rows = rows  # without an outcome yet, the first in progress
        self.pipe, theirs = Pipe(duplex=False)
        self.pid = _fork_worker(called, calls, list(rows), seconds, self.pipe, theirs)
        theirs.close()
        self.since = time.monotonic()

    def end(self) -> None:
        """Ends the fork, at any point of its work."""
        self.pipe.close()
        with contextlib.suppress(ProcessLookupError, PermissionError):  # it has not begun, or has ended
            os.killpg(self.pid, signal.SIGKILL)
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)


def _join_outcomes(who: str, outcomes: list[Outcome], mesh: core.Mesh, axis: core.Axes) -> list[Outcome]:
    """Returns the outcomes of all ranks along the axes."""
    if mesh.axis_size(axis) == 1:
        return outcomes
    comms = comms_of(mesh)
    with losing_no_peer(comms):
        comms.control.begin(f"rl.{who}")
        everywhere: list[Any] = comms.control.gather(outcomes)
    return [outcome for rank in mesh.along(mesh.axes(axis)) for outcome in everywhere[rank]]


def _run_calls(
    called: Called, calls: Sequence[Any], own: Sequence[int], seconds: float, workers: int
) -> Iterator[Outcome]:
    shares = [collections.deque(own[w::workers]) for w in range(min(workers, len(own)))]
    running = {worker.pipe: worker for share in shares for worker in [_ForkWorker(called, calls, share, seconds)]}
    try:
        while running:
            first = min(worker.since for worker in running.values()) + seconds
            ready = wait(list(running), max(first - time.monotonic(), 0))
            now = time.monotonic()
            late = [pipe for pipe, worker in running.items() if pipe not in ready and now >= worker.since + seconds]
            for pipe in [*ready, *late]:
                worker = running[pipe]  # pyright: ignore[reportArgumentType]  # a pipe of `running`
                kind, value = ("late", seconds) if pipe in late else _receive_outcome(worker)
                yield worker.rows.popleft(), kind, value
                worker.since = now
                if worker.rows and kind not in ("late", "died"):
                    continue
                del running[worker.pipe]
                worker.end()
                if worker.rows:
                    again = _ForkWorker(called, calls, worker.rows, seconds)
                    running[again.pipe] = again
    finally:
        for worker in running.values():
            worker.end()


def _receive_outcome(worker: _ForkWorker) -> tuple[str, Any]:
    try:
        return worker.pipe.recv()
    except (EOFError, OSError):
        return "died", None


def _fork_worker(
    called: Called,
    calls: Sequence[Any],
    rows: list[int],
    seconds: float,
    ours: Connection,
    theirs: Connection,
) -> int:
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    with warnings.catch_warnings():
        # Threads are lost in a fork. Their locks, too, may be held for ever, and then the call is late.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid:
        return pid
    try:
        ours.close()
        _serve_calls(called, calls, rows, theirs, seconds)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
    finally:
        os._exit(0)


def _serve_calls(called: Called, calls: Sequence[Any], rows: list[int], pipe: Connection, seconds: float) -> None:
    os.setpgid(0, 0)  # processes that the function starts end with it
    # No socket stays open in here: peers of a rank that dies are to see it at once.
    os.closerange(3, pipe.fileno())
    os.closerange(pipe.fileno() + 1, os.sysconf("SC_OPEN_MAX"))
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_DFL)
    torch.set_num_threads(1)  # those of OpenMP are lost
    for row in rows:
        signal.setitimer(signal.ITIMER_REAL, seconds + PATIENCE)
        pipe.send(_make_outcome(called, calls[row]))


def _make_outcome(called: Called, call: Any) -> tuple[str, Any]:
    try:
        value = called.function(*call)
    except BaseException as error:
        return "raised", f"{type(error).__name__}: {_describe_value(error, str)}"
    try:
        return "", called.accept(value)
    except Exception:
        return "invalid", _describe_value(value, repr)[:80]


def _describe_value(value: Any, form: Callable[[Any], str]) -> str:
    try:
        return form(value)
    except Exception as error:
        return f"a {type(value).__name__} whose text raises {type(error).__name__}"


class Scores(NamedTuple):
    """Rollout with rewards, and the failures.

    Attributes:
        rollout: rollout whose rewards are NaN where the function failed.
        counts: "raised", "late", "invalid" (NaN, infinite, or no number) and "died" (the process ended), of this rank's
            rows. `rollout_metrics` has their parts of all ranks' answers.
        first: first failure by row, with its error, empty if nothing failed.
    """

    rollout: Rollout
    counts: dict[str, int]
    first: str


@core.explains_keywords(**ADVANTAGES)
def score(
    reward: Callable[..., float],
    rollout: Rollout,
    given: Sequence[Any] | None = None,
    *,
    seconds: float = 10.0,
    workers: int = 1,
    mesh: core.Mesh | None = None,
    axis: core.Axes = None,
) -> Scores:
    """Calls a reward function for each answer.

    `group_advantages` leaves answers out that have no reward, and `kl_rewards` counts 0 for them. If no answer of this
    rank gets a reward, for example where the function takes other arguments, a warning has the counts and the first
    failure.

    Args:
        reward: function `reward(prompt, answer) -> float`, of lists of ids, and with `given` also of the row's entry.
            The function runs in a fork of this process: its changes of variables are lost, and it must not use a GPU.
        rollout: rollout of this rank.
        given: value of each row, such as a solution.
        seconds: limit of a call.
        workers: number of processes. At most `rows / workers` calls wait for each other.
        mesh: mesh of `axis`. All its ranks call then, and wait for each other no longer than its `agreement_timeout`.
        axis: axes whose ranks hold the same rows, such as "tp". The ranks divide the calls and have the same rewards,
            also if a call is late on a single rank.

    Raises:
        ValueError: `given` is not one value for each row, or a number is out of range.
        NotImplementedError: this system has no fork.

    Example:
        >>> from shardfn.rl import empty_rollout
        >>> rollout = empty_rollout(2, 8, 4)
        >>> found = score(lambda prompt, answer, weight: 1 / weight, rollout, [0, 2])
        >>> found.counts["raised"], found.first, found.rollout.rewards
        (1, 'row 0 raised ZeroDivisionError: division by zero', tensor([   nan, 0.5000]))
    """
    num = len(rollout.ids)
    if given is not None and len(given) != num:
        raise ValueError(f"score: {len(given)} values are given for {num} rows. Pass one for each.")
    calls = [(*rollout.tokens(row), *(() if given is None else (given[row],))) for row in range(num)]
    called = Called("score", reward, _check_finite, "a finite number")
    outcomes = outcomes_of(called, calls, seconds=seconds, workers=workers, mesh=mesh, axis=axis)
    rewards = [value if kind == "" else math.nan for _, kind, value in outcomes]
    failed = [FAILURES.index(kind) + 1 if kind else 0 for _, kind, _ in outcomes]
    counts = count_kinds(outcomes)
    first = next((called.text(one) for one in outcomes if one[1]), "")
    if num and all(failed):
        some = ", ".join(f"{kind} {count}" for kind, count in counts.items() if count)
        warnings.warn(
            f"score: the reward function must return a finite number, but it failed for all {num} answers ({some}), so"
            f" nothing is learnt from them. First failure: {first}. It is called as {_make_call(given)}.",
            stacklevel=2,
        )
    return Scores(
        rollout._replace(
            rewards=torch.tensor(rewards, dtype=rollout.rewards.dtype, device=rollout.rewards.device),
            failed=torch.tensor(failed, dtype=torch.int8, device=rollout.rewards.device),
        ),
        counts,
        first,
    )


def _make_call(given: Sequence[Any] | None) -> str:
    return "reward(prompt, answer), with lists of ids" + ("" if given is None else ", and the row's entry of given")


def _check_finite(value: Any) -> float:
    if not math.isfinite(value):  # refuses texts, which float() reads
        raise ValueError(value)
    return float(value)
