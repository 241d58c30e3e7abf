"""Covers the calls of `serve`: counters of guessing and of the cache, parts of a time, and captures in idle time."""

from collections.abc import Callable

import pytest

pytest.importorskip("starlette")

from shardfn.inference import CacheStats, EngineStats, Limits, Request, Sampling, SpeculationStats, Token
from shardfn.serve._ipc import Capture, Message, StepReport
from shardfn.serve._metrics import Metrics
from shardfn.serve._request_tracker import RequestTracker

VALUES = {
    "spec_decode_num_drafts": 3,
    "spec_decode_num_draft_tokens": 9,
    "spec_decode_num_accepted_tokens": 5,
    "prefix_cache_queries": 40,
    "prefix_cache_hits": 32,
    "num_preemptions": 1,
}


def tracker(send: Callable[[Message], None], metrics: Metrics, max_waiting: int) -> RequestTracker:
    """A tracker with a replica that is ready."""
    made = RequestTracker(1, metrics, max_waiting)
    made.begin(0, send, Limits(vocab=8, context=64, blocks=9))
    return made


def test_counts_of_the_engine_are_on_the_page() -> None:
    metrics = Metrics("m")
    calls = tracker(lambda event: None, metrics, 10)
    last = SpeculationStats(3, 9, 5), CacheStats(40, 32, 1)
    for so_far in ((SpeculationStats(), CacheStats()), (SpeculationStats(2, 6, 3), CacheStats(8, 0, 0)), last, last):
        calls.report(StepReport([], EngineStats({}, 0.0, *so_far), 0, {}, {}))
    lines = metrics.text({}).splitlines()
    for name, value in VALUES.items():
        assert f'vllm:{name}_total{{model_name="m",replica="0"}} {value}' in lines


def times(metrics: Metrics) -> dict[str, tuple[float, float]]:
    """The number of requests with each part of a request's time, and its sum in seconds."""
    values = dict(line.rsplit(" ", 1) for line in metrics.text({}).splitlines() if not line.startswith("#"))
    parts = ("queue_time", "prefill_time", "decode_time", "inference_time")
    names = {part: f"vllm:request_{part}_seconds" for part in parts} | {"all": "vllm:e2e_request_latency_seconds"}
    return {
        part: (float(values[f'{name}_count{{model_name="m"}}']), float(values[f'{name}_sum{{model_name="m"}}']))
        for part, name in names.items()
    }


def test_the_parts_of_a_requests_time_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    metrics = Metrics("m")
    calls = tracker(lambda event: None, metrics, 100)

    def report(at: float, tokens: list[Token], begun: list[str]) -> None:
        clock[0] = at
        calls.report(StepReport(tokens, EngineStats({}), 0, {}, {}, begun))

    def token(name: str, position: int, finish: str | None = None) -> Token:
        return Token(name, 0, position, 5, -1.0, 0, finish)

    calls.open([Request((1, 2), Sampling(max_tokens=3))])  # at 100, of an idle engine
    clock[0] = 101.0
    calls.open([Request((1, 2), Sampling(max_tokens=1))])
    report(103.0, [], ["0.0"])  # its step began at 100
    report(104.0, [token("0.0", 2)], [])
    report(108.0, [token("0.0", 3)], ["1.0"])  # its step began with the report at 104
    report(109.0, [token("0.0", 4, "length"), token("1.0", 2, "length")], ["0.0"])
    assert times(metrics) == {
        "queue_time": (2, 0.0 + 3.0),
        "prefill_time": (2, 4.0 + 5.0),
        "decode_time": (2, 5.0 + 0.0),
        "inference_time": (2, 9.0 + 5.0),
        "all": (2, 9.0 + 8.0),
    }


def test_a_request_that_never_ran_has_no_parts() -> None:
    metrics = Metrics("m")
    calls = tracker(lambda event: None, metrics, 100)
    calls.open([Request((1, 2), Sampling())])
    calls.report(StepReport([Token("0.0", 0, 0, None, None, 0, "refused")], EngineStats({}), 0, {}, {}))
    assert [num for num, _ in times(metrics).values()] == [0, 0, 0, 0, 1]


def test_an_idle_engine_captures_graphs_one_by_one_until_a_drain() -> None:
    sent = list[Message]()
    calls = tracker(sent.append, Metrics("m"), 100)

    def report(graphs_left: int, tokens: list[Token], taken: int | None = None) -> list[Message]:
        taken = len(sent) if taken is None else taken
        before = len(sent)
        calls.report(StepReport(tokens, EngineStats({}), taken, {}, {}, graphs_left=graphs_left))
        return sent[before:]

    calls.capture_next(0, 3)
    assert sent == [Capture(0)]
    assert report(3, [], taken=0) == []  # the event is not taken yet
    assert report(2, []) == [Capture(1)]
    calls.open([Request((1, 2), Sampling(max_tokens=1))])
    assert report(1, []) == []
    assert report(1, [Token("0.0", 0, 2, 5, -1.0, 0, "length")]) == [Capture(3)]
    assert report(0, []) == []
    calls.drain()
    assert report(1, []) == []
