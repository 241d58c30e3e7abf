"""Times of an engine's steps, by a device's rates, or fitted to the steps of a log of decisions.

A step of B rows takes the longer of its products' operations and of one reading of the weights, and as much again for
attention: 4 H K operations for each row and token that it attends to, and one reading of the sequences' keys and
values. On several ranks two sums of a layer's rows are added. Experts are read as far as B rows choose them.

    step = max(2 N B / rate, weights / bandwidth) + max(4 H K pairs / rate, cache / bandwidth) + sums + overhead
"""

import dataclasses
import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence

from shardfn.graph import Cluster
from shardfn.inference import Limits, LoggedStep, count_pairs
from shardfn.inference import StepPlan as Plan
from shardfn.models import gpt

from ._layout import attention_weights, matrices, mean_width, router_weights

StepTimes = Callable[[Plan | None], float]

OVERHEAD = 2e-4  # seconds of the schedule and of starting a step
_PER_LAYER = 1e-5  # seconds in which the kernels of a layer start


@dataclasses.dataclass(frozen=True)
class Roofline:
    """Times of steps by the rates of a device.

    Attributes:
        config: model.
        limits: sizes of the engine.
        cluster: machines. Ranks lie next to each other.
        tp: number of ranks.
        weights: bytes of weights on a rank.
        itemsize: bytes of a number of weights and cache.
        efficiency: fraction of the device's rates that a step reaches.
    """

    config: gpt.Config
    limits: Limits
    cluster: Cluster
    tp: int
    weights: int
    itemsize: int
    efficiency: float = 0.6

    def __call__(self, plan: Plan | None) -> float:
        """Returns the seconds of a step."""
        if plan is None:
            return OVERHEAD
        return self.bucket_seconds(plan.bucket) + self._attend_seconds(plan)

    def bucket_seconds(self, bucket: int) -> float:
        """Returns the seconds of a step of a bucket without its attention."""
        c, device = self.config, self.cluster.device
        products = bucket * (c.num_layers * _block_weights(c)) + self.limits.wanted(bucket) * c.vocab_size * c.d_model
        computing = 2 * products / self.tp / (device.rate(self._dtype) * self.efficiency)
        reading = (self.weights - self._idle_experts(bucket)) / (device.bandwidth * self.efficiency)
        return max(computing, reading) + self._sum_seconds(bucket) + OVERHEAD + _PER_LAYER * c.num_layers

    @property
    def _dtype(self) -> str:
        known = self.cluster.device.flops
        return next((x for x in ("bfloat16", "float16") if self.itemsize == 2 and x in known), "float32")

    def _idle_experts(self, bucket: int) -> float:
        """Returns the bytes of the experts that no row chooses, in the mean."""
        c, experts = self.config, self.config.experts
        if experts is None:
            return 0.0
        each = matrices(c) * c.d_model * (experts.d_ff or c.ff_dim) * self.itemsize / self.tp
        return sum(num * each * (1 - experts.top_k / num) ** bucket for num in c.num_experts)

    def _sum_seconds(self, bucket: int) -> float:
        if self.tp == 1:
            return 0.0
        link, sums = self.cluster.link({"tp": self.tp}, "tp"), 2 * self.config.num_layers + 1
        sent = 2 * bucket * self.config.d_model * self.itemsize * (self.tp - 1) / self.tp
        return sums * link.seconds(sent, math.ceil(math.log2(self.tp)))

    def _attend_seconds(self, plan: Plan) -> float:
        """Returns the seconds of attention. A layer with a window attends to the window."""
        c, device = self.config, self.cluster.device
        positions, num = plan.positions[: plan.num_tokens], max(plan.sequences[: plan.num_tokens]) + 1
        pairs = read = 0
        for window, layers in Counter(x.window for x in c.layer_settings).items():
            most = window or self.limits.context
            pairs += layers * sum([min(p + 1, most) for p in positions])
            read += layers * sum([min(length, most) for length in plan.lengths[:num]])
        # Latent rows are read whole by each rank.
        wide, kept = c.head_dim, 2 * c.kv_heads * c.head_dim / self.tp
        wide, kept = (wide, kept) if c.latent is None else (c.latent.row, c.latent.row)
        computing = 4 * c.num_heads * wide * pairs / self.tp / device.rate(self._dtype)
        reading = kept * self.itemsize * read / device.bandwidth
        return max(computing, reading) / self.efficiency


def _block_weights(c: gpt.Config) -> float:
    """Returns the weights that multiply a row in a mean layer."""
    return attention_weights(c) + matrices(c) * c.d_model * mean_width(c) + router_weights(c)


@dataclasses.dataclass(frozen=True)
class FittedTimes:
    """Times of steps as of a log: a time for each bucket, and a time for each pair of a row and a token.

    The rest of the log's times comes again in its order, so that tails of latencies are those of the machine.

    Attributes:
        base: seconds by bucket.
        per_pair: seconds of a pair.
        rest: differences between the log's times and the fit, by bucket.
        idle: seconds of a step that computes nothing.
    """

    base: Mapping[int, float]
    per_pair: float
    rest: Mapping[int, Sequence[float]]
    idle: float

    def start(self) -> StepTimes:
        """Returns the times of a run, which take the rest from its beginning."""
        counts = Counter[int]()

        def seconds_of(plan: Plan | None) -> float:
            if plan is None:
                return self.idle
            near = min(self.rest, key=lambda bucket: abs(bucket - plan.bucket))
            rest = self.rest[near]
            counts[near] += 1
            found = self.bucket_seconds(plan.bucket) + self.per_pair * count_pairs(plan)
            return max(0.0, found + rest[counts[near] % len(rest)])

        return seconds_of

    def bucket_seconds(self, bucket: int) -> float:
        """Returns the seconds of a step of a bucket without its attention, between those of its neighbours."""
        known = sorted(self.base)
        if bucket in self.base or len(known) == 1:
            return self.base.get(bucket, self.base[known[0]])
        above = next((i for i, size in enumerate(known) if size > bucket), len(known) - 1)
        a, b = known[max(above - 1, 0)], known[max(above, 1)]
        return max(0.0, self.base[a] + (self.base[b] - self.base[a]) * (bucket - a) / (b - a))


def fit_times(steps: Sequence[LoggedStep]) -> FittedTimes:
    """Returns the times of a log's steps.

    A step's time lasts to the begin of the next step, if requests are in progress. The time of a pair is the least
    squares' within buckets, and of a bucket the median of the rest.

    Raises:
        ValueError: no step computes.

    Example:
        >>> steps = [LoggedStep(0.0, 0.1 + 0.01 * pairs, 4, pairs, "") for pairs in (3, 5, 9)]
        >>> found = fit_times(steps)
        >>> round(found.per_pair, 6), round(found.base[4], 6)
        (0.01, 0.1)
    """
    by_bucket: dict[int, list[LoggedStep]] = defaultdict(list)
    for step in steps:
        by_bucket[step.bucket].append(step._replace(seconds=step.seconds + step.pause))
    idle = [x.seconds for x in by_bucket.pop(0, [])]
    if not by_bucket:
        raise ValueError("a log for --calibrate must have steps that compute, got none. Send the server requests.")
    up = down = 0.0
    for same in by_bucket.values():
        pairs, seconds = (statistics.fmean(x) for x in zip(*((s.pairs, s.seconds) for s in same), strict=True))
        up += sum((s.pairs - pairs) * (s.seconds - seconds) for s in same)
        down += sum((s.pairs - pairs) ** 2 for s in same)
    slope = max(0.0, up / down) if down else 0.0
    rest = {bucket: [s.seconds - slope * s.pairs for s in same] for bucket, same in by_bucket.items()}
    base = {bucket: statistics.median(x) for bucket, x in rest.items()}
    apart = {bucket: [x - base[bucket] for x in values] for bucket, values in rest.items()}
    return FittedTimes(base, slope, apart, statistics.median(idle) if idle else 0.0)
