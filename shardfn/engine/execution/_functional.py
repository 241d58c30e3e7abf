"""The step as a pure function of tensors, for `torch.func.vmap`, `grad`, `jvp` and the others.

It is the slow reference of the step. It does not donate, write in place, read values back to Python or agree on
anything beforehand. Parameters enter through the differentiable collectives, whose transposes sum the gradients, and
the optimizer's pure `update` runs on this rank's rows. So torch's transforms pass through it as through any function:
`vmap` trains a population, `grad` differentiates through training.

torch.func takes no saved-tensor hooks, so gathered parameters stay alive from the forward to the backward; stacked
leaves are gathered whole.
"""

import dataclasses
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.func import grad_and_value

from shardfn._torch import in_other_words, maybe_get_level
from shardfn.collectives import GlobalTensor, axis_size, local, psum, track_axis_types
from shardfn.core import PyTree, tree_leaves, tree_map, tree_structure, tree_unflatten
from shardfn.engine.loss import (
    Loss,
    ModelState,
    Value,
    called,
    finished,
    fold,
    num_microbatches,
    refuse_gradient_of,
    totals,
    wrapped_like,
)
from shardfn.engine.plan import Plan
from shardfn.engine.transfers import (
    FoundGradients,
    Metrics,
    StepParts,
    as_tree,
    enter_purely,
    of_update,
    reduce_purely,
    refresh_purely,
    rescaled,
    shard_rows,
)
from shardfn.optim import apply_updates, sum_squares
from shardfn.state import TrainState, scale_of

from ._step_parts import check_canonical
from ._step_run import UpdateArgs, named, one_step
from ._update import next_state, rule_of


def pure_step(
    plan: Plan, state: TrainState, parts: StepParts, args: tuple[Any, ...]
) -> tuple[TrainState, dict[str, Tensor]]:
    """Returns the next state and the metrics. See `sharded_step`. The mesh must be bound.

    Args:
        plan: the layout.
        state: the current state, which is not changed.
        parts: the parts of the step. If a loss scale overflows, the new state has the values of the old one.
        args: this rank's batch, and a key if the loss takes one.
    """
    return one_step(_Pure(parts, plan.with_whole_stacks(), state, args))


def pure_gradients(plan: Plan, state: TrainState, parts: StepParts, args: tuple[Any, ...]) -> FoundGradients:
    """Returns the gradients of `pure_step`, and the model state and the metrics that come with them.

    The mesh must be bound.
    """
    run = _Pure(parts, plan.with_whole_stacks(), state, args)
    out = run.differentiate()
    metrics, _ = run.measure(out)
    del metrics["skipped"]
    leaves = iter(tree_leaves(out[1]))
    grads = as_tree(plan, {i: next(leaves) for i, leaf in enumerate(plan.leaves) if leaf.trainable})
    return FoundGradients(grads, wrapped_like(tree_leaves(run.model_state.now), state.model_state), metrics)


def pure_update(
    plan: Plan, state: TrainState, parts: StepParts, passed: UpdateArgs
) -> tuple[TrainState, dict[str, Tensor]]:
    """Returns the other half of `pure_step`: the next state, and the metrics of the update. The mesh must be bound."""
    parts = dataclasses.replace(parts, finish=passed.finish(parts))
    run, gradient = _Pure(parts, plan.with_whole_stacks(), state, ()), local(passed.grads)
    if passed.model_state is not None:
        run.model_state.now = local(passed.model_state)
    metrics = of_update(run.norm(gradient), passed.finite, scale_of(state))
    return run.choose(metrics, lambda: run.updated(gradient)), metrics


class _Pure:
    """An `Executor` of differentiable functions: it computes both outcomes of `choose`, and writes nothing in place.

    It folds microbatches in one order under any schedule, as torch.func runs a forward and its backward in a single
    call.
    """

    def __init__(self, parts: StepParts, plan: Plan, state: TrainState, args: tuple[Any, ...]) -> None:
        check_canonical(plan, parts)
        self._parts, self._plan, self._state, self._args = parts, plan, state, args
        self._blocks, self._by = [x.local for x in tree_leaves(state.params)], scale_of(state)
        self.model_state = ModelState(local(state.model_state))
        self._specs = tree_unflatten(plan.treedef, [leaf.shard if leaf.trainable else None for leaf in plan.leaves])

    def differentiate(self) -> "tuple[_MicrobatchSums, PyTree]":
        plan = self._plan
        sums, grads = _differentiate_microbatches(
            plan, self._parts, enter_purely(plan, self._blocks), self._args, self._by, self.model_state
        )
        # One message for total, weight and aux.
        sums = sums._replace(row=list(psum(torch.stack(sums.row), plan.batch_axes)))
        ranks = plan.mesh.axis_size(plan.batch_axes)
        scale = 1.0 / sums.row[1] if sums.weighted else 1.0 / (ranks * num_microbatches(self._parts.loss))
        scale = scale if self._by is None else scale / self._by.to(sums.row[0])
        summed = reduce_purely(plan, grads)
        own = [
            (summed[i] * scale).to(summed[i].dtype) if leaf.trainable else None for i, leaf in enumerate(plan.leaves)
        ]
        return sums, tree_unflatten(plan.treedef, own)

    def measure(self, out: "tuple[_MicrobatchSums, PyTree]") -> tuple[Metrics, None]:
        sums, gradient = out
        norm = self.norm(gradient).to(sums.row[0].device)
        aux = ((name, sums.mean(k + 1)) for k, name in enumerate(sums.names))
        return named(sums.mean(0).to(sums.dtype), norm, aux, self._by), None

    def norm(self, gradient: PyTree) -> Tensor:
        """Returns the norm of the averaged gradient."""
        return sum_squares(gradient, self._specs).double().sum().sqrt()

    def choose(self, metrics: Metrics, update: Callable[[], TrainState]) -> TrainState:
        # Both are computed: under vmap one member may overflow while another does not.
        new = update()
        if self._parts.loss_scale is None:
            return new
        metrics["skipped"] = ~metrics["finite"]
        return rescaled(
            _select_state(metrics["finite"], new, self._state), self._state, self._parts.loss_scale, metrics
        )

    def update(self, out: "tuple[_MicrobatchSums, PyTree]", scale: Tensor | None) -> TrainState:
        del scale
        return self.updated(out[1])

    def updated(self, gradient: PyTree) -> TrainState:
        """Returns the state after an update by this rank's rows of the averaged gradient."""
        plan, blocks = self._plan, self._blocks
        rows = [
            shard_rows(plan, leaf, b) if leaf.trainable else None for leaf, b in zip(plan.leaves, blocks, strict=True)
        ]
        old, rule = tree_unflatten(plan.treedef, rows), rule_of(plan, self._parts.optimizer)
        updates, opt_state = rule.update(gradient, local(self._state.opt_state), old, specs=self._specs)
        fresh = iter(tree_leaves(apply_updates(old, updates)))
        new = refresh_purely(plan, blocks, [None if r is None else next(fresh) for r in rows])
        kept = finished(self._parts.finish, self.model_state.now)
        return next_state(plan, self._state, (new, opt_state, kept))


def global_mean(loss: Loss, axes: tuple[str, ...], *, has_aux: bool, has_state: bool) -> Callable[..., Tensor]:
    """Returns the mean of a loss over the batch of all ranks along `axes`, the same on all of them.

    `mean(params, batch[, key])`. With `has_state`, `mean(params, model_state, batch[, key])`.
    """

    def mean(params: PyTree, *args: Any) -> Tensor:
        state, batch, *key = args if has_state else ((), *args)
        through = ModelState(state)

        def one(inner: Loss, batch: PyTree) -> list[Value]:
            with through.through():
                value = _evaluate_loss(inner, params, (batch, *key), has_aux)
            through.now = tree_map(Tensor.detach, through.now)  # a constant of the next forward
            return [value]

        own, weight = totals(fold(loss, batch, one, operator.add))
        total = psum(own, axes)
        if weight is not None:
            return total / psum(weight, axes).to(total.dtype)
        return total / (axis_size(axes) * num_microbatches(loss))

    return mean


def pure_apply(plan: Plan, params: PyTree, f: Callable[[PyTree], Any]) -> Any:
    """`f(params)` with params as a function sees them, and its values followed. The mesh must be bound."""
    wholes = enter_purely(plan.with_whole_stacks(), [x.local for x in tree_leaves(params)], plan.following_function)
    with track_axis_types(plan.following_function):
        return f(tree_unflatten(plan.treedef, wholes))


def pure_loss(plan: Plan, params: PyTree, f: Callable[[PyTree], Any]) -> Any:
    """`f(params)` with params as a loss sees them, for results that are each rank's own. The mesh must be bound."""
    plan = plan.with_whole_stacks()
    wholes = enter_purely(plan, [x.local for x in tree_leaves(params)])
    with plan.follows():
        return f(tree_unflatten(plan.treedef, wholes))


def _select_state(finite: Tensor, new: TrainState, old: TrainState) -> TrainState:
    """Returns the values of one state or of the other, by a 0-d condition."""

    def either(a: Any, b: Any) -> Any:
        if isinstance(a, GlobalTensor):
            return b.with_block(torch.where(finite, a.local, b.local))
        return torch.where(finite.to(a.device), a, b)

    return tree_map(either, new._replace(loss_scale=()), old._replace(loss_scale=()))


class _MicrobatchSums(NamedTuple):
    """The sums over microbatches: total, weight, then total and weight of each aux, in float64."""

    row: list[Tensor]
    names: list[str]
    weighted: bool
    dtype: torch.dtype

    def mean(self, k: int) -> Tensor:
        return self.row[2 * k] / self.row[2 * k + 1]


def _differentiate_microbatches(
    plan: Plan,
    parts: StepParts,
    wholes: Sequence[Tensor],
    args: tuple[Any, ...],
    scale: Tensor | None,
    model_state: ModelState,
) -> tuple[_MicrobatchSums, dict[int, Tensor]]:
    """Returns the sums over microbatches of this rank's losses and of their gradients with respect to whole leaves.

    The gradients are multiplied by `scale`, and added up in their accumulation dtypes. Each microbatch takes the
    `model_state` that the one before has left.
    """
    train = [i for i, leaf in enumerate(plan.leaves) if leaf.trainable]
    accum = [plan.leaves[i].dtypes.accum for i in train]
    seen: list[Value] = []

    def one(inner: Loss, batch: PyTree) -> tuple[list[Tensor], list[Tensor]]:
        def total(handles: list[Tensor]) -> tuple[Tensor, tuple[tuple[Tensor, ...], list[Tensor]]]:
            leaves = list(wholes)
            for i, handle in zip(train, handles, strict=True):
                leaves[i] = handle
            with model_state.through(), plan.follows():
                value = _evaluate_loss(inner, tree_unflatten(plan.treedef, leaves), (batch, *args[1:]), parts.has_aux)
            # A weight of this level depends on the parameters that are differentiated here; outer levels may use it.
            if handles and value.weight is not None and _find_level(value.weight) == _find_level(handles[0]):
                refuse_gradient_of(value.weight)
            # Beside `grad_and_value`, which passes tensors only. Names and dtypes are the same in all microbatches.
            seen[:] = [value]
            scaled = value.total if scale is None else value.total * scale.to(value.total)
            return scaled, (tuple(_as_row(value)), tree_leaves(model_state.now))

        # torch.func.grad refuses an empty tree.
        both = grad_and_value(total, has_aux=True) if train else lambda handles: ([], total(handles))
        structure = tree_structure(model_state.now)
        grads, (_, (row, kept)) = both([wholes[i] for i in train])
        model_state.now = tree_unflatten(structure, kept)  # unwrapped from the gradient's transform
        return [g.to(d) for g, d in zip(grads, accum, strict=True)], list(row)

    grads, row = fold(parts.loss, args[0], one, _add_pairs)
    last = seen[-1]
    sums = _MicrobatchSums(row, sorted(last.aux), last.weight is not None, last.total.dtype)
    return sums, dict(zip(train, grads, strict=True))


def _add_pairs(
    a: tuple[list[Tensor], list[Tensor]], b: tuple[list[Tensor], list[Tensor]]
) -> tuple[list[Tensor], list[Tensor]]:
    grads, row = ([x + y for x, y in zip(old, new, strict=True)] for old, new in zip(a, b, strict=True))
    return grads, row


# Transforms of torch.func refuse saved-tensor hooks. In torch 2.11 a checkpoint inside of vmap saves its inputs first.
_REFUSALS = ("saved tensor hooks", "vmap over _NoopSaveInputs")
_HOOKS = (
    "the loss uses saved-tensor hooks (torch.utils.checkpoint, or another offload of activations), which"
    " torch.func.grad and vjp refuse; use the loss without them inside a torch.func transform."
)


def _evaluate_loss(loss: Loss, params: PyTree, args: tuple[Any, ...], has_aux: bool) -> Value:
    with in_other_words(_REFUSALS, _HOOKS):
        return called(loss, params, args, has_aux)


def _find_level(x: Tensor) -> int:
    """Returns the level of the innermost torch.func transform that a tensor belongs to."""
    return maybe_get_level(x)


def _as_row(value: Value) -> list[Tensor]:
    weight = torch.ones_like(value.total) if value.weight is None else value.weight
    pairs = [x for name in sorted(value.aux) for x in value.aux[name]]
    return [x.to(device=value.total.device, dtype=torch.float64) for x in (value.total, weight, *pairs)]
