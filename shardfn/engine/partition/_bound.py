"""Binds a step's pipelined loss, and the partitioned functions in the loss, to the leaves that the step passes."""

import dataclasses
from typing import Any

from shardfn.engine.loss import Accumulated, Mixed, Unwrapped, of_whole_batch
from shardfn.engine.pipeline import Pipelined
from shardfn.engine.plan import LeafViews, Pick, Planner

from ._partitioned import Partitioned
from ._pipelined_partitioned import PartitionedPipeline


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
            f" {staged.axis!r} have separate layers, which are no blocks of a whole. The axes must differ:"
            " name another axis."
        )
