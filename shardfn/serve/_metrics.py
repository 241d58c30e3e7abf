"""Metrics as Prometheus reads them: under vLLM's names where the meaning is equal, else under `shardfn:`.

All times are differences of one clock, the front's.

Spans of requests for OpenTelemetry, with vLLM's names of attributes.
"""

import importlib.util
import time
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ._request_tracker import ClientRequest

_SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
_TIMES = {
    "vllm:time_to_first_token_seconds": "from a request's arrival to its first token",
    "vllm:inter_token_latency_seconds": "between tokens of a choice",
    "vllm:e2e_request_latency_seconds": "from a request's arrival to its end",
    "vllm:request_queue_time_seconds": "from a request's arrival to the step in which it begins",
    "vllm:request_prefill_time_seconds": "from that step to the first token",
    "vllm:request_decode_time_seconds": "from the first token to the last",
    "vllm:request_inference_time_seconds": "from that step to the last token",
}
_COUNTS = {
    "vllm:prompt_tokens": "tokens of prompts",
    "vllm:generation_tokens": "tokens that were drawn",
    "vllm:request_success": "choices that ended, by reason",
    "vllm:spec_decode_num_drafts": "steps of a sequence that had guessed tokens",
    "vllm:spec_decode_num_draft_tokens": "guessed tokens",
    "vllm:spec_decode_num_accepted_tokens": "guessed tokens that were drawn",
    "vllm:prefix_cache_queries": "tokens of sequences that began, which were looked for in the cache",
    "vllm:prefix_cache_hits": "tokens of these that were found there",
    "vllm:num_preemptions": "sequences that lost their blocks, to be computed anew",
    "shardfn:replica_restarts": "starts of a replica after the end of one of its ranks",
    "shardfn:answers": "answers, by status",
    "shardfn:stalled": "streams that were cancelled because their reader stalled",
    "shardfn:disconnected": "requests that were cancelled because their client left",
}
_GAUGES = {
    "shardfn:replica_up": "1 for a replica that takes requests",
    "vllm:num_requests_running": "sequences that hold blocks of the cache",
    "vllm:num_requests_waiting": "sequences that wait for blocks",
    "vllm:kv_cache_usage_perc": "the part of the cache's blocks that sequences hold, from 0 to 1",
    "shardfn:cached_blocks": "blocks without a sequence whose content can be used again",
    "shardfn:free_blocks": "blocks without content",
    "shardfn:waiting_tokens": "tokens of prompts that wait for their first token",
    "shardfn:open_streams": "requests in progress",
}
_LABELS = {"vllm:request_success": "finished_reason", "shardfn:answers": "status"}
# Numbers of each replica.
_BY_REPLICA = "vllm:prompt_tokens vllm:generation_tokens vllm:prefix_cache_queries vllm:prefix_cache_hits"
_BY_REPLICA += " vllm:spec_decode_num_drafts vllm:spec_decode_num_draft_tokens vllm:spec_decode_num_accepted_tokens"
_BY_REPLICA += " vllm:num_preemptions shardfn:replica_restarts"
_LABELS |= dict.fromkeys(_BY_REPLICA.split(), "replica")


class Metrics:
    """Numbers of a server.

    Args:
        model: label `model_name` of each number.
        replicas: number of replicas.

    Example:
        >>> metrics = Metrics("gpt")
        >>> metrics.add("vllm:prompt_tokens", 3, "0")
        >>> 'vllm:prompt_tokens_total{model_name="gpt",replica="0"} 3' in metrics.text({}).splitlines()
        True
    """

    def __init__(self, model: str, replicas: int = 1) -> None:
        escaped = model.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
        self._model = f'model_name="{escaped}"'
        zeros = {None: [""], "replica": [str(i) for i in range(replicas)]}
        self._counts: dict[str, dict[str, float]] = {
            name: dict.fromkeys(zeros.get(_LABELS.get(name), ()), 0) for name in _COUNTS
        }
        self._places = {name: [0] * (len(_SECONDS) + 1) for name in _TIMES}
        self._sums = dict.fromkeys(_TIMES, 0.0)

    def add(self, name: str, num: float = 1, label: str = "") -> None:
        """Raises a counter."""
        row = self._counts[name]
        row[label] = row.get(label, 0) + num

    def observe(self, name: str, seconds: float) -> None:
        """Counts a time."""
        self._places[name][bisect_left(_SECONDS, seconds)] += 1
        self._sums[name] += seconds

    def text(self, gauges: Mapping[str, float | Mapping[str, float]]) -> str:
        """Returns the page.

        Args:
            gauges: present values of the gauges by their names, and of some by the number of the replica.
        """
        return "\n".join([*self._write_gauges(gauges), *self._write_counters(), *self._write_histograms(), ""])

    def _write_gauges(self, values: Mapping[str, float | Mapping[str, float]]) -> Iterator[str]:
        for name, about in _GAUGES.items():
            yield from _write_head(name, about, "gauge")
            value = values.get(name, 0)
            if isinstance(value, Mapping):
                yield from (f'{name}{{{self._model},replica="{i}"}} {x:g}' for i, x in value.items())
            else:
                yield f"{name}{{{self._model}}} {value:g}"

    def _write_counters(self) -> Iterator[str]:
        for name, about in _COUNTS.items():
            yield from _write_head(f"{name}_total", about, "counter")
            for label, value in self._counts[name].items():
                more = f',{_LABELS[name]}="{label}"' if name in _LABELS else ""
                yield f"{name}_total{{{self._model}{more}}} {value:.12g}"

    def _write_histograms(self) -> Iterator[str]:
        for name, about in _TIMES.items():
            yield from _write_head(name, f"seconds {about}", "histogram")
            total = 0
            for most, num in zip((*_SECONDS, "+Inf"), self._places[name], strict=True):
                total += num
                yield f'{name}_bucket{{{self._model},le="{most}"}} {total}'
            yield f"{name}_sum{{{self._model}}} {self._sums[name]:.9g}"
            yield f"{name}_count{{{self._model}}} {total}"


def _write_head(name: str, about: str, kind: str) -> Iterator[str]:
    yield f"# HELP {name} {about}"
    yield f"# TYPE {name} {kind}"


def make_trace_provider(address: str) -> Any:
    """Returns a provider of OpenTelemetry's tracers that sends spans to an address, over HTTP, in a thread.

    Raises:
        ImportError: a package is missing.
    """
    for name in ("opentelemetry.sdk", "opentelemetry.exporter"):
        if importlib.util.find_spec("opentelemetry") is None or importlib.util.find_spec(name) is None:
            raise ImportError("traces need OpenTelemetry, which is missing: pip install 'shardfn[otel]'")
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    made = TracerProvider(resource=Resource.create({"service.name": "shardfn"}))
    made.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=address)))
    return made


class RequestTraces:
    """Spans of the requests of clients, each made at its end. A span of a client is the parent if a request names it.

    Args:
        provider: provider of OpenTelemetry's tracers.
        model: name of the model.
    """

    def __init__(self, provider: Any, model: str) -> None:
        self._tracer, self._model = provider.get_tracer("shardfn.serve"), model

    def record(self, call: "ClientRequest", now: float) -> None:
        """Makes the span of a request that has ended.

        Args:
            call: request.
            now: time of the end, by `time.monotonic`.
        """
        from opentelemetry.trace import SpanKind, Status, StatusCode
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        epoch = time.time() - time.monotonic()
        parent = TraceContextTextMapPropagator().extract(dict(call.origin.trace))
        begin, end = (int((x + epoch) * 1e9) for x in (call.began, now))
        attributes = {name: x for name, x in self._describe(call, now) if x is not None}
        span = self._tracer.start_span(
            "llm_request", parent, kind=SpanKind.SERVER, start_time=begin, attributes=attributes
        )
        if call.error is not None or call.left:
            why = "the client has left" if call.error is None else call.error.message
            span.set_status(Status(StatusCode.ERROR, why))
        span.end(end)

    def _describe(self, call: "ClientRequest", now: float) -> Iterator[tuple[str, Any]]:
        yield "gen_ai.response.model", self._model
        yield "gen_ai.request.id", call.origin.name or None
        if call.sampling is not None and call.has_tokens:
            for name in ("max_tokens", "temperature", "top_p", "n"):
                yield f"gen_ai.request.{name}", getattr(call.sampling, name)
        yield "gen_ai.usage.num_sequences", len(call.names)
        yield "gen_ai.usage.prompt_tokens", call.prompt_tokens
        yield "gen_ai.usage.completion_tokens", call.drawn
        yield "gen_ai.latency.e2e", now - call.began
        if call.ran is not None:
            yield "gen_ai.latency.time_in_queue", call.ran - call.began
            yield "gen_ai.latency.time_in_model_inference", now - call.ran
        if call.first is not None:
            yield "gen_ai.latency.time_to_first_token", call.first - call.began
            if call.ran is not None:
                yield "gen_ai.latency.time_in_model_prefill", call.first - call.ran
            yield "gen_ai.latency.time_in_model_decode", now - call.first
