"""The evaluation of a step: sums over a batch, and the loop over batches until no rank has one. Then sums of all ranks.

A metric other than a `WeightedMean` is a mean over rows, and its weight is the number of rows.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from shardfn.collectives import AnyControl
from shardfn.core import (
    Mesh,
    PyTree,
    a_kind,
    broadcast_prefix,
    evaluating,
    not_scalar,
    raise_all,
    tree_leaves,
    tree_map,
    tree_paths,
    tree_structure,
    tree_unflatten,
)
from shardfn.engine.agreement import comms_of
from shardfn.engine.execution import MAX_APPLIED
from shardfn.engine.loss import (
    BoundedCache,
    Jitted,
    Loss,
    Mixed,
    ModelState,
    Unwrapped,
    WeightedMean,
    check_metrics,
    is_spec,
    of_whole_batch,
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
        parts: parts of the step.
        planner: planner of the step.
        jitted: the step's jit, if it has one.
        over_params: makes a function over the step's parameters.
        state_specs: state specs of the model state.
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
        """Returns the means of the metrics, None = of the step's loss. See `step.evaluate`."""
        f, planner = self._measure_with(metrics), self._planner
        kept = [state.model_state] if self._parts.has_state else []

        def sums(batch: PyTree) -> dict[str, Tensor]:
            with torch.no_grad(), beside_model_state(state.model_state):
                return f(state.params, *kept, batch, *keys)

        control = comms_of(planner.mesh).control
        return evaluate(sums, batches, planner.batch, planner.batch_axes, planner.mesh, control)

    def _measure_with(self, metrics: Callable[..., Any] | None) -> Sharded:
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
        metrics: third argument, None = the step's loss.
        has_state: whether the step has a model state, which metrics then take.

    Raises:
        TypeError: the remedy is in the message.
    """
    if isinstance(batches, Tensor | Mapping) or not isinstance(batches, Iterable):
        raise TypeError(
            f"evaluate takes an iterable of batches, and this is a {type(batches).__name__}. Of one batch write"
            " step.evaluate(state, [batch])."
        )
    if metrics is not None and not callable(metrics):
        raise TypeError(
            f"evaluate(metrics=) takes a function metrics(params, batch) -> {{name: value}}, and this is"
            f" {a_kind(metrics)}. Of several functions write one that calls them."
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
    """Returns the means of the metrics over all rows of all ranks, the same floats on all of them. Collective.

    A rank that has no rows runs a row of zeros, since others may wait for its leaves. Its weight is 0.

    Args:
        sums: sums of a batch, by name a total and a weight; collective.
        batches: this rank's.
        specs: how the global batch is cut.
        axes: along which ranks have rows of their own.
        mesh: the mesh.
        control: control plane.

    Raises:
        ValueError: no rank has a row, or a metric has no weight.
    """
    own, rest = dict[str, Tensor](), iter(batches)
    while True:
        with told_before(control):
            batch = next(rest, None)
            rows = batch is not None and max(_count_rows(batch, specs)) > 0
        there = control.exchange(2 if rows else 1 if batch is not None else 0)
        if not any(there):
            break
        if 2 not in there:
            continue  # batches without rows: no rank runs them
        if 0 in there:
            shapes = control.gather(None if batch is None else tree_map(_drop_values, batch))
            batch = shapes[_find_nearest_rank(there, specs, mesh)] if batch is None else batch
        found = sums(batch if rows else make_zero_row(batch, specs, mesh.device))
        for name, x in found.items():
            x = x if rows else torch.zeros_like(x)
            own[name] = own[name] + x if name in own else x
    return _compute_means(own, axes, mesh, control)


def _find_nearest_rank(there: list[int], specs: PyTree, mesh: Mesh) -> int:
    """Returns the rank whose batch shows the shape of this one's.

    It has one, and the same part of all dims but the rows.
    """
    rows = {a for spec in tree_leaves(specs, is_leaf=is_spec) for a in mesh.axes(spec.dim_axes(0))}
    return next(r for r in [*mesh.along(rows), *range(mesh.size)] if there[r])


def _compute_means(own: dict[str, Tensor], axes: tuple[str, ...], mesh: Mesh, control: AnyControl) -> dict[str, float]:
    names = list(own)
    mine = torch.stack([own[name] for name in names]).tolist() if names else []
    of_all: Any = control.gather((names, mine))
    # In rank order, of those that differ from this one along `axes` alone: so all have the same sum.
    near = mesh.along(axes)
    if not names:
        raise ValueError(
            "evaluate: no rank has a row. Pass batches of at least one row, on one rank or more."
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


Metric = Callable[..., Any]


def evaluation(loss: Loss, metrics: Metric | None, specs: PyTree, *, has_aux: bool, has_state: bool) -> Metric:
    """Returns `sums(params, batch[, key])`, or with `has_state` `sums(params, model_state, batch[, key])`.

    They are sums of this rank's rows. Modules run in eval mode, and dropout is off.

    Args:
        loss: the step's, bound to its leaves. A batch is not cut in microbatches.
        metrics: measures other values than the loss: `metrics(params, batch)`, or with `has_state` `metrics(params,
            model_state, batch)`, in the precision of the loss.
        specs: how the global batch is cut.
        has_aux: whether the loss returns aux.
        has_state: whether the loss takes a model state.

    Returns:
        A function to name -> [total, weight], float64. It raises `TypeError` or `ValueError` for a value that is not a
        metric.
    """
    loss = of_whole_batch(loss)

    def sums(params: PyTree, *args: Any) -> dict[str, Tensor]:
        state, batch, *key = args if has_state else ((), *args)
        if metrics is not None:
            measure = Mixed(metrics, loss.policy, has_state=has_state) if isinstance(loss, Mixed) else metrics
            with evaluating():
                found = measure(params, *([state] if has_state else []), batch)
            return _check_sums(found, "what metrics= returns", batch, specs)
        with evaluating(), ModelState(state).through():
            out = loss(params, batch, *key)
        main, aux = out if has_aux else (out, {})
        return _check_sums({"loss": main, **aux}, "the loss and its aux", batch, specs)

    return sums


def _count_rows(batch: PyTree, specs: PyTree) -> list[int]:
    """Returns the numbers of rows of the leaves that are cut, else of the first leaf with rows, or 1.

    Leaves may have different numbers of rows, such as the patches of images.
    """
    leaves = tree_leaves(batch)
    sizes = [x.shape[0] for x, c in zip(leaves, _cuts_rows(batch, specs), strict=True) if c]
    return sizes or [next((len(x) for x in leaves if isinstance(x, Tensor) and x.ndim), 1)]


def make_zero_row(batch: PyTree, specs: PyTree, device: torch.device) -> PyTree:
    """Returns a batch with a row of zeros, for a rank without a batch. Only the shapes and dtypes of `batch` count."""
    rows = [
        torch.zeros((1, *x.shape[1:]) if cut else x.shape, dtype=x.dtype, device=device) if isinstance(x, Tensor) else x
        for x, cut in zip(tree_leaves(batch), _cuts_rows(batch, specs), strict=True)
    ]
    return tree_unflatten(tree_structure(batch), rows)


def _drop_values(x: Any) -> Any:
    """Returns a leaf that is cheap to send: shape and dtype."""
    return torch.empty_like(x, device="meta") if isinstance(x, Tensor) else x


def _cuts_rows(batch: PyTree, specs: PyTree) -> list[bool]:
    found = broadcast_prefix(specs, batch, is_spec, names=("batch spec", "batch"))
    pairs = zip(tree_leaves(batch), found, strict=True)
    return [isinstance(x, Tensor) and x.ndim > 0 and bool(spec.dim_axes(0)) for x, spec in pairs]


def _check_sums(found: Any, what: str, batch: PyTree, specs: PyTree) -> dict[str, Tensor]:
    if not isinstance(found, dict) or not found:
        raise TypeError(f"{what} must be a dict of scalars with a name each; got {type(found).__name__} {found!r}.")
    rows = {n for n in _count_rows(batch, specs) if n} or {0}
    means = [name for name, x in found.items() if not isinstance(x, WeightedMean)]
    if means and len(rows) > 1:
        named = zip(tree_paths(batch, "batch"), tree_leaves(batch), _cuts_rows(batch, specs), strict=True)
        raise_all(
            ValueError,
            f"{', '.join(map(repr, means))} is a mean over the rows of a batch, whose leaves have different numbers of"
            " rows; return WeightedMean(total, weight) in its place:",
            [f"{path} has {len(x)} rows" for path, x, cut in named if cut],
        )
    pairs = {name: WeightedMean(x, max(rows)) if name in means else x for name, x in found.items()}
    raise_all(
        ValueError,
        f"{what}: 0-d tensors, numbers or WeightedMeans of them are wanted; take a mean, or a total and its weight:",
        [f"{name!r} is {told}" for name, pair in pairs.items() for x in pair if (told := not_scalar(x))],
    )
    device = next((x.device for pair in pairs.values() for x in pair if isinstance(x, Tensor)), None)
    out = {}
    for name, (total, weight) in pairs.items():
        row = [torch.as_tensor(x, device=device).detach().to(torch.float64) for x in (total, weight)]
        # A mean is made a total. A `WeightedMean` is one already.
        out[name] = torch.stack([row[0] * row[1], row[1]] if name in means else row)
    return out
