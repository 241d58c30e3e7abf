"""Log of an engine's decisions: the events and drawn tokens of each step, from which all plans follow, and the times.

A log is a file of JSON lines. The first line has the limits, each further line a step. `replay_log` runs the schedule
on the log alone, without a model, and compares a digest of all decisions after each step.
"""

import dataclasses
import json
import math
import os
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from ._events import Add, Cancel, Clock, Drain, Event, Stop, Weights
from ._grammar import Grammar
from ._limits import Limits
from ._options import ReasoningBudget
from ._plan import StepPlan
from ._requests import Request, Sampling
from ._schedule import Output, advance
from ._simulate import TimedRequest, digest_plan
from ._state import State, start

_KINDS = {kind.__name__: kind for kind in (Add, Cancel, Clock, Drain, Stop, Weights)}


class LoggedStep(NamedTuple):
    """A step of a log.

    Attributes:
        at: seconds from the first step's begin to the step's begin.
        seconds: time of the step.
        bucket: rows of the step with padding, or 0 for a step that computes nothing.
        pairs: pairs of a row and a token that it attends to, in a single layer without windows.
        plan: digest of the plan, as of `Simulation`.
        pause: seconds from the step's end to the next step's begin, where requests are in progress, and else 0.
    """

    at: float
    seconds: float
    bucket: int
    pairs: int
    plan: str
    pause: float = 0.0


class Replay(NamedTuple):
    """A log after its decisions were made again.

    Attributes:
        limits: sizes of the engine.
        steps: steps.
        trace: requests of the log, with their answers.
    """

    limits: Limits
    steps: list[LoggedStep]
    trace: list[TimedRequest]


def count_pairs(plan: StepPlan) -> int:
    """Returns the pairs of a row and a token that the row attends to, in a single layer without windows."""
    return sum(plan.positions[: plan.num_tokens]) + plan.num_tokens


class DecisionLog:
    """Writer of a log, for `Engine(decisions=)`, on the first rank only.

    Args:
        path: file. An earlier file is replaced.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._file, self._begin = open(path, "w", encoding="utf-8"), math.nan

    def begin(self, state: State) -> None:
        """Writes the first line.

        Raises:
            ValueError: the engine has a drafter. A log has no drafts.
        """
        if state.drafter is not None:
            raise ValueError(
                "a log of decisions must be of an engine without a drafter. Leave out drafter= or decisions=."
            )
        self._write({"limits": dataclasses.asdict(state.limits), "tokenizer": state.tokenizer.hex()})

    def record(
        self, events: Sequence[Event], drawn: Sequence[int], state: State, plan: StepPlan | None, began: float
    ) -> None:
        """Writes a step that began at a reading of `time.perf_counter`, and ends now."""
        if math.isnan(self._begin):
            self._begin = began
        line = {"at": began - self._begin, "seconds": time.perf_counter() - began, "chain": state.chain.hex()}
        line |= {"bucket": 0, "pairs": 0} if plan is None else {"bucket": plan.bucket, "pairs": count_pairs(plan)}
        line |= {"plan": digest_plan(plan), "drawn": list(drawn), "events": [_encode_event(x) for x in events]}
        self._write(line)

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    def _write(self, line: dict[str, Any]) -> None:
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()


def replay_log(path: str | os.PathLike[str]) -> Replay:
    """Returns a log after its decisions were made again by the schedule.

    Raises:
        ValueError: a decision differs, or a line is not a step. The message has the number of the step. A last line
            that was not completed is passed over.
    """
    lines = _read_lines(path)
    head = next(lines, None)
    if head is None or "limits" not in head:
        raise ValueError(f"{os.fspath(path)}: the first line of a log of decisions has the limits of an engine.")
    limits = Limits(**{name: _as_tuples(x) for name, x in head["limits"].items()})
    state, steps, busy = start(limits, bytes.fromhex(head["tokenizer"])), list[LoggedStep](), False
    requests: dict[str, tuple[float, Request]] = {}
    trace, answers = list[tuple[float, Request, list[int]]](), dict[str, list[int]]()
    for i, line in enumerate(lines):
        events = [_decode_event(x) for x in line["events"]]
        state, plan, outputs = advance(state, events, line["drawn"])
        if (plan is None) != (not line["bucket"]) or state.chain.hex() != line["chain"]:
            raise ValueError(
                f"{os.fspath(path)}: step {i} must have the decisions of the log, got others: plan {digest_plan(plan)}"
                f" in place of {line['plan']}. Replay the log by the version that wrote it."
            )
        if busy:
            before = steps[-1]
            steps[-1] = before._replace(pause=max(0.0, line["at"] - before.at - before.seconds))
        busy = not state.idle
        steps.append(LoggedStep(*(line[name] for name in LoggedStep._fields if name != "pause")))
        for event in events:
            if isinstance(event, Add):
                requests[event.name] = line["at"], event.request
                answers[event.name] = []
                trace.append((*requests[event.name], answers[event.name]))
        _add_tokens(outputs, requests, answers)
    return Replay(limits, steps, [TimedRequest(at, _cut(x, len(y)), tuple(y)) for at, x, y in trace if y])


def _cut(request: Request, num: int) -> Request:
    """Returns a request that ends after a number of tokens, however it ended."""
    plain = {"stop_tokens": (), "stop": (), "grammar": None, "min_tokens": 0, "max_tokens": num}
    return dataclasses.replace(request, sampling=dataclasses.replace(request.sampling, **plain), deadline=None)


def _add_tokens(outputs: Sequence[Output], requests: dict[str, Any], answers: dict[str, list[int]]) -> None:
    for out in outputs:
        if out.choice == 0 and out.token is not None and out.position >= len(requests[out.name][1].prompt):
            answers[out.name].append(out.token)


def _read_lines(path: str | os.PathLike[str]) -> Iterator[dict[str, Any]]:
    with open(path, encoding="utf-8") as file:
        for i, text in enumerate(file, 1):
            if not text.endswith("\n"):
                return  # a step that was being written
            try:
                line = json.loads(text)
            except ValueError as error:
                raise ValueError(f"{os.fspath(path)}: line {i} is not valid JSON: {error}.") from error
            if not isinstance(line, dict):
                raise ValueError(f"{os.fspath(path)}: line {i} must be an object, got a {type(line).__name__}.")
            yield line


def _encode_event(event: Event) -> dict[str, Any]:
    fields = {x.name: getattr(event, x.name) for x in dataclasses.fields(event)}
    if isinstance(event, Add):
        request = event.request
        fields["request"] = _changed_fields(request) | {"sampling": _changed_fields(request.sampling)}
    return {"kind": type(event).__name__, **fields}


def _changed_fields(value: Any) -> dict[str, Any]:
    """Returns the fields without a default value, and the changed fields."""
    out = {}
    for x in dataclasses.fields(value):
        found = getattr(value, x.name)
        if x.default is dataclasses.MISSING or found != x.default:
            out[x.name] = found.hex() if isinstance(found, bytes) else found
            out[x.name] = dataclasses.asdict(found) if isinstance(found, Grammar) else out[x.name]
    return out


def _decode_event(told: dict[str, Any]) -> Event:
    fields = dict(told)
    kind = _KINDS[fields.pop("kind")]
    if kind is Add:
        given = dict(fields["request"])
        sampling = {name: _as_tuples(x) for name, x in given["sampling"].items()}
        if "grammar" in sampling:
            sampling["grammar"] = Grammar(**sampling["grammar"])
        if "reasoning_budget" in sampling:
            sampling["reasoning_budget"] = ReasoningBudget(*sampling["reasoning_budget"])
        given |= {name: bytes.fromhex(given[name]) for name in ("adapter", "salt") if name in given}
        given |= {"prompt": tuple(given["prompt"]), "sampling": Sampling(**sampling)}
        fields["request"] = Request(**given)
    return kind(**fields)


def _as_tuples(value: Any) -> Any:
    """Returns a value with tuples for JSON's lists."""
    return tuple(map(_as_tuples, value)) if isinstance(value, list) else value
