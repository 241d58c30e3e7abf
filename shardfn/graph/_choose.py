"""Chooses a schedule: of a few candidates that fit in memory, the fastest by the cost model.

Each candidate's passes run on the graph. `estimate` gives the seconds of the result, and `memory_analysis` the peak.
Candidates that begin with the same passes share the result of the passes, and a graph that two candidates lead to is
scored once.

`Schedule`: which passes run over a captured graph, as a single value. Each pass helps the next.
"""

import dataclasses
import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from torch.fx import GraphModule

from shardfn.core import IN_FLIGHT_BYTES, PREFETCH_BYTES

from ._bucket import bucket
from ._cost import estimate
from ._device import Cluster
from ._donate import donate
from ._edit import draft_graph, settle_graph
from ._memory import memory_analysis
from ._overlap import overlap_reductions, reduced_bytes
from ._prefetch import gathered_bytes, prefetch
from ._rematerialise import rematerialise
from ._reorder import free_at_last_use, sink_waits
from ._reuse import reuse_gathers
from ._transfers import is_gather, is_reduction, transfers


class _SchedulePass(NamedTuple):
    """Pass of a schedule with options. Equal stages make equal graphs of the same graph.

    Attributes:
        run: pass.
        options: keyword arguments.
    """

    run: Callable[..., GraphModule]
    options: tuple[tuple[str, Any], ...] = ()

    def __call__(self, gm: GraphModule) -> GraphModule:
        """Returns the pass's graph."""
        return self.run(gm, **dict(self.options))


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Passes over a captured step. All but `budget` only change when things happen. None leaves a pass out.

    First the passes on computation (`rematerialise`), then on messages (`reuse_gathers`, `bucket`), then on times
    (`sink_waits`, `overlap_reductions`, `prefetch`), then on memory (`free_at_last_use`, `donate`), which needs the
    final order. The result depends only on the graph: ranks with the same graph issue the same transfers in the same
    order, and the scheduled graph has the same bits.

        w = wait(all_gather_start(a))            h = all_gather_start(a)
        y = x @ w                                h1 = all_gather_start(b)
        v = wait(all_gather_start(b))     =>     w = wait(h)
        z = y + v                                y = x @ w
                                                 v = wait(h1)
                                                 z = y.add_(v)

    Attributes:
        prefetch: bytes of gathered leaves that may be there ahead of use.
        bucket: bytes up to which small transfers travel together.
        reductions: bytes of whole gradients that may be in flight.
        reuse: limit in bytes. A gathered leaf stays in memory while at most this many bytes of other leaves are
            gathered. Default: as `prefetch`.
        budget: bytes that a step's values may take. Activations beyond the budget are computed again. None keeps all
            activations.
        donate: whether pure updates may run in place.
        passes: further passes `f(gm) -> gm`, which run first, in this order.

    Raises:
        ValueError: a number of bytes is negative.

    Example:
        >>> import torch
        >>> from torch.fx.experimental.proxy_tensor import make_fx
        >>> def gathered(own):
        ...     return torch.ops.shardfn.wait(torch.ops.shardfn.all_gather_start(own, [1, 1], "dp"))
        >>> gm = make_fx(lambda a, b, x: (x * gathered(a) + gathered(b),), tracing_mode="fake")(
        ...     torch.ones(1), torch.ones(1), torch.ones(2))
        >>> [n.name for n in Schedule(bucket=0)(gm).graph.nodes][3:-1]
        ['all_gather_start', 'all_gather_start_1', 'wait', 'mul', 'wait_1', 'add']
    """

    prefetch: int | None = PREFETCH_BYTES
    bucket: int | None = 1 << 20
    reductions: int | None = IN_FLIGHT_BYTES
    reuse: int | None = None
    budget: int | None = None
    donate: bool = True
    passes: tuple[Callable[[GraphModule], GraphModule], ...] = ()

    def __post_init__(self) -> None:
        for name in ("prefetch", "bucket", "reductions", "reuse", "budget"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ValueError(
                    f"Schedule({name}={value}): must be a number of bytes, 0 or more, or None to leave the pass out."
                )

    def __call__(self, gm: GraphModule, *, fuses: bool = False) -> GraphModule:
        """Returns the scheduled graph. `gm` stays unchanged.

        Args:
            gm: captured step.
            fuses: whether the back end fuses elementwise ops.
        """
        for own in self.passes:
            gm = own(gm)
        draft = draft_graph(gm)
        for stage in self.stages(fuses=fuses)[len(self.passes) :]:
            draft = stage(draft)
        return settle_graph(draft)

    def stages(self, *, fuses: bool = False) -> list[_SchedulePass]:
        """Returns the passes of this schedule, in order: first `passes`, then the passes of the room."""
        reuse = self.prefetch if self.reuse is None else self.reuse
        chosen = [
            (True, free_at_last_use, {}),
            (self.budget is not None, rematerialise, {"budget": self.budget}),
            (reuse is not None, reuse_gathers, {"budget": reuse}),
            (self.bucket is not None, bucket, {"limit": self.bucket}),
            (True, sink_waits, {}),
            (self.reductions is not None, overlap_reductions, {"limit": self.reductions}),
            (self.prefetch is not None, prefetch, {"budget": self.prefetch}),
            (True, free_at_last_use, {}),
            (self.donate, donate, {"temporaries": not fuses}),
        ]
        return [
            *map(_SchedulePass, self.passes),
            *(_SchedulePass(run, tuple(how.items())) for wanted, run, how in chosen if wanted),
        ]


# Estimates that differ by less are ties: the model is no better.
_TIE = 1e-3
# Messages, in units of latency x bandwidth, and windows of transfers ahead, in units of the largest transfer.
_MESSAGES = (1, 8)
_WINDOWS = (0, 4)
# Bytes for the step's values when nothing fits, as parts of the memory that the arguments leave free.
_PARTS = (1.0, 0.85, 0.7, 0.5)


@dataclasses.dataclass(frozen=True)
class Scored:
    """Schedule with the prediction of the cost model.

    Attributes:
        schedule: schedule.
        seconds: simulated time of the scheduled step.
        peak: bytes alive at the peak.
        by_kind: kind -> bytes alive there.
    """

    schedule: Schedule
    seconds: float
    peak: int
    by_kind: Mapping[str, int] = dataclasses.field(repr=False)


@dataclasses.dataclass(frozen=True)
class Choice:
    """Chosen schedule, with the schedules compared.

    Attributes:
        schedule: schedule.
        seconds: simulated time of the step under the schedule.
        peak: bytes alive at the step's peak.
        memory: bytes that the device may hold.
        table: all candidates, in the order in which the candidates were proposed.
    """

    schedule: Schedule
    seconds: float
    peak: int
    memory: int
    table: tuple[Scored, ...]

    def __str__(self) -> str:
        """Returns a table with a line for each candidate. A star marks the chosen schedule."""
        rows = [self._format_row(s) for s in self.table]
        return "\n".join([f"chosen of {len(rows)}, for a device that holds {_format_mib(self.memory)}:", *rows])

    def _format_row(self, scored: Scored) -> str:
        mark = "*" if scored.schedule == self.schedule else " "
        late = "" if scored.peak <= self.memory else "  does not fit"
        return (
            f"{mark} {scored.seconds:>12.6f} s {_format_mib(scored.peak):>14}  {_format_options(scored.schedule)}{late}"
        )


def choose(
    gm: GraphModule,
    cluster: Cluster,
    *,
    memory: int | None = None,
    given: Mapping[str, Any] | None = None,
    candidates: Sequence[Schedule] | None = None,
    fuses: bool = False,
) -> Choice:
    """Returns the schedule under which `gm` is fastest on `cluster`, among schedules with a peak within `memory`.

        argmin over S of estimate(S(gm)).seconds,  subject to  memory_analysis(S(gm)).peak <= memory

    Times within a thousandth of the least are ties. Among ties the lowest peak wins, then the first candidate. The
    result depends only on the arguments. Let g be the bytes of the largest gather, r the bytes of the largest gradient
    that is reduced, and m = latency x bandwidth of the wire (a message that takes as long to travel as to set out). The
    candidates are, each group only if the graph has something to change:

        the default
        bucket                 None, m, 8 m;        prefetch, reductions = g, r
        prefetch, reductions   k g, k r for k = 0, 4, with the best bucket so far
        if nothing fits: no gather ahead; then activations computed again, under four budgets, for the leanest and the
            fastest of these

    Args:
        gm: captured step, not yet scheduled.
        cluster: machines that run the step.
        memory: bytes that the device may hold at the step's peak. Default: the cluster's `device.memory`.
        given: fields of `Schedule` that are not to be chosen, for example `{"donate": False}`.
        candidates: schedules to choose from, in place of the candidates above.
        fuses: whether the back end fuses elementwise ops.

    Returns:
        The choice, with the scores of all candidates.

    Raises:
        ValueError: nothing fits. The message has the smallest peak and the remedies. Or the cluster has no rate for a
            dtype.

    Example:
        >>> import torch
        >>> from torch.fx.experimental.proxy_tensor import make_fx
        >>> from shardfn.graph._device import cluster
        >>> gm = make_fx(lambda x: (x + 1) * 2, tracing_mode="fake")(torch.ones(1000))
        >>> choose(gm, cluster("cpu")).peak
        8000
    """
    if candidates is not None and not candidates:
        raise ValueError("choose(candidates=[]): expected a schedule to choose from, got none.")
    limit = cluster.device.memory if memory is None else memory
    score = _ScoreCache(gm, cluster, fuses)
    if candidates is not None:
        table = score(candidates)
    else:
        grid = _Candidates(gm, cluster, given or {})
        table = score(grid.messages())
        table = score(grid.windows(_find_best(table, limit) or _find_leanest(table)))
        table = table if _find_best(table, limit) else score(grid.behind(_find_leanest(table)))
        table = table if _find_best(table, limit) else score(grid.budgets(table, limit))
    best = _find_best(table, limit)
    if best is None:
        raise ValueError(_too_large(_find_leanest(table), limit, len(table)))
    return Choice(best.schedule, best.seconds, best.peak, limit, table)


def check_fits(gm: GraphModule, memory: int) -> None:
    """Refuses a scheduled graph with a peak above `memory` bytes.

    Args:
        gm: scheduled step.
        memory: bytes that the device may hold.

    Raises:
        ValueError: the step does not fit. The message has the peak and the remedies.

    Example:
        >>> import torch
        >>> from torch.fx.experimental.proxy_tensor import make_fx
        >>> check_fits(make_fx(lambda x: x + 1, tracing_mode="fake")(torch.ones(8)), 64)
    """
    found = memory_analysis(gm, largest=0)
    if found.peak > memory:
        raise ValueError(_too_large(Scored(Schedule(), 0.0, found.peak, found.by_kind), memory, 1))


# Candidates


class _Candidates:
    """Schedules worth trying for a graph on a cluster. Only the default for a graph that sends nothing."""

    def __init__(self, gm: GraphModule, cluster: Cluster, given: Mapping[str, Any]) -> None:
        self._given = dict(given)
        moves = [t for t in transfers(gm) if t.num_ranks > 1]
        gathers = [gathered_bytes(t.node) for t in moves if is_gather(t.node)]
        sums = [reduced_bytes(t.node) for t in moves if is_reduction(t.node)]
        self._widest, self._heaviest = max(gathers, default=0), max(sums, default=0)
        self._sends = bool(gathers or sums)
        links = [cluster.link(gm.meta.get("mesh_shape", {}), t.axes) for t in moves]
        knee = max((int(link.latency * link.bandwidth) for link in links), default=0)
        # Merging needs at least two messages below the limit.
        mergeable = [sum(size < k * knee for size in (*gathers, *sums)) > 1 for k in _MESSAGES]
        self._limits = [k * knee if some else None for k, some in zip(_MESSAGES, mergeable, strict=True)]

    def messages(self) -> list[Schedule]:
        return [
            self._make_schedule(),
            *(self._prefetch_ahead(1, bucket=limit) for limit in (None, *self._limits) if self._sends),
        ]

    def windows(self, best: Scored) -> list[Schedule]:
        return [self._prefetch_ahead(k, bucket=best.schedule.bucket) for k in _WINDOWS if self._sends]

    def behind(self, least: Scored) -> list[Schedule]:
        return [dataclasses.replace(least.schedule, **({"prefetch": None, "reductions": 0} | self._given))]

    def budgets(self, table: Sequence[Scored], limit: int) -> list[Schedule]:
        least, fastest = _find_leanest(table), min(table, key=lambda s: s.seconds)
        free = limit - sum(least.by_kind.get(k, 0) for k in ("params", "optimizer", "batch"))
        parts = _PARTS if free > 0 and "budget" not in self._given else ()
        both = (least.schedule, fastest.schedule)
        return [dataclasses.replace(s, budget=int(part * free)) for part in parts for s in both]

    def _prefetch_ahead(self, k: int, *, bucket: int | None) -> Schedule:
        return self._make_schedule(prefetch=k * self._widest, reductions=k * self._heaviest, bucket=bucket)

    def _make_schedule(self, **options: Any) -> Schedule:
        return Schedule(**(options | self._given))


# Scores

_Score = tuple[float, int, Mapping[str, int]]
_Todo = Sequence[tuple[Schedule, tuple[_SchedulePass, ...]]]


class _ScoreCache:
    """Seconds and peaks of schedules of a graph, each computed once."""

    def __init__(self, gm: GraphModule, cluster: Cluster, fuses: bool) -> None:
        self._gm, self._cluster, self._fuses = gm, cluster, fuses
        self._scores: dict[Schedule, _Score] = {}
        # Scores by a graph's hash and the passes that are still to run on the graph.
        self._known: dict[tuple[bytes, tuple[_SchedulePass, ...]], _Score] = {}

    def __call__(self, schedules: Iterable[Schedule]) -> tuple[Scored, ...]:
        """Returns the scores of these schedules and of all earlier schedules, in the order of arrival."""
        new = [s for s in dict.fromkeys(schedules) if s not in self._scores]
        order = [*self._scores, *new]
        self._score_depth_first(self._gm, [(s, tuple(s.stages(fuses=self._fuses))) for s in new])
        self._scores = {s: self._scores[s] for s in order}
        return tuple(Scored(s, *score) for s, score in self._scores.items())

    def _score_depth_first(self, gm: GraphModule, todo: _Todo) -> None:
        """Scores the schedules `todo`, whose passes so far made this graph. Depth first, so that few graphs exist."""
        done = [s for s, stages in todo if not stages]
        self._scores |= dict.fromkeys(done, self._measure_graph(gm)) if done else {}
        for stage in dict.fromkeys(stages[0] for _, stages in todo if stages):
            out = stage(gm)
            text = _hash_graph(out)
            mine = [(s, stages[1:]) for s, stages in todo if stages and stages[0] == stage]
            self._score_depth_first(out, [(s, stages) for s, stages in mine if (text, stages) not in self._known])
            for s, stages in mine:
                self._scores[s] = self._known[text, stages] = self._known.get((text, stages)) or self._scores[s]

    def _measure_graph(self, gm: GraphModule) -> _Score:
        memory = memory_analysis(gm, largest=0)
        return estimate(gm, self._cluster).seconds, memory.peak, memory.by_kind


def _hash_graph(gm: GraphModule) -> bytes:
    """Returns a hash that is equal for graphs with the same nodes in the same order."""
    digest = hashlib.blake2b(digest_size=16)
    for n in gm.graph.nodes:
        digest.update(f"{n.name} {n.target} {n.args} {n.kwargs}\n".encode())
    return digest.digest()


def _find_best(table: Sequence[Scored], limit: int) -> Scored | None:
    fitting = [s for s in table if s.peak <= limit]
    fast = min((s.seconds for s in fitting), default=0.0) * (1 + _TIE)
    return min((s for s in fitting if s.seconds <= fast), key=lambda s: s.peak, default=None)


def _find_leanest(table: Sequence[Scored]) -> Scored:
    return min(table, key=lambda s: s.peak)


# Words


def _too_large(least: Scored, limit: int, count: int) -> str:
    kinds = sorted(((n, kind) for kind, n in least.by_kind.items() if n), reverse=True)
    parts = ", ".join(f"{kind} {_format_mib(n)}" for n, kind in kinds[:4])
    tried = f"none of {count} schedules fits" if count > 1 else "the schedule does not fit"
    return (
        f"{tried}: the smallest peak found is {_format_mib(least.peak)} ({parts}), the device may hold"
        f" {_format_mib(limit)}. Use sf.remat around blocks of the model, a higher Zero(stage=), more ranks along its"
        " axis, a smaller batch or sf.accumulate, a smaller jit(budget=), or raise jit(memory=) if the device has more."
    )


def _format_options(schedule: Schedule) -> str:
    fields = [f for f in dataclasses.fields(schedule) if f.name in ("prefetch", "bucket", "reductions")]
    fields += [
        f
        for f in dataclasses.fields(schedule)
        if f.name in ("reuse", "budget", "donate") and getattr(schedule, f.name) != f.default
    ]
    return " ".join(f"{f.name}={getattr(schedule, f.name)}" for f in fields)


def _format_mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:.2f} MiB"
