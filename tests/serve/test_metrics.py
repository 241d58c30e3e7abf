"""Covers the spans of requests for OpenTelemetry, as its exporter in memory has them, and a collector over HTTP."""

import gzip
import http.server
import json
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("opentelemetry.sdk")

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from shardfn.serve._metrics import make_trace_provider
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


class Collector:
    """A receiver of OTLP over HTTP, which decodes each message by OpenTelemetry's own protobuf types."""

    def __init__(self) -> None:
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        self.services, self.spans = set[str](), list[Any]()

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(handler) -> None:
                data = handler.rfile.read(int(handler.headers["Content-Length"]))
                data = gzip.decompress(data) if handler.headers.get("Content-Encoding") == "gzip" else data
                assert handler.headers["Content-Type"] == "application/x-protobuf" and handler.path == "/v1/traces"
                for resource in ExportTraceServiceRequest.FromString(data).resource_spans:
                    self.services |= {
                        x.value.string_value for x in resource.resource.attributes if x.key == "service.name"
                    }
                    self.spans += [span for scope in resource.scope_spans for span in scope.spans]
                handler.send_response(200)
                handler.end_headers()

            def log_message(handler, format: str, *args: Any) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1/traces"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def collector() -> Iterator[Collector]:
    for name in ("opentelemetry.exporter.otlp.proto.http", "opentelemetry.proto"):
        pytest.importorskip(name)
    made = Collector()
    yield made
    made.close()


@pytest.mark.nightly
def test_spans_of_requests_arrive_at_a_collector(start: Callable[..., Running], collector: Collector) -> None:
    provider = make_trace_provider(collector.url)
    server = start(provider=provider)
    parent = {"traceparent": f"00-{'ab' * 16}-{'cd' * 8}-01"}
    for i in range(20):
        assert server.send("/v1/completions", BODY, parent if i % 2 else None).status == 200
    assert server.close() == 0
    provider.shutdown()  # as `serve` does: spans that wait for their message are sent
    assert collector.services == {"shardfn"} and [x.name for x in collector.spans] == ["llm_request"] * 20
    below = [x for x in collector.spans if x.parent_span_id]
    assert {(x.trace_id.hex(), x.parent_span_id.hex()) for x in below} == {("ab" * 16, "cd" * 8)} and len(below) == 10
    assert len({x.span_id for x in collector.spans}) == 20
    found = {x.key: x.value for x in below[0].attributes}
    assert found["gen_ai.usage.completion_tokens"].int_value == 10
    assert found["gen_ai.latency.e2e"].double_value == pytest.approx(
        (below[0].end_time_unix_nano - below[0].start_time_unix_nano) / 1e9, rel=1e-3
    )


@pytest.mark.nightly
def test_spans_of_steps_arrive_at_a_collector(collector: Collector) -> None:
    import shardfn as sf

    step = sf.sharded_step(lambda params, batch: (batch @ params["w"]).square().mean(), sf.optim.adamw(0.1))
    state, provider = step.init({"w": torch.ones(4, 3)}), make_trace_provider(collector.url)
    tracer = provider.get_tracer("training")
    with tracer.start_as_current_span("epoch"), sf.trace_steps(tracer):
        for _ in range(3):
            state, _ = step(state, torch.ones(2, 4))
    provider.shutdown()
    by_name = {x.name: x for x in collector.spans}
    names = {x.span_id: x.name for x in collector.spans}
    steps = [f"shardfn.step {i}" for i in range(3)]
    assert {by_name[name].parent_span_id for name in steps} == {by_name["epoch"].span_id}
    parts = {(names[x.parent_span_id], x.name) for x in collector.spans if x.parent_span_id}
    assert {(one, f"shardfn.{part}") for one in steps for part in ("forward", "backward", "update")} <= parts
    assert len({x.trace_id for x in collector.spans}) == 1
