"""Writes a timeline as a Chrome trace, for chrome://tracing or https://ui.perfetto.dev."""

from collections.abc import Sequence
from typing import Any

from ._cost import Estimate, Event


def chrome_trace(events: Estimate | Sequence[Event], *, name: str = "step") -> dict[str, Any]:
    """Returns the events in Chrome's trace format.

    A lane for compute and waiting, and a lane for the transfers along each axes.

    Args:
        events: an estimate, or events that were measured.
        name: name of the process in the trace.

    Returns:
        A dict to be written with `json.dump`. Times are in microseconds.

    Example:
        >>> trace = chrome_trace([Event("mm", "compute", 0.0, 1e-3), Event("gather", "dp", 0.0, 2e-3)])
        >>> [(e["name"], e["tid"], e["dur"]) for e in trace["traceEvents"] if e["ph"] == "X"]
        [('mm', 0, 1000.0), ('gather', 1, 2000.0)]

    References:
        Google, Trace Event Format, 2016,
        https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
    """
    bars = list(events.events if isinstance(events, Estimate) else events)
    names = ["compute", *dict.fromkeys(e.lane for e in bars if e.lane not in _FIRST_LANE)]
    lanes = {lane: i for i, lane in enumerate(names)} | dict.fromkeys(_FIRST_LANE, 0)
    head = [_label_lane("process_name", 0, name)] + [
        _label_lane("thread_name", i, _lane_title(n)) for i, n in enumerate(names)
    ]
    return {"traceEvents": [*head, *(_event_bar(e, lanes[e.lane]) for e in bars)], "displayTimeUnit": "ms"}


_FIRST_LANE = ("compute", "wait")


def _lane_title(lane: str) -> str:
    return lane if lane == "compute" else f"transfers over {lane}"


def _label_lane(kind: str, lane: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": 0, "tid": lane, "args": {"name": name}}


def _event_bar(event: Event, lane: int) -> dict[str, Any]:
    shown = {k: v for k, v in (("where", event.where), ("detail", event.detail)) if v}
    name = f"wait: {event.name}" if event.lane == "wait" else event.name
    times = {"ts": round(event.start * 1e6, 3), "dur": round(event.seconds * 1e6, 3)}
    return {"ph": "X", "name": name, "cat": event.lane, "pid": 0, "tid": lane, **times, "args": shown}
