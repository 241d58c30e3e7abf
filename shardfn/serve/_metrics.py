"""Metrics as Prometheus reads them: under vLLM's names where the meaning is equal, else under `shardfn:`.

All times are differences of one clock, the front's.
"""

from bisect import bisect_left
from collections.abc import Iterator, Mapping

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
