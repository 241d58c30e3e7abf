"""The activity of one rank during a step, as Chrome trace events: compute, waiting, and the transfers in flight.

`Recorder` wraps the methods of `Channel` and `Pending` in this process, so it sees the step's own transfers, captured
or eager. When a transfer completes is seen by a thread that looks every half millisecond. Open the file with Perfetto
or chrome://tracing: one process a rank; transfers that are in flight together lie in rows below one another.
"""

import functools
import threading
import time
from collections.abc import Callable
from typing import Any

from shardfn.collectives.transport import _channel
from shardfn.core import Pending

Event = dict[str, Any]
LANES = {"all_gather": "gather", "reduce_scatter": "reduce", "all_reduce": "reduce"}
LOOK = 5e-4


class Recorder:
    """Records the steps that run inside `recording`.

    Attributes:
        rank: becomes the trace's process number.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self._flights: list[Event] = []
        self._waits: list[tuple[float, float, str]] = []
        self._open: dict[int, tuple[Event, Any]] = {}

    def record(self, step: Callable[[], Any]) -> list[Event]:
        """Runs the step; returns its events, times in microseconds of the machine's clock."""
        originals = {name: getattr(_channel.Channel, name) for name in LANES}
        result = Pending.result
        ended = threading.Event()
        looker = threading.Thread(target=self._look, args=(ended,))
        try:
            for name, inner in originals.items():
                setattr(_channel.Channel, name, self._starting(name, inner))
            setattr(Pending, "result", self._waiting(result))  # noqa: B010
            looker.start()
            begin = time.perf_counter()
            step()
            end = time.perf_counter()
        finally:
            for name, inner in originals.items():
                setattr(_channel.Channel, name, inner)
            setattr(Pending, "result", result)  # noqa: B010
            ended.set()
            looker.join()
        return self._events(begin, end)

    def _starting(self, name: str, inner: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(inner)
        def start(channel: Any, tensor: Any, *args: Any, **kwargs: Any) -> Any:
            begin = time.perf_counter()
            pending = inner(channel, tensor, *args, **kwargs)
            # An all_gather is given the own block and receives the others, the rest is given the whole.
            there = channel.size - 1 if name == "all_gather" else (channel.size - 1) / channel.size
            flight = {"op": name, "begin": begin, "end": None}
            flight["bytes"] = int(tensor.numel() * tensor.element_size() * there)
            self._flights.append(flight)
            self._open[id(pending)] = (flight, pending)
            return pending

        return start

    def _waiting(self, inner: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(inner)
        def result(pending: Any) -> Any:
            begin = time.perf_counter()
            value = inner(pending)
            end = time.perf_counter()
            flight, _ = self._open.pop(id(pending), ({"op": "a transfer begun earlier", "end": end}, None))
            flight["end"] = flight["end"] or end
            self._waits.append((begin, end, flight["op"]))
            return value

        return result

    def _look(self, ended: threading.Event) -> None:
        while not ended.wait(LOOK):
            for flight, pending in list(self._open.values()):
                if flight["end"] is None and pending.done():
                    flight["end"] = time.perf_counter()

    def _events(self, begin: float, end: float) -> list[Event]:
        events = [self._span("compute", "step", begin, end, lane="step")]
        marks = [begin]
        for since, until, op in sorted(self._waits):
            events.append(self._span("wait", f"wait for {op}", since, until, lane="compute"))
            marks += [since, until]
        marks.append(end)
        for since, until in zip(marks[::2], marks[1::2], strict=True):
            events.append(self._span("compute", "compute", since, until, lane="compute"))
        for number, flight in enumerate(self._flights):
            events += self._flight(number, flight, flight["end"] or end)
        return events

    def _span(self, category: str, name: str, begin: float, end: float, *, lane: str) -> Event:
        times = {"ts": round(begin * 1e6, 1), "dur": round((end - begin) * 1e6, 1)}
        return {"ph": "X", "cat": category, "name": name, "pid": self.rank, "tid": lane, **times}

    def _flight(self, number: int, flight: Event, end: float) -> list[Event]:
        lane = LANES[flight["op"]]
        name = f"{flight['op']} {flight['bytes'] / 1e6:.2f} MB"
        both = {"cat": lane, "name": name, "pid": self.rank, "tid": lane, "id": f"{self.rank}.{number}"}
        start = {"ph": "b", "ts": round(flight["begin"] * 1e6, 1), "args": {"bytes": flight["bytes"]}, **both}
        return [start, {"ph": "e", "ts": round(end * 1e6, 1), **both}]


def trace(ranks: list[list[Event]], note: str) -> dict[str, Any]:
    """A Chrome trace of all ranks, which share one clock; it begins at 0."""
    zero = min(e["ts"] for events in ranks for e in events)
    events: list[Event] = []
    for rank, mine in enumerate(ranks):
        events.append({"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}})
        lanes = {"step": 1, "compute": 2, "gather": 3, "reduce": 4}
        events += [_named(rank, tid, lane) for lane, tid in lanes.items()]
        events += [{**e, "ts": round(e["ts"] - zero, 1), "tid": lanes[e["tid"]]} for e in mine]
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"note": note}}


def shares(events: list[Event]) -> dict[str, float]:
    """Seconds of one rank's step: all of it, waited, some transfer in flight, and of these while it computed."""
    step = next(e for e in events if e["name"] == "step")
    waits = [(e["ts"], e["ts"] + e["dur"]) for e in events if e["cat"] == "wait"]
    begins = {e["id"]: e["ts"] for e in events if e["ph"] == "b"}
    flights = _merged([(begins[e["id"]], e["ts"]) for e in events if e["ph"] == "e"])
    waited, flying = _length(waits), _length(flights)
    both = sum(max(0.0, min(b, d) - max(a, c)) for a, b in flights for c, d in waits)
    found = {"step": step["dur"], "waited": waited, "in flight": flying, "behind compute": flying - both}
    return {k: v / 1e6 for k, v in found.items()}


def _merged(spans: list[tuple[float, float]]) -> list[tuple[float, float]]:
    out: list[tuple[float, float]] = []
    for begin, end in sorted(spans):
        if out and begin <= out[-1][1]:
            out[-1] = (out[-1][0], max(out[-1][1], end))
        else:
            out.append((begin, end))
    return out


def _length(spans: list[tuple[float, float]]) -> float:
    return sum(end - begin for begin, end in spans)


def _named(rank: int, tid: int, lane: str) -> Event:
    return {"ph": "M", "name": "thread_name", "pid": rank, "tid": tid, "args": {"name": lane}}
