"""Rewards by a function in Python, which may fail: each call has a time limit, and failures are counted.

Calls run in forks of this process, which are ended if they take too long. So a function needs no file of its own, and
nothing that it does, a crash among it, reaches the run.
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

from shardfn.core import Axes, Mesh
from shardfn.engine import comms_of, losing_no_peer

from ._rollout import Rollout

Outcome = tuple[int, str, Any]  # row, kind, the reward or the error's text
# Seconds after its limit at which a call ends by itself, should the process that ends it have died.
PATIENCE = 10.0
KINDS = ("raised", "late", "invalid", "died")


class Scores(NamedTuple):
    """A rollout with rewards, and the failures.

    Attributes:
        rollout: its rewards are NaN where the function failed.
        counts: "raised", "late", "invalid" (NaN, infinite, or no number) and "died" (its process ended), of this rank's
            rows.
        first: the first failure by row, with its error; empty if nothing failed.
    """

    rollout: Rollout
    counts: dict[str, int]
    first: str


def score(
    reward: Callable[..., float],
    rollout: Rollout,
    given: Sequence[Any] | None = None,
    *,
    seconds: float = 10.0,
    workers: int = 1,
    mesh: Mesh | None = None,
    axis: Axes = None,
) -> Scores:
    """Calls a reward function for each answer.

    `group_advantages` leaves answers out that have no reward, and `kl_rewards` counts 0 for them.

    Args:
        reward: `reward(prompt, answer) -> float`, of lists of ids; with `given` also that row's entry. It runs in a
            fork of this process: changes that it makes to variables are lost, and it must not use a GPU.
        rollout: of this rank.
        given: a value for each row, such as a solution.
        seconds: the limit of a call.
        workers: processes; at most `rows / workers` calls wait for each other.
        mesh: where `axis` is. All its ranks call then, and wait for each other no longer than its `agreement_timeout`.
        axis: the axes whose ranks hold the same rows, such as "tp". They divide the calls and have the same rewards,
            also if a call is late on one of them.

    Raises:
        ValueError: `given` is not one value for each row, or a number is out of range.
        NotImplementedError: this system has no fork.

    Example:
        >>> from shardfn.rl import empty_rollout
        >>> found = score(lambda prompt, answer: 1 / len(answer), empty_rollout(2, 8, 4))
        >>> found.counts["raised"], found.first
        (2, 'row 0 raised ZeroDivisionError: division by zero')
    """
    num = len(rollout.ids)
    _check(num, given, seconds, workers)
    calls = [(*rollout.tokens(row), *(() if given is None else (given[row],))) for row in range(num)]
    own = range(num) if mesh is None else range(mesh.axis_index(axis), num, mesh.axis_size(axis))
    outcomes = list(_run(reward, calls, own, seconds, workers))
    outcomes = sorted(outcomes if mesh is None else _joined(outcomes, mesh, axis))
    rewards = [value if kind == "" else math.nan for _, kind, value in outcomes]
    found = collections.Counter(kind for _, kind, _ in outcomes)
    first = next((f"row {row} {_TEXTS[kind].format(value)}" for row, kind, value in outcomes if kind), "")
    return Scores(
        rollout._replace(rewards=torch.tensor(rewards, dtype=rollout.rewards.dtype, device=rollout.rewards.device)),
        {kind: found[kind] for kind in KINDS},
        first,
    )


_TEXTS = {
    "raised": "raised {}",
    "late": "took more than {} seconds",
    "invalid": "returned {}, which is not a finite number",
    "died": "ended its process",
}


def _check(num: int, given: Sequence[Any] | None, seconds: float, workers: int) -> None:
    if given is not None and len(given) != num:
        raise ValueError(f"score: {len(given)} values are given for {num} rows; pass one for each.")
    if not 0 < seconds < math.inf or workers < 1:
        raise ValueError(f"score: seconds is {seconds} and workers is {workers}; both must be positive and finite.")
    if not hasattr(os, "fork"):
        raise NotImplementedError(
            "score calls a function in a fork, to be able to end it, and this system cannot fork; compute the rewards"
            " yourself, and pass rollout._replace(rewards=...)."
        )


class _Worker:
    """A fork that calls the function for some rows in turn."""

    def __init__(
        self, reward: Callable[..., float], calls: Sequence[Any], rows: collections.deque[int], seconds: float
    ) -> None:
        self.rows = rows  # without an outcome yet; the first one is being computed
        self.pipe, theirs = Pipe(duplex=False)
        self.pid = _fork(reward, calls, list(rows), seconds, self.pipe, theirs)
        theirs.close()
        self.since = time.monotonic()

    def end(self) -> None:
        """Ends the fork, wherever it is."""
        self.pipe.close()
        with contextlib.suppress(ProcessLookupError, PermissionError):  # it has not begun, or has ended
            os.killpg(self.pid, signal.SIGKILL)
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)


def _joined(outcomes: list[Outcome], mesh: Mesh, axis: Axes) -> list[Outcome]:
    """The outcomes of all ranks along the axes."""
    if mesh.axis_size(axis) == 1:
        return outcomes
    comms = comms_of(mesh)
    with losing_no_peer(comms):
        comms.control.begin("rl.score")
        everywhere: list[Any] = comms.control.gather(outcomes)
    return [outcome for rank in mesh.along(mesh.axes(axis)) for outcome in everywhere[rank]]


def _run(
    reward: Callable[..., float], calls: Sequence[Any], own: Sequence[int], seconds: float, workers: int
) -> Iterator[Outcome]:
    shares = [collections.deque(own[w::workers]) for w in range(min(workers, len(own)))]
    running = {worker.pipe: worker for share in shares for worker in [_Worker(reward, calls, share, seconds)]}
    try:
        while running:
            first = min(worker.since for worker in running.values()) + seconds
            ready = wait(list(running), max(first - time.monotonic(), 0))
            now = time.monotonic()
            late = [pipe for pipe, worker in running.items() if pipe not in ready and now >= worker.since + seconds]
            for pipe in [*ready, *late]:
                worker = running[pipe]  # pyright: ignore[reportArgumentType]  # a pipe of `running`
                kind, value = ("late", seconds) if pipe in late else _received(worker)
                yield worker.rows.popleft(), kind, value
                worker.since = now
                if worker.rows and kind not in ("late", "died"):
                    continue
                del running[worker.pipe]
                worker.end()
                if worker.rows:
                    again = _Worker(reward, calls, worker.rows, seconds)
                    running[again.pipe] = again
    finally:
        for worker in running.values():
            worker.end()


def _received(worker: _Worker) -> tuple[str, Any]:
    try:
        return worker.pipe.recv()
    except (EOFError, OSError):
        return "died", None


def _fork(
    reward: Callable[..., float],
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
        _serve(reward, calls, rows, theirs, seconds)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
    finally:
        os._exit(0)


def _serve(
    reward: Callable[..., float], calls: Sequence[Any], rows: list[int], pipe: Connection, seconds: float
) -> None:
    os.setpgid(0, 0)  # processes that the function starts end with it
    # No socket stays open in here: peers of a rank that dies are to see it at once.
    os.closerange(3, pipe.fileno())
    os.closerange(pipe.fileno() + 1, os.sysconf("SC_OPEN_MAX"))
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_DFL)
    torch.set_num_threads(1)  # those of OpenMP are lost
    for row in rows:
        signal.setitimer(signal.ITIMER_REAL, seconds + PATIENCE)
        pipe.send(_outcome(reward, calls[row]))


def _outcome(reward: Callable[..., float], call: Any) -> tuple[str, Any]:
    try:
        value = reward(*call)
    except BaseException as error:
        return "raised", f"{type(error).__name__}: {error}"
    try:
        number = float(value)
    except (TypeError, ValueError):
        return "invalid", repr(value)[:80]
    return ("", number) if math.isfinite(number) else ("invalid", repr(value)[:80])
