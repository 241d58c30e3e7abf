"""`Lowered`: a captured and scheduled step or function that can be read, measured and compiled, wherever it runs.

`StepProfile`: the time and the bytes of real steps, next to the prediction of the cost model for the lowered step.
"""

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch.fx import GraphModule

from shardfn.core import Mesh, as_html
from shardfn.graph import (
    Choice,
    Cluster,
    CostAnalysis,
    Estimate,
    MemoryAnalysis,
    Schedule,
    as_text,
    cost_analysis,
    estimate,
    memory_analysis,
    picture_of_memory,
    picture_of_time,
    transfers,
)
from shardfn.schedules import PipelineSchedule

if TYPE_CHECKING:
    from matplotlib.figure import Figure
import collections
import dataclasses
import time
from collections.abc import Mapping

import torch

from shardfn.collectives import count_traffic
from shardfn.core import columns
from shardfn.engine.agreement import Spans, Spent, measured_into
from shardfn.graph import phases_of


class Lowered:
    """A step, or a sharded function, for one signature. Its `lower` makes it.

    Attributes:
        gm: the scheduled graph, a `torch.fx.GraphModule`.
        mesh: the mesh it is for, seen from this rank; an abstract one from rank 0 or the rank that it names.
        schedule: the options with which it was scheduled.
        pipeline: actions of each rank in a step over stages of a pipeline, else None. The graph is that of the
            stages of a single rank, `mesh`'s own.
        choice: under `jit(cluster=...)` the schedules that were compared, with their scores, else None.
    """

    def __init__(
        self,
        gm: GraphModule,
        mesh: Mesh,
        schedule: Schedule | Choice,
        compile: Callable[[str | None], Callable[..., Any]],
    ) -> None:
        self.gm, self.mesh, self._compile = gm, mesh, compile
        self.pipeline: PipelineSchedule | None = gm.meta.get("pipeline")
        self.choice = schedule if isinstance(schedule, Choice) else None
        self.schedule = schedule.schedule if isinstance(schedule, Choice) else schedule

    def __repr__(self) -> str:
        ops = [node for node in self.gm.graph.nodes if node.op == "call_function"]
        return f"Lowered({len(ops):,} ops, {len(transfers(self.gm)):,} transfers; {self.mesh!r})"

    def _repr_html_(self) -> str:
        return as_html(f"{self!r}\n\n{self.cost_analysis()}\n\n{self.memory_analysis()}")

    def as_text(self) -> str:
        """Returns the graph as text: one line per op, with leaf names, shapes, collectives and their bytes."""
        return as_text(self.gm)

    def schedule_table(self) -> str:
        """Returns the compared schedules, with seconds and peak, and the chosen one, else the one in use."""
        return f"given: {self.schedule}" if self.choice is None else str(self.choice)

    def memory_analysis(self, *, balanced: bool = False) -> MemoryAnalysis:
        """Returns the peak of live bytes on this rank, by kind, from the lifetimes of the graph's values.

        Args:
            balanced: rows that come by an exchange count as if experts were equally busy, and not as the most that may.
        """
        return memory_analysis(self.gm, balanced=balanced)

    def cost_analysis(self) -> CostAnalysis:
        """Flops, and bytes sent by collective and axis."""
        return cost_analysis(self.gm)

    def estimate(self, cluster: Cluster) -> Estimate:
        """Predicts the time of the step on a cluster, and the part of transfers that computation does not hide."""
        return estimate(self.gm, cluster)

    def plot(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        kind: str = "memory",
        cluster: Cluster | None = None,
    ) -> "Figure":
        """Returns a picture of the step: live memory over its ops, or lanes of computation and transfers over time.

        Args:
            path: a file to write, ".png" or ".svg". None writes none.
            kind: "memory", or "time" as the cost model predicts it.
            cluster: cluster for "time": the machines that the step would run on.

        Returns:
            A matplotlib figure, which notebooks show.

        Raises:
            ImportError: matplotlib is not installed. The extra `train` has it.
            ValueError: another kind, or "time" without a cluster.

        Example:
            >>> import torch
            >>> import shardfn as sf
            >>> step = sf.sharded_step(lambda w, x: ((w * x) ** 2).mean(), sf.optim.sgd(0.5))
            >>> len(step.lower(torch.ones(4), torch.ones(4)).plot().axes)
            2
        """
        if kind not in ("time", "memory"):
            raise ValueError(f"plot(kind={kind!r}): there are 'time' and 'memory'. Pass one of them.")
        if kind == "time" and cluster is None:
            raise ValueError("plot(kind='time') needs a cluster to predict for: pass cluster=graph.cluster(name).")
        if cluster is not None and kind == "time":
            figure = picture_of_time(self.estimate(cluster))
        else:
            figure = picture_of_memory(self.memory_analysis())
        if path is not None:
            figure.savefig(path)
        return figure

    def compile(self, backend: str | None = None) -> Callable[..., Any]:
        """Returns the step, ready to run.

        `compiled(state, batch) -> (state, metrics)` for the signature it was lowered for.

        A lowered function compiles to one that takes its own arguments.

        Args:
            backend: backend as `jit` takes it. Default: the jit's.

        Raises:
            ValueError: the mesh is abstract; (when called) state or batch have other shapes than those that were
                lowered.
        """
        if self.mesh.abstract:
            raise ValueError(f"{self.mesh!r} is abstract: the step can be read and measured, not compiled to run.")
        return self._compile(backend)


PHASES = ("forward", "backward", "gather", "reduce", "update", "refresh", "waits", "rest")
_MESSAGES = ("gather", "reduce", "refresh")
# Why a prediction is missing: of a phase that is never predicted, of another one, and of a message.
_UNPREDICTED = {
    "waits": "not predicted: it depends on how unequal the ranks are, and the cost model takes them as equal.",
    "rest": "not predicted: checks, and the agreement of ranks, are outside of the graph that the cost model reads.",
}
_ABSENT = "not predicted: the graph of the step has no operation of this phase."
_UNSEEN = (
    "not predicted: the graph does not show the leaves of this message; its wait is predicted in the phase that waits."
)
# A row of the table by leaf: the part of the step, and the leaves that travel together.
Row = tuple[str, tuple[str, ...]]


@dataclasses.dataclass(frozen=True)
class Predicted:
    """The cost model's prediction for a step on a cluster.

    Attributes:
        seconds: seconds of the whole step.
        phases: phase -> seconds in which the device computes or waits; "waits" and "rest" are not predicted.
        leaves: (phase, paths of leaves that travel together) -> seconds for which their messages are on the wire. A
            message whose leaves the graph does not show is not among them, and its waits count in the phase of the
            graph: "forward", "backward" or "update".
    """

    seconds: float
    phases: Mapping[str, float]
    leaves: Mapping[Row, float]


@dataclasses.dataclass(frozen=True)
class StepProfile:
    """The time and bytes of a step on this rank: means over the measured steps.

    It prints as two tables, by phase and by leaf.

    Phases do not overlap and add up to `seconds`. "gather", "reduce" and "refresh" are the time in which this rank
    started messages and waited for them. It is not counted in "forward" or "backward" again. "waits" is waiting for
    other ranks at the end of a forward or backward. "rest" is everything else: checks, and agreement between ranks
    before and after the step.

    Attributes:
        steps: how many steps were measured.
        seconds: one step, on this rank's clock.
        sent: bytes that this rank sent in a step, as `count_traffic` counts them.
        phases: phase -> its time, empty for a jitted step.
        leaves: (phase, paths of leaves that travel together) -> the time and bytes of their messages, empty for a
            jitted step.
        predicted: the prediction for `cluster`, if `profile` got one.
        notes: reasons why something could not be measured.
    """

    steps: int
    seconds: float
    sent: float
    phases: Mapping[str, Spent]
    leaves: Mapping[Row, Spent]
    predicted: Predicted | None
    notes: tuple[str, ...]

    def __str__(self) -> str:
        reasons: dict[str, str] = {}
        parts = [
            f"a step, the mean of {self.steps}: {_format_ms(self.seconds)}, {self.sent:,.0f} bytes sent by this rank"
        ]
        if self.predicted is not None:
            parts[0] += f"; predicted {_format_ms(self.predicted.seconds)}"
        if self.phases:
            parts += [
                "",
                columns([self._format_head("phase"), *(self._format_phase(name, reasons) for name in self.phases)]),
            ]
        if self.leaves:
            parts += [
                "",
                columns([self._format_head("leaf"), *(self._format_leaf(row, reasons) for row in self.leaves)]),
            ]
        notes = [*(f"[{mark}] {reason}" for reason, mark in reasons.items()), *self.notes]
        return "\n".join([*parts, *([""] if notes else []), *notes])

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        return as_html(str(self))

    def _format_head(self, first: str) -> tuple[str, ...]:
        head = (first, "calls", "bytes sent", "measured")
        return head if self.predicted is None else (*head, "predicted")

    def _format_phase(self, name: str, reasons: dict[str, str]) -> tuple[str, ...]:
        says = None if self.predicted is None else self.predicted.phases.get(name)
        return self._format_cells(name, self.phases[name], says, reasons, _UNPREDICTED.get(name, _ABSENT))

    def _format_leaf(self, row: Row, reasons: dict[str, str]) -> tuple[str, ...]:
        what, paths = row
        known = {} if self.predicted is None else self.predicted.leaves
        found = [took for (part, names), took in known.items() if part == what and set(names) & set(paths)]
        says = sum(found) if found else None
        first, *others = paths
        more = f" and {len(others)} more" if others else ""
        return self._format_cells(f"{what} {first}{more}", self.leaves[row], says, reasons, _UNSEEN)

    def _format_cells(
        self, name: str, spent: Spent, says: float | None, reasons: dict[str, str], why: str
    ) -> tuple[str, ...]:
        """Returns a row. A prediction that is missing has a mark, and its reason is noted under that mark."""
        cells = (name, f"{spent.calls / self.steps:g}", f"{spent.sent / self.steps:,.0f}")
        cells += (_format_ms(spent.seconds / self.steps),)
        if self.predicted is None:
            return cells
        if says is not None:
            return (*cells, _format_ms(says))
        return (*cells, f"- [{reasons.setdefault(why, chr(ord('a') + len(reasons)))}]")


def measured(
    mesh: Mesh, run: Callable[[], object], steps: int, predicted: Predicted | None, *, jitted: bool
) -> StepProfile:
    """Returns the profile of `steps` calls of `run`, which make one step each."""
    with count_traffic() as traffic, measured_into(Spans(traffic)) as spans:
        _synchronize_device(mesh)
        start = time.perf_counter()
        for _ in range(steps):
            run()
        _synchronize_device(mesh)
        seconds = time.perf_counter() - start
    notes = list[str]()
    if jitted:
        notes.append("the step is jitted: it runs as one program, whose phases and leaves are not measured apart.")
    elif mesh.device.type != "cpu":
        notes.append(f"on {mesh.device.type} work is queued: times of parts are the host's; the whole step's is real.")
    phases = {} if jitted else _sum_by_phase(spans.spent, seconds, traffic.bytes, steps)
    leaves = {row: spent for row, spent in spans.spent.items() if row[1]}
    most = sorted(leaves, key=lambda row: (_MESSAGES.index(row[0]), -leaves[row].seconds))
    by_leaf = {row: leaves[row] for row in most}
    return StepProfile(steps, seconds / steps, traffic.bytes / steps, phases, by_leaf, predicted, tuple(notes))


def predict(lowered: Lowered, cluster: Cluster) -> Predicted:
    """Returns the cost model's prediction, by the phases and leaves of a profile."""
    found, phase_of = lowered.estimate(cluster), {n.name: p for n, p in phases_of(lowered.gm).items()}
    sent = {t.node.name: t for t in transfers(lowered.gm)}
    waits = {t.wait.name: t for t in sent.values() if t.wait is not None}
    phases: dict[str, float] = collections.defaultdict(float)
    leaves: dict[Row, float] = collections.defaultdict(float)
    for event in found.events:
        phase = phase_of[event.name]
        if event.lane == "wait" and event.name in waits:
            phases[_find_kind(waits[event.name].op, phase, waits[event.name].leaves)] += event.seconds
        elif event.lane in ("compute", "wait"):
            phases[phase] += event.seconds
        elif event.name in sent and (move := sent[event.name]).leaves:
            leaves[_find_kind(move.op, phase, move.leaves), move.leaves] += event.seconds
    return Predicted(found.seconds, dict(phases), dict(leaves))


def _find_kind(op: str, phase: str, leaves: tuple[str, ...]) -> str:
    """Where a profile counts a transfer of a captured step."""
    if not leaves:
        return phase
    if op != "all_gather":
        return "reduce"
    return "refresh" if phase == "update" else "gather"


def _sum_by_phase(spent: Mapping[Row, Spent], seconds: float, sent: int, steps: int) -> dict[str, Spent]:
    out = {name: Spent() for name in PHASES}
    for (what, _), took in spent.items():
        into = out[what]
        into.calls += took.calls
        into.seconds += took.seconds
        into.sent += took.sent
    known = list(out.values())
    rest = Spent(steps, seconds - sum(x.seconds for x in known), sent - sum(x.sent for x in known))
    return out | {"rest": rest}


def _synchronize_device(mesh: Mesh) -> None:
    if mesh.device.type == "cuda":
        torch.cuda.synchronize(mesh.device)


def _format_ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3f} ms"
