"""The step as a pure function of tensors: what runs inside `torch.func.vmap`, `grad`, `jvp` and the others.

It is the slow reference of the step. Nothing is donated, written in place, read back to Python or agreed on beforehand;
parameters enter through the differentiable collectives, whose transposes sum the gradients, and the optimizer's pure
`update` runs on this rank's rows. So torch's transforms pass through it as through any function: `vmap` trains a
population, `grad` differentiates through training.

torch.func takes no saved-tensor hooks, so gathered parameters stay alive from the forward to the backward; stacked
leaves are gathered whole.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C._functorch import maybe_get_level
from torch.func import grad_and_value

from shardfn.collectives import GlobalTensor, local, psum
from shardfn.core import PyTree, tree_leaves, tree_map, tree_unflatten
from shardfn.optim import GradientTransformation, LossScale, apply_updates, sum_squares

from ._accumulate import microbatches
from ._loss import Loss, Value, called, refuse_gradient_of
from ._plan import Plan
from ._pure_transfers import enter, own_rows, reduce, refresh
from ._state import TrainState, scale_of
from ._update import next_state, rule_of


def pure_step(
    plan: Plan,
    state: TrainState,
    loss: Loss,
    optimizer: GradientTransformation,
    args: tuple[Any, ...],
    *,
    has_aux: bool,
    loss_scale: LossScale | None = None,
) -> tuple[TrainState, dict[str, Tensor]]:
    """The next state and the metrics; see `sharded_step`. The mesh must be bound.

    Args:
        plan: the layout.
        state: the current state, which stays as it is.
        loss: the user's loss, possibly accumulated.
        optimizer: the optimizer.
        args: this rank's batch, and a key if the loss takes one.
        has_aux: whether the loss returns aux.
        loss_scale: the rule of the loss scale; a step that overflows gives the values of the state it was given.
    """
    plan = plan.with_whole_stacks()
    blocks, by = [x.local for x in tree_leaves(state.params)], scale_of(state)
    sums, grads = _differentiated(plan, loss, enter(plan, blocks), args, has_aux, by)
    sums = sums._replace(row=list(psum(torch.stack(sums.row), plan.batch_axes)))
    scale = 1.0 / sums.row[1] if sums.weighted else 1.0 / (plan.mesh.axis_size(plan.batch_axes) * sums.num_microbatches)
    scale = scale if by is None else scale / by.to(sums.row[0])
    summed = reduce(plan, grads)
    rows = [own_rows(leaf, b) if leaf.trainable else None for leaf, b in zip(plan.leaves, blocks, strict=True)]
    own = [(summed[i] * scale).to(summed[i].dtype) if r is not None else None for i, r in enumerate(rows)]
    gradient, old = tree_unflatten(plan.treedef, own), tree_unflatten(plan.treedef, rows)
    specs = tree_unflatten(plan.treedef, [leaf.shard if leaf.trainable else None for leaf in plan.leaves])
    rule = rule_of(plan, optimizer)
    updates, opt_state = rule.update(gradient, local(state.opt_state), old, specs=specs)
    fresh = iter(tree_leaves(apply_updates(old, updates)))
    new = refresh(plan, blocks, [None if r is None else next(fresh) for r in rows])
    stepped, metrics = next_state(plan, state, new, opt_state), _metrics(sums, gradient, specs, by)
    if loss_scale is None:
        return stepped, metrics
    finite = metrics["finite"]
    kept = _choose(finite, stepped, state)._replace(loss_scale=loss_scale.update(state.loss_scale, finite))
    return kept, metrics | {"skipped": ~finite}


def pure_loss(plan: Plan, params: PyTree, loss: Loss, args: tuple[Any, ...], *, has_aux: bool) -> Tensor:
    """The mean of the loss over the global batch, the same on all ranks. The mesh must be bound."""
    wholes = enter(plan.with_whole_stacks(), [x.local for x in tree_leaves(params)])
    inner, batches = microbatches(loss, args[0])
    tree = tree_unflatten(plan.treedef, wholes)
    values = [_evaluate(inner, tree, (batch, *args[1:]), has_aux) for batch in batches]
    total = psum(torch.stack([v.total for v in values]).sum(), plan.batch_axes)
    weights = [v.weight for v in values if v.weight is not None]
    if weights:
        return total / psum(torch.stack(weights).sum(), plan.batch_axes).to(total.dtype)
    return total / (plan.mesh.axis_size(plan.batch_axes) * len(values))


def pure_apply(plan: Plan, params: PyTree, f: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """`f(params, *args)` with params as the loss sees them. The mesh must be bound."""
    wholes = enter(plan.with_whole_stacks(), [x.local for x in tree_leaves(params)])
    return f(tree_unflatten(plan.treedef, wholes), *args)


def _choose(finite: Tensor, new: TrainState, old: TrainState) -> TrainState:
    """The one or the other, value by value."""

    def either(a: Any, b: Any) -> Any:
        if isinstance(a, GlobalTensor):
            return GlobalTensor(torch.where(finite, a.local, b.local), a.shape, a.spec, a.mesh, b.memory_kind)
        return torch.where(finite.to(a.device), a, b)

    return tree_map(either, new._replace(loss_scale=()), old._replace(loss_scale=()))


class _Sums(NamedTuple):
    """What microbatches add up to: total, weight, then total and weight of each aux, in float64."""

    row: list[Tensor]
    names: list[str]
    weighted: bool
    num_microbatches: int
    dtype: torch.dtype

    def mean(self, k: int) -> Tensor:
        return self.row[2 * k] / self.row[2 * k + 1]


def _differentiated(
    plan: Plan, loss: Loss, wholes: Sequence[Tensor], args: tuple[Any, ...], has_aux: bool, scale: Tensor | None
) -> tuple[_Sums, dict[int, Tensor]]:
    """The sums over microbatches of this rank's losses and of their gradients with respect to whole leaves.

    The gradients come multiplied by `scale`, added up in their accumulation dtypes.
    """
    inner, batches = microbatches(loss, args[0])
    train = [i for i, leaf in enumerate(plan.leaves) if leaf.trainable]
    accum = [plan.leaves[i].dtypes.accum for i in train]
    seen: list[Value] = []

    def total(handles: list[Tensor], batch: PyTree) -> tuple[Tensor, tuple[Tensor, ...]]:
        leaves = list(wholes)
        for i, handle in zip(train, handles, strict=True):
            leaves[i] = handle
        value = _evaluate(inner, tree_unflatten(plan.treedef, leaves), (batch, *args[1:]), has_aux)
        if handles and value.weight is not None and _level(value.weight) == _level(handles[0]):
            refuse_gradient_of(value.weight)
        seen.append(value)
        seed = value.total if scale is None else value.total * scale.to(value.total)
        return seed, tuple(_row(value))

    # torch.func.grad refuses an empty tree.
    both = grad_and_value(total, has_aux=True) if train else lambda *args: ([], total(*args))
    grads: list[Tensor] = []
    row: list[Tensor] = []
    for batch in batches:
        new, (_, more) = both([wholes[i] for i in train], batch)
        new = [g.to(d) for g, d in zip(new, accum, strict=True)]
        grads = [a + b for a, b in zip(grads, new, strict=True)] if grads else new
        row = [a + b for a, b in zip(row, more, strict=True)] if row else list(more)
    last = seen[-1]
    sums = _Sums(row, sorted(last.aux), last.weight is not None, len(batches), last.total.dtype)
    return sums, dict(zip(train, grads, strict=True))


def _evaluate(loss: Loss, params: PyTree, args: tuple[Any, ...], has_aux: bool) -> Value:
    try:
        return called(loss, params, args, has_aux)
    except RuntimeError as error:
        if "saved tensor hooks" not in str(error):
            raise
        raise ValueError(
            "the loss uses saved-tensor hooks (torch.utils.checkpoint, or another offload of activations), which"
            " torch.func.grad and vjp refuse; use the loss without them inside a torch.func transform."
        ) from error


def _level(x: Tensor) -> int:
    """The transform of torch.func that a tensor is of; those around it do not count."""
    return maybe_get_level(x)


def _row(value: Value) -> list[Tensor]:
    weight = torch.ones_like(value.total) if value.weight is None else value.weight
    pairs = [x for name in sorted(value.aux) for x in value.aux[name]]
    return [x.to(device=value.total.device, dtype=torch.float64) for x in (value.total, weight, *pairs)]


def _metrics(sums: _Sums, gradient: PyTree, specs: PyTree, scale: Tensor | None) -> dict[str, Tensor]:
    norm = sum_squares(gradient, specs).double().sum().sqrt()
    metrics = {
        "loss": sums.mean(0).to(sums.dtype),
        "grad_norm": norm.to(device=sums.row[0].device, dtype=torch.float32),
    }
    metrics["finite"] = torch.isfinite(metrics["loss"]) & torch.isfinite(metrics["grad_norm"])
    metrics["skipped"] = torch.zeros_like(metrics["finite"])
    if scale is not None:
        metrics["loss_scale"] = scale
    for k, name in enumerate(sums.names):
        if name in metrics:
            raise ValueError(f"aux[{name!r}] has the name of a metric of the step; choose another.")
        metrics[name] = sums.mean(k + 1).to(torch.float32)
    return metrics
