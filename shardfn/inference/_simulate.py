"""Simulation of an engine: the engine's own schedule, with made-up tokens and a clock of estimated times.

`advance` decides, as in an engine, so that the plans are those of an engine that takes the same requests at the same
times. Only the times of steps are estimates.
"""

import dataclasses
import hashlib
import itertools
import math
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from ._events import Add, Event, Stop
from ._limits import Limits
from ._plan import StepPlan
from ._requests import Request
from ._results import CacheStats
from ._schedule import Output, advance
from ._state import State, start

StepSeconds = Callable[[StepPlan | None], float]  # seconds of a step. None is a step that computes nothing.


class TimedRequest(NamedTuple):
    """A request of a trace.

    Attributes:
        seconds: seconds after the beginning.
        request: request. Each choice ends at the length of the answer.
        answer: tokens of the answer. Made-up tokens do where no later prompt has the answer.
    """

    seconds: float
    request: Request
    answer: tuple[int, ...]


class SimulatedLatency(NamedTuple):
    """Times of a request, in seconds.

    Attributes:
        first: time to the first token.
        gaps: times between tokens.
        whole: time to the last token.
    """

    first: float
    gaps: tuple[float, ...]
    whole: float


@dataclasses.dataclass(frozen=True)
class Simulation:
    """Result of a simulation.

    Attributes:
        latencies: latency of each request that has ended, in the order of the ends.
        plans: digest of each step's plan, empty for a step that computes nothing.
        seconds: time from the beginning to the end of the last step.
        cache: prefix hits and preemptions.
        rows: rows of all steps without padding, and with padding.
        most_running: most sequences with blocks at a time.
    """

    latencies: tuple[SimulatedLatency, ...]
    plans: tuple[str, ...]
    seconds: float
    cache: CacheStats
    rows: tuple[int, int]
    most_running: int


def digest_plan(plan: StepPlan | None) -> str:
    """Returns a digest of the decisions in a plan, empty for no plan: tokens, positions, blocks and the layout."""
    if plan is None:
        return ""
    made = hashlib.blake2b(f"{plan.bucket} {plan.num_tokens} {plan.layout}".encode(), digest_size=8)
    for a in plan.arrays():
        made.update(a)
    return made.hexdigest()


class SimulatedEngine:
    """Engine with estimated times of steps, and given answers in place of drawn tokens.

    Args:
        limits: sizes of the engine.
        seconds_of: function from a step's plan to the time of the step.

    Attributes:
        now: time of the next step's begin.
        plans: as of `Simulation`.

    Example:
        >>> from shardfn.inference import Limits, Request, Sampling
        >>> limits = Limits(vocab=100, context=8, blocks=5, block=4, buckets=(4, 8), running=2)
        >>> engine = SimulatedEngine(limits, lambda plan: 0.5)
        >>> name = engine.add(TimedRequest(1.0, Request((7, 8, 9), Sampling(max_tokens=2)), (50, 51)))
        >>> engine.run()
        >>> engine.result().latencies
        (SimulatedLatency(first=1.0, gaps=(0.5,), whole=1.5),)
    """

    def __init__(self, limits: Limits, seconds_of: StepSeconds) -> None:
        self.now, self.plans = 0.0, list[str]()
        self._state, self._seconds_of = start(limits), seconds_of
        self._line = deque[tuple[str, TimedRequest]]()  # requests that no step has taken
        self._answers: dict[str, TimedRequest] = {}
        self._times: dict[str, list[float]] = {}
        self._latencies = list[SimulatedLatency]()
        self._drawn = list[int]()
        self._added = self._rows = self._run_rows = self._most = 0

    @property
    def requests(self) -> dict[str, TimedRequest]:
        """Returns the requests in progress by name."""
        return dict(self._answers)

    def has_begun(self, name: str) -> bool:
        """Returns whether a request in progress has a token."""
        return bool(self._times.get(name))

    @property
    def idle(self) -> bool:
        """Returns whether no request is in progress."""
        return self._state.idle and not self._line

    def add(self, timed: TimedRequest) -> str:
        """Puts a request in line, not earlier than the requests before, and returns its name."""
        if self.idle:
            self.now = max(self.now, timed.seconds)
        name = str(self._added)
        self._added += 1
        self._line.append((name, timed))
        self._answers[name], self._times[name] = timed, []
        return name

    def run(self, until: float = math.inf) -> None:
        """Runs the steps that begin before a time."""
        while not self.idle and self.now < until:
            self._run_step()

    def result(self) -> Simulation:
        """Returns the figures so far."""
        rows = self._rows, self._run_rows
        return Simulation(
            tuple(self._latencies), tuple(self.plans), self.now, self._state.cache_stats, rows, self._most
        )

    def _run_step(self) -> None:
        state, events = self._state, list[Event]()
        while self._line and self._line[0][1].seconds <= self.now:
            name, timed = self._line.popleft()
            events.append(Add(state.number + len(events), name, timed.request))
        for name, choice, place in self._find_ends(state):
            events.append(Stop(state.number + len(events), name, choice, place))
        self._state, plan, outputs = advance(state, events, self._drawn)
        self.plans.append(digest_plan(plan))
        self.now += self._seconds_of(plan)
        self._drawn = [] if plan is None else self._draw_tokens()
        self._rows += 0 if plan is None else plan.num_tokens
        self._run_rows += 0 if plan is None else plan.bucket
        self._most = max(self._most, len(self._state.running))
        self._take_outputs(outputs)

    def _find_ends(self, state: State) -> list[tuple[str, int, int]]:
        """Returns the last tokens of answers in the plan in flight that a limit of tokens does not end."""
        ends = []
        for chunk, one, first in state.rows_in_flight():
            last = one.prompt + len(self._answers[one.name].answer) - 1
            for _, p, token in chunk.read_rows(self._drawn, first):
                how = one.request.sampling
                known = token in how.stop_tokens or len(self._answers[one.name].answer) == how.max_tokens
                if p + 1 == last and last >= len(one.tokens) and not known:
                    ends.append((one.name, one.choice, last))
        return ends

    def _draw_tokens(self) -> list[int]:
        """Returns the token of each wanted row of the plan in flight."""
        drawn = array("i")
        for chunk, one, _ in self._state.rows_in_flight():
            answer = self._answers[one.name].answer
            for p in chunk.positions:
                at = p + 1 - one.prompt
                drawn.append(answer[at] if 0 <= at < len(answer) else 0)
        return drawn.tolist()

    def _take_outputs(self, outputs: Sequence[Output]) -> None:
        for out in outputs:
            timed = self._answers[out.name]
            if out.choice == 0 and out.token is not None and out.position >= len(timed.request.prompt):
                self._times[out.name].append(self.now - timed.seconds)
            if out.finish_reason is not None and out.name not in self._state.names:
                times = self._times.pop(out.name)
                del self._answers[out.name]
                if times:
                    gaps = tuple(b - a for a, b in itertools.pairwise(times))
                    self._latencies.append(SimulatedLatency(times[0], gaps, times[-1]))


def simulate(limits: Limits, trace: Sequence[TimedRequest], seconds_of: StepSeconds) -> Simulation:
    """Returns the run of a trace by a single engine.

    Args:
        limits: sizes of the engine.
        trace: requests, in the order of their times.
        seconds_of: function from a step's plan to the time of the step. With the times of a real engine, the plans are
            those of the real engine.

    Raises:
        ValueError: times run backwards.
    """
    check_trace(trace)
    engine = SimulatedEngine(limits, seconds_of)
    for timed in trace:
        engine.run(timed.seconds)
        engine.add(timed)
    engine.run()
    return engine.result()


def check_trace(trace: Sequence[TimedRequest]) -> None:
    """Refuses a trace with times that run backwards.

    Raises:
        ValueError: names the first such request.
    """
    for i, (before, timed) in enumerate(itertools.pairwise(trace), 1):
        if timed.seconds < before.seconds:
            raise ValueError(
                f"times of a trace must not run backwards, got {timed.seconds:g} s for request {i} after"
                f" {before.seconds:g} s. Sort the trace by time."
            )
