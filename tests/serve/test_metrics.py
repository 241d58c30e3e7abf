"""Covers the spans of requests for OpenTelemetry, as its exporter in memory has them."""

import json
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("opentelemetry.sdk")

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from tests.serve.server import NAME, Running

BODY = {"model": NAME, "prompt": "abc", "max_tokens": 5, "ignore_eos": True, "temperature": 0.5, "n": 2}


@pytest.fixture
def spans() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def traced(start: Callable[..., Running], spans: InMemorySpanExporter) -> Running:
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(spans))
    return start(provider=provider)


def wait_spans(server: Running, spans: InMemorySpanExporter, num: int) -> Any:
    server.wait_for(lambda: len(spans.get_finished_spans()) >= num)
    assert len(spans.get_finished_spans()) == num
    return spans.get_finished_spans()


def test_a_request_is_a_span_below_that_of_its_client(traced: Running, spans: InMemorySpanExporter) -> None:
    parent = {"traceparent": f"00-{'ab' * 16}-{'cd' * 8}-01", "x-request-id": "mine"}
    assert traced.send("/v1/completions", BODY, parent).status == 200
    assert traced.send("/v1/embeddings", {"model": NAME, "input": ["ab", "c"]}).status == 200
    assert traced.get("/v1/models").status == 200
    one, other = wait_spans(traced, spans, 2)
    assert (one.name, one.kind, one.status.status_code) == ("llm_request", SpanKind.SERVER, StatusCode.UNSET)
    assert (one.context.trace_id, one.parent.span_id) == (int("ab" * 16, 16), int("cd" * 8, 16))
    found = dict(one.attributes)
    times = {name: found.pop(f"gen_ai.latency.{name}") for name in TIMES}
    assert found == {
        "gen_ai.response.model": NAME,
        "gen_ai.request.id": "mine",
        "gen_ai.request.max_tokens": 5,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 1.0,
        "gen_ai.request.n": 2,
        "gen_ai.usage.num_sequences": 1,
        "gen_ai.usage.prompt_tokens": 3,
        "gen_ai.usage.completion_tokens": 10,
    }
    queue, prefill, decode = (times[name] for name in TIMES[2:5])
    assert queue + prefill == pytest.approx(times["time_to_first_token"])
    assert queue + prefill + decode == pytest.approx(times["e2e"])
    assert one.end_time - one.start_time == pytest.approx(times["e2e"] * 1e9, rel=1e-3)
    assert other.parent is None and other.attributes["gen_ai.usage.completion_tokens"] == 0
    assert other.attributes["gen_ai.usage.num_sequences"] == 2 and "gen_ai.request.n" not in other.attributes


TIMES = ("e2e", "time_to_first_token", "time_in_queue", "time_in_model_prefill", "time_in_model_decode")
TIMES += ("time_in_model_inference",)


def test_a_client_that_leaves_is_an_error(traced: Running, spans: InMemorySpanExporter) -> None:
    traced.ranks.slow = 0.02
    stream = traced.connect()
    body = json.dumps({**BODY, "max_tokens": 300, "stream": True})
    stream.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
    stream.getresponse().readline()
    stream.close()
    [one] = wait_spans(traced, spans, 1)
    assert one.status.status_code == StatusCode.ERROR and one.status.description == "the client has left"
