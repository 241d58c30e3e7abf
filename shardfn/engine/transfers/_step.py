"""The parts of a step, the schedule of its microbatches, and the loss scale of the next step.

A schedule is the forwards and backwards of a step's microbatches, in order, as a list.

    accumulation(2) == F0 B0 F1 B1

All ranks run one list, and agree on it before the first transfer: each action is a phase of the order of use. A list
may keep any number of forwards open, and close them in any order, at the cost of activation memory.

`MicrobatchRunner`: the interface by which the engine runs a microbatch on a rank, for whole losses and stages.
"""

import contextlib
import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from shardfn.core import PyTree, raise_all
from shardfn.engine.loss import Finish, Loss, Value, evaluate
from shardfn.optim import GradientTransformation, LossScale
from shardfn.schedules import Action, Actions, PipelineSchedule, as_text
from shardfn.state import TrainState

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
    raise_all(ValueError, f"the schedule {as_text(schedule)} is no step of {num_microbatches} microbatches:", problems)


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
