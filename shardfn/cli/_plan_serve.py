"""`shardfn plan --serve`: the layout and the number of replicas by which a server meets its objectives of latency.

Bytes come from the captured step on an abstract mesh, and times of steps from a model of costs. The engine's own
schedule then plays a trace.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from shardfn.core import deferred, key, make_mesh, tree_map
from shardfn.graph import Cluster
from shardfn.inference import (
    CacheStats,
    Decoder,
    Limits,
    MemoryPlan,
    PrefixScope,
    Runner,
    SimulatedEngine,
    SimulatedLatency,
    TimedRequest,
    decoder,
    list_prefix_keys,
)
from shardfn.models import gpt
from shardfn.serve import USUAL_ANSWER, PrefixTable, choose_replica

from ._bench_rates import Slo, find_percentile
from ._plan import HEADROOM
from ._serve_times import FittedTimes, Roofline

_CUT = 2  # layers of the captured model, where all layers are equal


@dataclasses.dataclass(frozen=True)
class ServeSetup:
    """Settings of a planned server.

    Attributes:
        model: name given by the user.
        config: config of the model.
        cluster: machines.
        tp: ranks of a replica.
        dtype: "float32" or "bfloat16", of weights and cache. float32 is batch-invariant, as a server has it.
        context: most tokens of a sequence.
        running: most sequences at a time.
        budget: most rows of a step.
        cache_bytes: bytes of the cache on all ranks, or None for the rest of a rank's memory.
        efficiency: fraction of the device's rates that a step reaches.
        times: times of steps as of a log, in place of the device's rates.
    """

    model: str
    config: gpt.Config
    cluster: Cluster
    tp: int = 1
    dtype: str = "bfloat16"
    context: int = 4096
    running: int = Limits.running
    budget: int = Limits.buckets[-1]
    cache_bytes: int | None = None
    efficiency: float = 0.6
    times: FittedTimes | None = None


class ServeLatencies(NamedTuple):
    """Result of a trace on some replicas.

    Attributes:
        latencies: latency of each request.
        seconds: time from the beginning to the end of the last step.
        tokens: drawn tokens.
        cache: prefix hits and preemptions of all replicas.
        padding: part of all rows that was padding.
        most_running: most sequences at a time on a replica.
    """

    latencies: tuple[SimulatedLatency, ...]
    seconds: float
    tokens: int
    cache: CacheStats
    padding: float
    most_running: int

    def percentile(self, name: str, part: int) -> float:
        """Returns the milliseconds of a percentile of "ttft", "itl" or "e2e"."""
        read = {"ttft": lambda x: [x.first], "itl": lambda x: x.gaps, "e2e": lambda x: [x.whole]}[name]
        return find_percentile([1e3 * t for x in self.latencies for t in read(x)], part)

    def meets(self, slos: Sequence[Slo]) -> bool:
        """Returns whether all objectives are met."""
        return all(self.percentile(slo.name, slo.part) <= slo.ms for slo in slos)


@dataclasses.dataclass(frozen=True)
class ServePlan:
    """Plan of a server in a layout.

    Attributes:
        setup: settings.
        limits: sizes of the engine, or None if not even the longest sequence fits.
        memory: bytes of a rank. Without limits, of a cache of the longest sequence.
        room: bytes that the program may use on a device.
        replicas: number of replicas.
        found: result of the trace, or None if the model does not fit.
        meets: whether all objectives are met.
        bucket_seconds: seconds of a step without attention, by bucket.
    """

    setup: ServeSetup
    limits: Limits | None
    memory: MemoryPlan
    room: int
    replicas: int = 0
    found: ServeLatencies | None = None
    meets: bool = False
    bucket_seconds: Mapping[int, float] = dataclasses.field(default_factory=dict)

    @property
    def devices(self) -> int:
        """Returns the number of devices."""
        return self.replicas * self.setup.tp

    @property
    def sort_key(self) -> tuple[bool, bool, int, float]:
        """Returns a key by which the cheapest plan that meets the objectives is first."""
        itl = self.found.percentile("itl", 95) if self.found is not None else 0.0
        return self.found is None, not self.meets, self.devices, itl


def plan_server(
    setup: ServeSetup,
    trace: Sequence[TimedRequest],
    slos: Sequence[Slo],
    *,
    replicas: int | None = None,
    most: int = 64,
) -> ServePlan:
    """Returns the plan of a server: bytes, times, and the fewest replicas that meet the objectives.

    Args:
        setup: settings.
        trace: requests, in the order of their times.
        slos: objectives.
        replicas: number of replicas. Default: the fewest that meet the objectives, at most `most`.
        most: most replicas.

    Raises:
        ValueError: the ranks do not divide the heads, or a size is out of range.

    Example:
        >>> from shardfn.cli._bench_rates import parse_slo
        >>> from shardfn.graph import cluster
        >>> from shardfn.inference import Request, Sampling
        >>> config = gpt.Config(vocab_size=64, num_layers=2, d_model=32, num_heads=4, max_len=64)
        >>> setup = ServeSetup("tiny", config, cluster("h200"), tp=2, context=64, running=4, budget=8)
        >>> trace = [TimedRequest(0.0, Request((1, 2, 3), Sampling(max_tokens=2)), (4, 5))]
        >>> made = plan_server(setup, trace, [parse_slo("p95_itl=50ms")])
        >>> made.meets, made.replicas, made.devices
        (True, 1, 2)
    """
    room = int(setup.cluster.device.memory * (1 - HEADROOM))
    limits, memory = choose_sizes(setup, room)
    if limits is None:
        return ServePlan(setup, None, memory, room)
    roofline = _make_roofline(setup, limits, memory)
    times = setup.times or roofline
    buckets = {bucket: times.bucket_seconds(bucket) for bucket in limits.buckets}
    made = ServePlan(setup, limits, memory, room, bucket_seconds=buckets)
    tried = dict[int, ServeLatencies]()

    def is_good(num: int) -> bool:
        tried[num] = play_trace(limits, trace, setup.times.start if setup.times else lambda: roofline, num)
        return tried[num].meets(slos)

    num = replicas or _find_fewest(is_good, most)
    if num not in tried:
        is_good(num)
    return dataclasses.replace(made, replicas=num, found=tried[num], meets=tried[num].meets(slos))


def _find_fewest(is_good: Any, most: int) -> int:
    """Returns the least number that is good, or `most`, for a condition that holds from some number on."""
    low, high = 0, 1
    while high < most and not is_good(high):
        low, high = high, min(2 * high, most)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if is_good(middle) else (middle, high)
    return high


def play_trace(limits: Limits, trace: Sequence[TimedRequest], times: Any, replicas: int) -> ServeLatencies:
    """Returns the result of a trace on replicas, with the router of a server.

    Args:
        limits: sizes of each engine.
        trace: requests, in the order of their times.
        times: function that returns the `StepTimes` of a replica.
        replicas: number of replicas.
    """
    engines = [SimulatedEngine(limits, times()) for _ in range(replicas)]
    tables = [PrefixTable(limits.blocks) for _ in range(replicas)]
    scope = PrefixScope(0, b"", limits.cache_dtype, b"")
    missing: dict[tuple[int, str], int] = {}
    for arrival, timed in enumerate(trace):
        for engine in engines:
            engine.run(timed.seconds)
        at = 0
        if replicas > 1:
            keys = list_prefix_keys(timed.request.prompt, limits.block, scope)
            hits = [table.count_hits(keys) for table in tables]
            loads = [_sum_load(engine, i, missing) for i, engine in enumerate(engines)]
            at = choose_replica(hits, loads, arrival) or 0
            tables[at].record(keys)
            left = len(timed.request.prompt) - hits[at] * limits.block
            missing[at, engines[at].add(timed)] = left
        else:
            engines[0].add(timed)
    for engine in engines:
        engine.run()
    return _join_results(engines, trace)


def _sum_load(engine: SimulatedEngine, replica: int, missing: Mapping[tuple[int, str], int]) -> int:
    """Returns the tokens to compute of a replica, as a server's front counts them."""
    waiting = sum(missing[replica, name] for name in engine.requests if not engine.has_begun(name))
    return waiting + sum(min(x.request.sampling.max_tokens, USUAL_ANSWER) for x in engine.requests.values())


def _join_results(engines: Sequence[SimulatedEngine], trace: Sequence[TimedRequest]) -> ServeLatencies:
    results = [engine.result() for engine in engines]
    cache = CacheStats(*(sum(x) for x in zip(*(r.cache for r in results), strict=True)))
    rows, run_rows = (sum(x) for x in zip(*(r.rows for r in results), strict=True))
    return ServeLatencies(
        tuple(x for r in results for x in r.latencies),
        max(r.seconds for r in results) - trace[0].seconds,
        sum(len(x.answer) for x in trace),
        cache,
        1 - rows / run_rows if run_rows else 0.0,
        max(r.most_running for r in results),
    )


def _make_roofline(setup: ServeSetup, limits: Limits, memory: MemoryPlan) -> Roofline:
    itemsize = getattr(torch, setup.dtype).itemsize
    return Roofline(setup.config, limits, setup.cluster, setup.tp, memory.weights, itemsize, setup.efficiency)


def choose_sizes(setup: ServeSetup, room: int) -> tuple[Limits | None, MemoryPlan]:
    """Returns the limits of an engine whose rank has some bytes, or None, and the bytes that a rank needs.

    Raises:
        ValueError: as `plan_server`.
    """
    one = make_decoder(setup, setup.config)
    buckets = (*(size for size in Limits.buckets if size < setup.budget), setup.budget)
    sizes: dict[str, Any] = {"buckets": buckets, "running": setup.running, "cache_dtype": setup.dtype}
    least = Limits(setup.config.vocab_size, setup.context, 2, **sizes)
    least = dataclasses.replace(least, blocks=least.width + 1)
    memory = plan_rank(setup, least)
    each = one.cache.num_bytes(least) // least.blocks
    spare = (room - memory.weights - memory.step) * setup.tp
    held = (spare if setup.cache_bytes is None else min(spare, setup.cache_bytes)) // each
    if held < least.blocks:
        return None, memory
    limits = dataclasses.replace(least, blocks=min(held, least.running * least.width + 1))
    return limits, memory._replace(cache=limits.blocks * each // setup.tp)


def make_decoder(setup: ServeSetup, config: gpt.Config) -> Decoder:
    """Returns the decoder of a server."""
    exact = dataclasses.replace(config, batch_invariant=setup.dtype == "float32", dropout=0.0)
    return decoder(exact, tp="tp" if setup.tp > 1 else None)


def plan_rank(setup: ServeSetup, limits: Limits) -> MemoryPlan:
    """Returns the bytes of a rank, by captures on an abstract mesh.

    Where all layers are equal, models of one and of two layers are captured. Weights and cache grow by a layer's, and
    the rest of a step does not depend on the number of layers.
    """
    num = setup.config.num_layers
    if num <= _CUT or not _has_equal_layers(setup.config):
        return _capture_rank(setup, setup.config, limits)
    one, two = (_capture_rank(setup, config, limits) for config in _cut_layers(setup.config))
    weights, cache = (a + (num - 1) * (b - a) for a, b in ((one.weights, two.weights), (one.cache, two.cache)))
    return MemoryPlan(weights, cache, two.step, two.host)


def _has_equal_layers(config: gpt.Config) -> bool:
    experts = config.experts
    same = experts is None or (len(config.expert_layers) == config.num_layers and len(set(config.num_experts)) == 1)
    return same and config.swift is None


def _cut_layers(config: gpt.Config) -> Iterator[gpt.Config]:
    for num in (1, _CUT):
        cut = {name: x[:num] for name in ("window", "rope") if isinstance(x := getattr(config, name), tuple)}
        yield dataclasses.replace(config, num_layers=num, **cut)


def _capture_rank(setup: ServeSetup, config: gpt.Config, limits: Limits) -> MemoryPlan:
    mesh = make_mesh({"tp": setup.tp} if setup.tp > 1 else {}, device="cpu", abstract=True)
    runner = Runner(make_decoder(setup, config), limits, mesh=mesh)
    with deferred():
        draws = gpt.init(config, key(0))
    dtype = getattr(torch, setup.dtype)
    return runner.plan_memory(tree_map(lambda x: torch.empty(x.shape, dtype=dtype, device="meta"), draws))
