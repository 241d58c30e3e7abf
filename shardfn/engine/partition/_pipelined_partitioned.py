"""Pipelined losses that are partitioned: each stage is a program along the partition's axes.

To partition a pipelined loss means to partition each stage. Between stages, values are whole along the axes. So the
messages, order and layers of stages are as without a partition. The layers of a stage are planned together, as a scan
of which a single layer is planned.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

from torch import Tensor

from shardfn.collectives import axis_size
from shardfn.core import PyTree
from shardfn.engine.pipeline import Pipelined, PipelineState, Place

from ._partitioned import Partitioned


class StageFunction(NamedTuple):
    """Part of a pipelined loss that a rank runs, as a loss that `partition` takes.

    Attributes:
        of: loss.
        part: name of the method to call.
        place: place of the layers, or None for parts without layers.
    """

    of: Pipelined
    part: Literal["enter", "stage", "between", "leave"]
    place: Place | None = None

    def __call__(self, params: PyTree, x: PyTree, y: PyTree = None, *key: Tensor) -> Any:
        """Calls the method with the arguments in the method's order."""
        of, place = self.of, self.place
        if place is None:
            return of.enter(params, x, *key) if self.part == "enter" else of.leave(params, x, y, *key)
        return getattr(of, self.part)(params, x, y, place, key)

    @property
    def title(self) -> str:
        """Returns a description in words."""
        place = self.place
        if place is None:
            return "in front of the layers" if self.part == "enter" else "behind the layers"
        ends = [what for what, is_so in (("first", place.begins), ("last", place.ends)) if is_so]
        return " ".join(["the", *ends, "stage, from layer", str(place.row), "on"])


@dataclasses.dataclass(frozen=True)
class PartitionedPipeline(Pipelined):
    """Pipelined loss with partitioned stages.

    Attributes:
        of: loss, as written for a single device along the axes of the partition.
        parted: partition of the whole loss, bound to leaves.
    """

    of: Pipelined
    parted: Partitioned

    @staticmethod
    def made(parted: Partitioned, of: Pipelined) -> "PartitionedPipeline":
        """Returns the stages of `of`, partitioned as `parted` is."""
        same = {f.name: getattr(of, f.name) for f in dataclasses.fields(Pipelined)}
        return PartitionedPipeline(**same, of=of, parted=parted)

    def __call__(self, params: PyTree, batch: PyTree, *key: Tensor) -> Any:
        """Returns the loss."""
        if axis_size(self.axis) == 1:
            return self.parted(params, batch, *key)
        return super().__call__(params, batch, *key)

    def enter(self, params: PyTree, batch: PyTree, *key: Tensor) -> PyTree:
        """See `Pipelined`."""
        return self._run_function(StageFunction(self.of, "enter"), params, batch, None, *key)

    @property
    def begins(self) -> tuple[str, Callable[..., Any]]:
        """See `Pipelined`."""
        return self.of.begins

    @property
    def without_collectives(self) -> tuple[Pipelined, tuple[str, ...]]:
        """See `Pipelined`."""
        return self.of, self.parted.axes

    def stage(self, params: PyTree, batch: PyTree, given: PyTree, place: Place, key: tuple[Tensor, ...]) -> Any:
        """See `Pipelined`."""
        return self._run_function(StageFunction(self.of, "stage", place), params, batch, given, *key)

    def between(self, params: PyTree, batch: PyTree, h: PyTree, place: Place, key: tuple[Tensor, ...]) -> PyTree:
        """See `Pipelined`."""
        return self._run_function(StageFunction(self.of, "between", place), params, batch, h, *key)

    def leave(self, params: PyTree, h: PyTree, batch: PyTree, *key: Tensor) -> Any:
        """See `Pipelined`."""
        return self._run_function(StageFunction(self.of, "leave"), params, h, batch, *key)

    def _run_function(self, f: StageFunction, params: PyTree, *args: Any) -> Any:
        return dataclasses.replace(self.parted, inner=f)(params, *args)

    # `of` defines how layers are cut.

    def stacks(self, params: PyTree) -> Sequence[PyTree]:
        """See `Pipelined`."""
        return self.of.stacks(params)

    def kinds(self, stack: PyTree) -> Sequence[PyTree]:
        """See `Pipelined`."""
        return self.of.kinds(stack)

    def cut(self, rows: Sequence[Sequence[int]]) -> list[bool]:
        """See `Pipelined`."""
        return self.of.cut(rows)

    def shares(self, rows: Sequence[Sequence[int]]) -> list[int]:
        """See `Pipelined`."""
        return self.of.shares(rows)

    def tied(self, params: PyTree) -> PyTree:
        """See `Pipelined`."""
        return self.of.tied(params)

    def firsts(self, rows: Sequence[Sequence[int]], rank: int) -> list[int]:
        """See `Pipelined`."""
        return self.of.firsts(rows, rank)

    def shared_layers(self, state: PipelineState, stage: int, here: bool) -> PipelineState:
        """See `Pipelined`."""
        return self.of.shared_layers(state, stage, here)
