"""The loop of `step.evaluate`: batch after batch, until no rank has one; then the sums of all ranks."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from shardfn.collectives import AnyControl
from shardfn.core import Mesh, PyTree, a_kind, raise_all, tree_leaves
from shardfn.engine.agreement import comms_of
from shardfn.engine.execution import (
    MAX_APPLIED,
    evaluation,
    has_rows,
    one_row,
    without_values,
)
from shardfn.engine.loss import (
    BoundedCache,
    Jitted,
    Unwrapped,
    check_metrics,
    is_spec,
    told_before,
)
from shardfn.engine.plan import Planner
from shardfn.engine.transfers import StepParts
from shardfn.modules import beside_model_state
from shardfn.state import TrainState

from ._sharded import Sharded


class Measures:
    """The functions that `step.evaluate` runs; a call with the metrics of an earlier one reuses its function.

    Args:
        parts: of the step.
        planner: of the step.
        jitted: the step's jit, if it has one.
        over_params: makes a function over the step's parameters.
        state_specs: of the model state.
    """

    def __init__(
        self,
        parts: StepParts,
        planner: Planner,
        jitted: Jitted | None,
        over_params: Callable[..., Sharded],
        state_specs: PyTree,
    ) -> None:
        self._parts, self._planner, self._jitted = parts, planner, jitted
        self._over_params, self._state_specs = over_params, state_specs
        self._made = BoundedCache[Sharded](MAX_APPLIED)  # each may hold graphs

    def evaluate(
        self,
        metrics: Callable[..., Any] | None,
        state: TrainState,
        batches: Iterable[PyTree],
        keys: tuple[Any, ...],
    ) -> dict[str, float]:
        """Returns the means of the metrics, None = of the step's loss; see `step.evaluate`."""
        f, planner = self._of(metrics), self._planner
        kept = [state.model_state] if self._parts.has_state else []

        def sums(batch: PyTree) -> dict[str, Tensor]:
            with torch.no_grad(), beside_model_state(state.model_state):
                return f(state.params, *kept, batch, *keys)

        control = comms_of(planner.mesh).control
        return evaluate(sums, batches, planner.batch, planner.batch_axes, planner.mesh, control)

    def _of(self, metrics: Callable[..., Any] | None) -> Sharded:
        found = self._made.find(metrics)
        if found is None:
            parts = self._parts
            batch, flags = self._planner.batch, {"has_aux": parts.has_aux, "has_state": parts.has_state}
            f = evaluation(parts.loss, metrics, batch, **flags)
            jitted = None if self._jitted is None else dataclasses.replace(self._jitted, inner=f)
            specs = [self._state_specs] if parts.has_state else []
            found = self._over_params(Unwrapped(f, jitted), "evaluate", *specs)
            self._made.keep(metrics, found)
        return found


def check_batches(batches: Any, metrics: Any, *, has_state: bool) -> None:
    """Refuses one batch where an iterable of batches is expected, and metrics that `step.evaluate` cannot call.

    Args:
        batches: the second argument of `step.evaluate`.
        metrics: its third argument, None = the step's loss.
        has_state: whether the step has a model state, which metrics then take.

    Raises:
        TypeError: the remedy is in the message.
    """
    if isinstance(batches, Tensor | Mapping) or not isinstance(batches, Iterable):
        raise TypeError(
            f"evaluate takes an iterable of batches, and this is a {type(batches).__name__}; of one batch write"
            " step.evaluate(state, [batch])."
        )
    if metrics is not None and not callable(metrics):
        raise TypeError(
            f"evaluate(metrics=) takes a function metrics(params, batch) -> {{name: value}}, and this is"
            f" {a_kind(metrics)}; of several functions write one that calls them."
        )
    if metrics is not None:
        check_metrics(metrics, has_state=has_state)


def evaluate(
    sums: Callable[[PyTree], dict[str, Tensor]],
    batches: Iterable[PyTree],
    specs: PyTree,
    axes: tuple[str, ...],
    mesh: Mesh,
    control: AnyControl,
) -> dict[str, float]:
    """The means of the metrics over all rows of all ranks, the same floats on all of them. Collective.

    A rank that has no rows runs a row of zeros, since others may wait for its leaves; its weight is 0.

    Args:
        sums: of a batch, by name a total and a weight; collective.
        batches: this rank's.
        specs: how the global batch is cut.
        axes: along which ranks have rows of their own.
        mesh: the mesh.
        control: its control plane.

    Raises:
        ValueError: no rank has a row, or a metric has no weight.
    """
    own, rest = dict[str, Tensor](), iter(batches)
    while True:
        with told_before(control):
            batch = next(rest, None)
            rows = batch is not None and has_rows(batch, specs)
        there = control.exchange(2 if rows else 1 if batch is not None else 0)
        if not any(there):
            break
        if 2 not in there:
            continue  # batches without rows: no rank runs them
        if 0 in there:
            shapes = control.gather(None if batch is None else without_values(batch))
            batch = shapes[_nearest(there, specs, mesh)] if batch is None else batch
        found = sums(batch if rows else one_row(batch, specs, mesh.device))
        for name, x in found.items():
            x = x if rows else torch.zeros_like(x)
            own[name] = own[name] + x if name in own else x
    return _means(own, axes, mesh, control)


def _nearest(there: list[int], specs: PyTree, mesh: Mesh) -> int:
    """The rank whose batch shows the shape of this one's: it has one, and the same part of all dims but the rows."""
    rows = {a for spec in tree_leaves(specs, is_leaf=is_spec) for a in mesh.axes(spec.dim_axes(0))}
    return next(r for r in [*mesh.along(rows), *range(mesh.size)] if there[r])


def _means(own: dict[str, Tensor], axes: tuple[str, ...], mesh: Mesh, control: AnyControl) -> dict[str, float]:
    names = list(own)
    mine = torch.stack([own[name] for name in names]).tolist() if names else []
    of_all: Any = control.gather((names, mine))
    # In rank order, of those that differ from this one along `axes` alone: so all have the same sum.
    near = mesh.along(axes)
    if not names:
        raise ValueError(
            "evaluate: no rank has a row; pass batches of at least one row, on one rank or more."
            " An iterator that was read before has nothing left: make it again, or pass a list."
        )
    if any(of_all[r][0] != names for r in near):
        raise ValueError(f"evaluate: ranks measure other metrics: {[of_all[r][0] for r in near]}.")
    sums = [[sum(of_all[r][1][k][i] for r in near) for i in (0, 1)] for k in range(len(names))]
    raise_all(
        ValueError,
        "evaluate: metrics without weight have no mean; give each batch that counts a weight above 0:",
        [
            f"{name!r} has a total of {total} and weight 0"
            for name, (total, weight) in zip(names, sums, strict=True)
            if not weight
        ],
    )
    return {name: total / weight for name, (total, weight) in zip(names, sums, strict=True)}
