"""Binds a step's pipelined loss, and the partitioned functions in the loss, to the leaves that the step passes.

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
from shardfn.engine.loss import Accumulated, Mixed, Unwrapped, of_whole_batch
from shardfn.engine.pipeline import Pipelined, PipelineState, Place
from shardfn.engine.plan import LeafViews, Pick, Planner

from ._partitioned import Partitioned


class StageFunction(NamedTuple):
    """Wraps one method of a pipelined loss as a loss that `partition` accepts.

    Attributes:
        of: pipelined loss.
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


def bind(unwrapped: Unwrapped, planner: Planner) -> Unwrapped:
    """Gives leaves to a pipelined loss, and to the partitioned functions of a step's loss.

    Raises:
        ValueError: an axis of the partition cuts the batch, or stages of a pipeline lie along the axis, or a function
            is partitioned twice.
    """
    loss = _bind_function(unwrapped.loss, LeafViews(planner))
    mixed = of_whole_batch(loss)
    return unwrapped._replace(loss=loss, mixed=mixed if isinstance(mixed, Mixed) else unwrapped.mixed)


def _bind_function(f: Any, views: LeafViews) -> Any:
    if isinstance(f, Accumulated | Mixed):
        return dataclasses.replace(f, inner=_bind_function(f.inner, views))
    if isinstance(f, Pipelined):
        return dataclasses.replace(_bind_stages(f, views), views=views)
    if not isinstance(f, Partitioned):
        return f
    for axis in set(f.axes) & set(views.planner.batch_axes):
        raise ValueError(
            f"partition(loss, axes={f.axes!r}): the batch is cut along {axis!r}, but every rank must have"
            " the whole batch. Pass batch=P('dp'), or P(), and the same rows to all ranks along it."
        )
    bound = dataclasses.replace(f, views=views)
    if isinstance(f.inner, Pipelined):
        _check_apart(f, f.inner)
        if _bind_stages(f.inner, views) is not f.inner:
            raise ValueError(
                "partition(pipeline(...)) expected functions without partition, got partitioned functions."
                " Drop the partition around the pipeline, or those inside."
            )
        return PartitionedPipeline.made(bound, dataclasses.replace(f.inner, views=views))
    return bound


def _bind_stages(of: Pipelined, views: LeafViews) -> Pipelined:
    """Returns the loss with bound partitioned functions, or the same loss without such functions."""
    found: list[Partitioned] = []

    def change_function(f: Any, pick: Pick) -> Any:
        if isinstance(f, Partitioned):
            _check_apart(f, of)
            found.append(f)
        return _bind_function(f, dataclasses.replace(views, pick=pick))

    made = of.with_functions(change_function)
    return made if found else of


def _check_apart(parted: Partitioned, staged: Pipelined) -> None:
    """Refuses to partition along the axis of the stages.

    Raises:
        ValueError: the partition's axes include the axis of the stages.
    """
    if staged.axis in parted.axes:
        raise ValueError(
            f"partition(axes={parted.axes!r}) and a pipeline along {staged.axis!r}: ranks along"
            f" {staged.axis!r} have separate layers, which are not blocks of a whole. The axes must differ:"
            " name another axis."
        )
