"""Replicas of a model: groups of ranks, each with the whole model, which are started again when a rank ends."""

import asyncio
import contextlib
import functools
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

from ._errors import ApiError
from ._ipc import Message, Ready, StepReport
from ._metrics import Metrics
from ._request_tracker import RequestTracker
from ._settings import Settings

_PATIENCE, _LAST_STEPS = 1.0, 10.0  # seconds in which a process that has closed its sockets ends, serving or loading
_WAIT, _LONGEST_WAIT = 1.0, 30.0  # seconds before the first restart, each further wait being twice as long
_STEADY = 300.0  # seconds of service after which earlier ends do not count
_REFUSED = 2  # status of a rank that refuses the model, which no restart changes


class Workers(Protocol):
    """Ranks as a front sees them: `WorkerProcesses`, or stand-ins in tests."""

    async def start(self) -> None:
        """Starts all ranks."""

    def send(self, message: Message) -> None:
        """Sends a message to all ranks."""

    async def read(self, take: Mapping[type, Callable[[Any], None]]) -> None:
        """Passes on the messages of the first rank by their types, until the rank ends."""

    async def first_end(self) -> tuple[int, int]:
        """Returns the first rank that ends, and its status."""
        ...

    async def all_end(self, seconds: float) -> bool:
        """Returns whether all ranks end within some seconds."""
        ...

    async def end(self) -> None:
        """Ends all ranks."""


class ReplicaEnd(NamedTuple):
    """End of a replica.

    Attributes:
        replica: number of the replica.
        rank: first rank that has ended.
        status: status of the rank's process, negative for a signal.
        served: seconds from the readiness to the end, or None before the readiness.
    """

    replica: int
    rank: int
    status: int
    served: float | None

    @property
    def how(self) -> str:
        """Returns the status in words."""
        return f"by signal {-self.status}" if self.status < 0 else f"with status {self.status}"


def choose_wait(end: ReplicaEnd, ends: int, restarts: int) -> float | None:
    """Returns the seconds before a replica is started again, or None for the server's end.

    Args:
        end: end of the replica.
        ends: number of its ends, this one included, since it last served for five minutes.
        restarts: most restarts in a row.

    Example:
        >>> killed = ReplicaEnd(0, 0, -9, 10.0)
        >>> [choose_wait(killed, ends, 3) for ends in (1, 2, 3, 4)]
        [1.0, 2.0, 4.0, None]
        >>> choose_wait(ReplicaEnd(0, 0, 2, None), 1, 3)  # the model is refused
    """
    if ends > restarts or (end.served is None and end.status == _REFUSED):
        return None
    return min(_LONGEST_WAIT, _WAIT * 2 ** (ends - 1))


class ReplicaSet:
    """Starts, watches and restarts the replicas of a server. A replica is a group of ranks with a whole model.

    Args:
        settings: settings of the server.
        make_workers: function from the number of a replica to its ranks, not started yet.
        calls: calls in progress.
        metrics: metrics of the server.
        report: function that takes lines for the user.
    """

    def __init__(
        self,
        settings: Settings,
        make_workers: Callable[[int], Workers],
        calls: RequestTracker,
        metrics: Metrics,
        report: Callable[[str], None],
    ) -> None:
        self._settings, self._make_workers, self._calls = settings, make_workers, calls
        self._metrics, self._report = metrics, report
        self._running: dict[int, Workers] = {}
        self._tasks = list[asyncio.Future[None]]()
        self.ending = False

    async def run(self, begin: Callable[[int, Ready], str], loaded: asyncio.Future[Any]) -> ReplicaEnd:
        """Runs all replicas until a replica ends and is not restarted, and returns this end.

        While the server is shutting down, only the end of the last replica is returned.

        Args:
            begin: function that takes the readiness of a replica, and returns "" or the reason of a refusal.
            loaded: future before which no message of ranks is read.
        """
        over: asyncio.Future[ReplicaEnd] = asyncio.get_running_loop().create_future()

        async def run_one(replica: int) -> None:
            try:
                await self._run_replica(replica, begin, loaded, over)
            except Exception as error:
                if over.done():
                    raise
                over.set_exception(error)

        self._tasks = [asyncio.ensure_future(run_one(i)) for i in range(self._settings.replicas)]
        return await over

    async def all_end(self, seconds: float) -> None:
        """Waits for the ends of all ranks, no longer than some seconds."""
        await asyncio.gather(*(workers.all_end(seconds) for workers in list(self._running.values())))

    async def close(self) -> None:
        """Ends all ranks."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        # A task that was cancelled while it ended its ranks has left them here.
        await asyncio.gather(*(workers.end() for workers in self._running.values()))

    def describe(self, end: ReplicaEnd) -> str:
        """Returns an end in words."""
        of = f"replica {end.replica}" if self._settings.replicas > 1 else "the engine"
        return f"Rank {end.rank} of {of} has ended, {end.how}"

    async def _run_replica(
        self,
        replica: int,
        begin: Callable[[int, Ready], str],
        loaded: asyncio.Future[Any],
        over: asyncio.Future[ReplicaEnd],
    ) -> None:
        """Runs a replica, with its restarts."""
        ends, wait = 0, 0.0
        while True:
            workers = self._running[replica] = self._make_workers(replica)
            try:
                await workers.start()
                await asyncio.shield(loaded)
                end = await self._watch(replica, workers, begin)
                ends = 1 if end.served is not None and end.served >= _STEADY else ends + 1
                wait = None if self.ending else choose_wait(end, ends, self._settings.restarts)
                if replica >= self._settings.replicas - self._settings.joined and not self.ending:
                    wait = 0.0  # another machine may join at any time
                if wait is not None or (self.ending and len(self._running) > 1):
                    text = f"{self.describe(end)}; this request was on it, and is lost. Send it again."
                    self._calls.lose(replica, ApiError(503, text, code="engine_dead"))
                elif not over.done():
                    over.set_result(end)
            finally:
                await workers.end()
                del self._running[replica]
            if wait is None:
                return
            text = f"is started again in {wait:g} s, {ends} of {self._settings.restarts} times in a row"
            text = text if wait else "may join again"
            self._report(f"shardfn serve: error: {self.describe(end)}; it {text}")
            await asyncio.sleep(wait)
            self._metrics.add("shardfn:replica_restarts", 1, str(replica))

    async def _watch(self, replica: int, workers: Workers, begin: Callable[[int, Ready], str]) -> ReplicaEnd:
        """Passes on a replica's messages until a rank ends."""
        ready, refusing = list[float](), list[asyncio.Future[None]]()

        def take_ready(message: Ready) -> None:
            if wrong := begin(replica, message):
                self._report(f"shardfn serve: error: replica {replica} is refused: {wrong}")
                refusing.append(asyncio.ensure_future(workers.end()))
                return
            self._calls.begin(replica, workers.send, message.limits, message.graphs_left)
            ready.append(time.monotonic())

        report = functools.partial(self._calls.report, replica=replica)
        reading = asyncio.ensure_future(workers.read({StepReport: report, Ready: take_ready}))
        ended = asyncio.ensure_future(workers.first_end())
        try:
            await asyncio.wait({reading, ended}, return_when=asyncio.FIRST_COMPLETED)
            if reading.done() and (error := reading.exception()) is not None:
                self._report(f"shardfn serve: error: the front has failed: {type(error).__name__}: {error}")
            # A process closes its sockets before its status is known.
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(asyncio.shield(ended), _PATIENCE if ready else _LAST_STEPS)
            rank, status = ended.result() if ended.done() else (0, 1)
            return ReplicaEnd(replica, rank, status, time.monotonic() - ready[0] if ready else None)
        finally:
            reading.cancel()
            ended.cancel()
