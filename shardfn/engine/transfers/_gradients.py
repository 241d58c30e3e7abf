"""The gradients of a step as a tree, between `gradients` and `update`.

A leaf is placed as the optimizer takes it: the rows that this rank updates, in the memory and the dtype in which summed
gradients wait (`ways.summed`). A leaf that the step does not train is None, as in the tree that the optimizer gets.

A schedule is the forwards and backwards of a step's microbatches, in order, as a list.

    accumulation(2) == F0 B0 F1 B1

All ranks run one list, and agree on it before the first transfer: each action is a phase of the order of use. A list
may keep any number of forwards open, and close them in any order, at the cost of activation memory.

`MicrobatchRunner`: the interface by which the engine runs a microbatch on a rank, for whole losses and stages.
"""

import contextlib
import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from shardfn.collectives import GlobalTensor
from shardfn.core import (
    DonatedError,
    PyTree,
    StoredValue,
    is_in_memory,
    kind_when_loaded,
    load,
    raise_all,
    tree_leaves,
    tree_paths,
    tree_structure,
    tree_unflatten,
)
from shardfn.engine.loss import Finish, Loss, Value, evaluate
from shardfn.engine.plan import Plan
from shardfn.leaves import LeafLayout
from shardfn.optim import GradientTransformation, LossScale, leaf_squares
from shardfn.schedules import Action, Actions, PipelineSchedule, as_text
from shardfn.state import TrainState, change

from ._pools import pool_of

Metrics = dict[str, Tensor]


@dataclasses.dataclass(frozen=True)
class StepParts:
    """The parts of a step besides state and batch.

    Attributes:
        loss: the user's loss, possibly accumulated.
        optimizer: the optimizer.
        has_aux: whether the loss returns aux.
        has_state: whether it takes a model state, and returns one.
        donate: whether a step consumes its state.
        skip_nonfinite: whether a step that is not finite returns the old state, without a loss scale, too.
        loss_scale: the rule of the loss scale. None: the loss is not scaled.
        schedule: the forwards and backwards of the microbatches, in the order in which all ranks run them.
        table: table in a pipeline, the actions that each rank runs instead, or None if all ranks run the same.
        finish: the end of the step for the model state, or None for a step without one.
        count: whether the loss takes the number of the step.
    """

    loss: Loss
    optimizer: GradientTransformation
    has_aux: bool
    has_state: bool
    donate: bool
    skip_nonfinite: bool
    loss_scale: LossScale | None
    schedule: Actions
    table: PipelineSchedule | None = None
    finish: Finish | None = None
    count: bool = False

    @property
    def skips(self) -> bool:
        """Returns whether a step that is not finite is skipped."""
        return self.skip_nonfinite or self.loss_scale is not None


def rescaled(new: TrainState, old: TrainState, rule: LossScale, metrics: Metrics) -> TrainState:
    """Returns the new state with the loss scale of the next step, which changes even if a step is skipped."""
    return new._replace(loss_scale=rule.update(old.loss_scale, metrics["finite"]))


def advanced(new: TrainState, old: TrainState, rule: LossScale | None, metrics: Metrics) -> TrainState:
    """Returns the new state with the loss scale of the next step, if it has one.

    After the step, as it reads the metrics.

    Raises:
        FloatingPointError: the loss scale is at its minimum, and gradients still overflow.
    """
    if rule is None:
        return new
    new = rescaled(new, old, rule, metrics)
    rule.check(new.loss_scale)
    return new


def accumulation(num_microbatches: int) -> Actions:
    """Returns each backward right after its forward, so that one microbatch's activations are alive at a time.

    Example:
        >>> as_text(accumulation(2))
        'F0 B0 F1 B1'
    """
    return tuple(Action(kind, k) for k in range(num_microbatches) for kind in ("forward", "backward"))


def check_schedule(schedule: Sequence[Action], num_microbatches: int) -> None:
    """Refuses a list that is not the schedule of a step with this number of microbatches.

    Raises:
        ValueError: lists the actions that are missing, repeated, of no microbatch, or before their forward.
    """
    counts = Counter(schedule)
    wanted = dict.fromkeys(accumulation(num_microbatches))
    problems = [f"{a} is there {counts[a]} times, not once" for a in wanted if counts[a] != 1]
    problems += [f"{a} is of no microbatch" for a in counts if a not in wanted]
    at = {a: i for i, a in reversed([*enumerate(schedule)])}
    for k in range(num_microbatches):
        f, b = Action("forward", k), Action("backward", k)
        if f in at and b in at and at[b] < at[f]:
            problems.append(f"{b} comes before {f}")
    raise_all(
        ValueError, f"the schedule {as_text(schedule)} is not a step of {num_microbatches} microbatches:", problems
    )


# From a microbatch's loss and its weight to the cotangent of the loss.
Seed = Callable[[Tensor, Tensor | None], Tensor]


class BackwardRoots(NamedTuple):
    """Arguments of `torch.autograd.grad` for the backward of an action.

    Attributes:
        outputs: tensors to differentiate.
        cotangents: cotangents of the outputs.
        inputs: tensors other than parameters whose gradients are computed, such as a stage's input.
    """

    outputs: list[Tensor]
    cotangents: list[Tensor]
    inputs: list[Tensor]


class MicrobatchRunner(Protocol):
    """Runs the microbatches of a single step on this rank.

    For each action of `actions`, in order, the engine calls `receive` and then `forward`, or `receive`, `ends` and
    `send_back`. `receive` comes between two phases of the order of use, and is the only call that waits for another
    stage. At the end the engine calls `close`, `values` and `kept`.

    Attributes:
        actions: actions of this rank.
        late_axes: axes along which ranks have other actions, so that the gradients of shared leaves are summed at the
            end.
    """

    actions: Actions
    late_axes: tuple[str, ...]

    def receive(self, action: Action) -> None:
        """Waits for the message of another stage for an action."""
        ...

    def forward(self, action: Action, params: PyTree) -> Value | None:
        """Runs the forward of an action, and returns the loss, or None if another stage has it."""
        ...

    def ends(self, action: Action, seed: Seed) -> BackwardRoots:
        """Returns the arguments of a microbatch's backward, and releases the runner's references to them."""
        ...

    def send_back(self, action: Action, grads: list[Tensor | None]) -> None:
        """Sends the gradients of the inputs that `ends` named to the previous stage."""
        ...

    def close(self) -> None:
        """Waits until all messages of this rank are sent."""
        ...

    def values(self, seen: list[Value]) -> list[Value]:
        """Returns the values of all microbatches, on all ranks, from the values on this rank."""
        ...

    def kept(self, model_state: PyTree) -> PyTree:
        """Returns the model state after all microbatches, on all ranks, from the part that this rank has changed."""
        ...

    def named(self, action: Action) -> contextlib.AbstractContextManager[None]:
        """Adds the action and the stage to the message of an error that is raised inside."""
        ...


class LocalRunner:
    """A `MicrobatchRunner` of whole losses: each rank runs all of its microbatches by itself.

    Args:
        loss: loss of a single microbatch.
        batches: the microbatches.
        rest: the further arguments of the loss.
        has_aux: whether it returns an aux.
        actions: the actions of the rank.
    """

    def __init__(
        self, loss: Loss, batches: list[PyTree], rest: tuple[Any, ...], has_aux: bool, actions: Actions
    ) -> None:
        self._loss, self._batches, self._rest, self._has_aux = loss, batches, rest, has_aux
        self._open: dict[int, Value] = {}
        self.actions, self.late_axes = actions, ()

    def receive(self, action: Action) -> None:
        """Nothing."""

    def forward(self, action: Action, params: PyTree) -> Value:
        """Returns the loss."""
        k = action.microbatch
        value = self._open[k] = evaluate(self._loss, params, (self._batches[k], *self._rest), self._has_aux)
        return value

    def ends(self, action: Action, seed: Seed) -> BackwardRoots:
        """Returns the loss, if it has a gradient."""
        value = self._open.pop(action.microbatch)
        if not value.total.requires_grad:
            return BackwardRoots([], [], [])
        return BackwardRoots([value.total], [seed(value.total, value.weight)], [])

    def send_back(self, action: Action, grads: list[Tensor | None]) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""

    def values(self, seen: list[Value]) -> list[Value]:
        """The same."""
        return seen

    def kept(self, model_state: PyTree) -> PyTree:
        """The same."""
        return model_state

    def named(self, action: Action) -> contextlib.AbstractContextManager[None]:
        """Nothing."""
        del action
        return contextlib.nullcontext()


Blocks = dict[int, StoredValue]


class FoundGradients(NamedTuple):
    """The result of `gradients`.

    Attributes:
        grads: a tree like params, of `GlobalTensor`s, or None for a leaf that is not trained.
        model_state: model state that the loss has returned, a tree of `GlobalTensor`s.
        metrics: metrics of the loss and of the gradients.
    """

    grads: PyTree
    model_state: PyTree
    metrics: Metrics


def as_tree(plan: Plan, grads: Blocks) -> PyTree:
    """Returns this rank's gradients by leaf as a tree of global tensors."""
    away = not plan.at_home

    def whole(i: int, leaf: LeafLayout) -> GlobalTensor | None:
        if not leaf.trainable:
            return None
        x, kind = grads[i], leaf.ways.summed.memory_kind
        if away and isinstance(x, Tensor):  # a pure step stores nothing on disk
            kind = kind_when_loaded(kind)
        return GlobalTensor(x, leaf.shape, leaf.shard, plan.mesh, kind)

    return tree_unflatten(plan.treedef, [whole(i, leaf) for i, leaf in enumerate(plan.leaves)])


def by_leaf(plan: Plan, tree: PyTree) -> Blocks:
    """Returns the leaves of a tree of gradients, by number of the parameter."""
    return dict(zip([i for i, leaf in enumerate(plan.leaves) if leaf.trainable], tree_leaves(tree), strict=True))


def scaled(plan: Plan, grads: Blocks, scale: Tensor | None) -> Blocks:
    """Multiplies gradients by the factor that they still lack, with the operations and bits of an update."""
    if scale is None:
        return grads
    if plan.at_home:
        torch._foreach_mul_([x for x in grads.values() if isinstance(x, Tensor)], scale)
        return grads
    pool, by = pool_of(plan), lambda x: x.mul_(scale.to(x.device))
    return {i: change(x, plan.leaves[i].ways.summed, pool, by) for i, x in grads.items()}


def added(plan: Plan, a: Blocks, b: Blocks) -> Blocks:
    """Returns the sums of two sets of gradients, leaf by leaf, in the memory of the first. Both are consumed."""
    pool, out = pool_of(plan), dict(a)
    for i, y in b.items():
        x, at = out.get(i), plan.leaves[i].ways.summed
        out[i] = y if x is None else change(x, at, pool, lambda x, y=y: x.add_(load(y)))
    return out


def measured(plan: Plan, grads: Blocks, finite: Tensor | bool, loss_scale: Tensor | None) -> Metrics:
    """Returns the metrics of an update, of the gradients that it was given. The mesh must be bound.

    The norm is summed in float64, where the squares of finite gradients do not overflow: so gradients that a step has
    found finite are finite here.
    """
    return of_update(torch.sqrt(_sum_squares(plan, grads).sum()).to(plan.mesh.device), finite, loss_scale)


def of_update(norm: Tensor, finite: Tensor | bool, loss_scale: Tensor | None) -> Metrics:
    """Returns the metrics of an update, as if it is not skipped.

    Args:
        norm: norm of the gradients.
        finite: whether loss and gradients were finite where they were computed.
        loss_scale: the one that was used.
    """
    metrics = {"grad_norm": norm.to(torch.float32), "finite": torch.isfinite(norm) & finite}
    metrics["skipped"] = torch.zeros_like(metrics["finite"])
    if loss_scale is not None:
        metrics["loss_scale"] = loss_scale.clone()
    return metrics


def _sum_squares(plan: Plan, grads: Blocks) -> Tensor:
    specs = [plan.leaves[i].shard for i in grads]
    if plan.at_home:
        return leaf_squares([load(x) for x in grads.values()], specs, torch.float64)
    # One leaf at a time on the device, which need not have room for all.
    found = [
        leaf_squares([load(x).to(plan.mesh.device)], [spec], torch.float64)
        for x, spec in zip(grads.values(), specs, strict=True)
    ]
    return torch.cat(found) if found else torch.zeros(0, dtype=torch.float64)


def check_gradients(plan: Plan, grads: PyTree) -> None:
    """Refuses a tree that is not the gradients of a step of this plan.

    Raises:
        TypeError: a leaf is not a `GlobalTensor`. All are listed.
        DonatedError: an update has consumed a leaf.
        ValueError: leaves are missing or additional, or are of another mesh, layout, memory, dtype or shape. All are
            listed by path.
    """
    _check_structure(plan, grads)
    named = list(zip(_list_paths(plan), [x for x in plan.leaves if x.trainable], tree_leaves(grads), strict=True))
    raise_all(
        TypeError,
        "gradients are GlobalTensors; of a changed block make one, g.with_block(block):",
        [f"{path} is a {type(x).__name__}" for path, _, x in named if not isinstance(x, GlobalTensor)],
    )
    gone = [path for path, _, x in named if x.donated]
    if gone:
        shown = ", ".join(gone[:8]) + (f" and {len(gone) - 8} more" if len(gone) > 8 else "")
        raise DonatedError(
            f"these gradients were already consumed by an update ({shown}), which takes its gradients as a step takes"
            " its state. Call step.gradients again, or build the step with donate=False."
        )
    raise_all(
        ValueError,
        "gradients are where step.gradients(state, batch) of this step leaves them; these are of another step:",
        [problem for path, leaf, x in named for problem in _find_problems(plan, path, leaf, x)],
    )


def _check_structure(plan: Plan, grads: PyTree) -> None:
    wanted = tree_unflatten(plan.treedef, [0 if leaf.trainable else None for leaf in plan.leaves])
    if tree_structure(grads) == tree_structure(wanted):
        return
    if isinstance(grads, tuple) and len(grads) == 2 and isinstance(grads[1], dict) and "grad_norm" in grads[1]:
        raise TypeError(
            "update got the pair that gradients returns. Unpack it: grads, metrics = step.gradients(state, batch)."
        )
    there, needed = tree_paths(grads, "grads"), _list_paths(plan)
    frozen = {leaf.path.replace("params", "grads", 1) for leaf in plan.leaves if not leaf.trainable}
    problems = [f"{path} is missing; pass zeros where a leaf has no gradient" for path in needed if path not in there]
    problems += [
        f"{path} is of a leaf that the step does not train; leave None there"
        if path in frozen
        else f"{path} is not a leaf of the parameters"
        for path in there
        if path not in needed
    ]
    problems = problems or [f"it is {tree_structure(grads)}, and here it is {tree_structure(wanted)}"]
    raise_all(ValueError, "the tree of gradients has other leaves than the step trains:", problems)


def _list_paths(plan: Plan) -> list[str]:
    return [leaf.path.replace("params", "grads", 1) for leaf in plan.leaves if leaf.trainable]


def _find_problems(plan: Plan, path: str, leaf: LeafLayout, x: GlobalTensor) -> Iterable[str]:
    """Yields the differences between a gradient and its layout in the plan, empty if they agree."""
    if not x.mesh.is_like(plan.mesh):
        yield f"{path} is on {x.mesh!r}; here the mesh is {plan.mesh!r}"
        return
    if x.shape != leaf.shape:
        yield f"{path} has shape {tuple(x.shape)}; here it is {tuple(leaf.shape)}"
        return
    if _axes_of_dims(plan, x) != _axes_of_dims(plan, leaf):
        yield f"{path} is cut as {x.spec!r}; here it is {leaf.shard!r}: sf.reshard(grads, to) moves it"
        return
    # A block that was read from disk, and changed, lies on the host.
    kind = leaf.ways.summed.memory_kind
    if not is_in_memory(x.memory_kind, kind, kind_when_loaded(kind)):
        yield f"{path} is at {x.memory_kind!r}; here it is at {kind!r}"
    if x.dtype != leaf.dtypes.accum:
        yield f"{path} is {x.dtype}; here it is {leaf.dtypes.accum}, in which gradients are added up"
    block = leaf.pieces.shapes[plan.zero_rank(leaf)]
    if torch.Size(x.held.shape) != block:
        yield f"{path} has a block of shape {tuple(x.held.shape)} on rank {plan.mesh.rank}; here it is {tuple(block)}"


def _axes_of_dims(plan: Plan, x: Any) -> list[tuple[str, ...]]:
    """Returns the axes that cut each dim."""
    spec = x.spec if isinstance(x, GlobalTensor) else x.shard
    return [plan.mesh.axes(spec.dim_axes(d)) for d in range(len(x.shape))]
