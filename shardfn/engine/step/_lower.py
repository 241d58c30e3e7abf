"""`Lowered`: a captured and scheduled step or function that can be read, measured and compiled, wherever it runs."""

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


class Lowered:
    """A step, or a sharded function, for one signature. Its `lower` makes it.

    Attributes:
        gm: the scheduled graph, a `torch.fx.GraphModule`.
        mesh: the mesh it is for, seen from this rank; an abstract one from rank 0 or the rank that it names.
        schedule: the options with which it was scheduled.
        pipeline: for a step over stages of a pipeline, the actions of each rank; else None. The graph is that of the
            stages of one rank, `mesh`'s own.
        choice: under `jit(cluster=...)` the schedules that were compared, with their scores; else None.
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
        """The graph as text: one line per op, with leaf names, shapes, collectives and their bytes."""
        return as_text(self.gm)

    def schedule_table(self) -> str:
        """The compared schedules, with seconds and peak, and the chosen one; else the one in use."""
        return f"given: {self.schedule}" if self.choice is None else str(self.choice)

    def memory_analysis(self, *, balanced: bool = False) -> MemoryAnalysis:
        """The peak of live bytes on this rank, by kind, from the lifetimes of the graph's values.

        Args:
            balanced: rows that come by an exchange count as if experts were equally busy, and not as the most that may.
        """
        return memory_analysis(self.gm, balanced=balanced)

    def cost_analysis(self) -> CostAnalysis:
        """Flops, and bytes sent by collective and axis."""
        return cost_analysis(self.gm)

    def estimate(self, cluster: Cluster) -> Estimate:
        """The predicted time of the step on a cluster, and the part of transfers that computation does not hide."""
        return estimate(self.gm, cluster)

    def plot(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        kind: str = "memory",
        cluster: Cluster | None = None,
    ) -> "Figure":
        """A picture of the step: live memory over its ops, or lanes of computation and transfers over time.

        Args:
            path: a file to write, ".png" or ".svg"; None writes none.
            kind: "memory", or "time" as the cost model predicts it.
            cluster: for "time": the machines that the step would run on.

        Returns:
            A matplotlib figure, which notebooks show.

        Raises:
            ImportError: matplotlib is not installed; the extra `train` has it.
            ValueError: another kind, or "time" without a cluster.

        Example:
            >>> import torch
            >>> import shardfn as sf
            >>> step = sf.sharded_step(lambda w, x: ((w * x) ** 2).mean(), sf.optim.sgd(0.5))
            >>> len(step.lower(torch.ones(4), torch.ones(4)).plot().axes)
            2
        """
        if kind not in ("time", "memory"):
            raise ValueError(f"plot(kind={kind!r}): there are 'time' and 'memory'; pass one of them.")
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
        """The step, ready to run: `compiled(state, batch) -> (state, metrics)` for the signature it was lowered for.

        A lowered function compiles to one that takes its own arguments.

        Args:
            backend: as `jit` takes it; default the jit's.

        Raises:
            ValueError: the mesh is abstract; (when called) state or batch have other shapes than those that were
                lowered.
        """
        if self.mesh.abstract:
            raise ValueError(f"{self.mesh!r} is abstract: the step can be read and measured, not compiled to run.")
        return self._compile(backend)
