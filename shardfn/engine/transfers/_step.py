"""One training step, written once: loss -> gradients -> measures -> skip -> update.

    out            = differentiate()            the loss, and its gradients summed over ranks
    metrics, scale = measure(out)               the numbers that all ranks get of it
    state          = choose(metrics, update)    update(out, scale), or the old state

Executors run it in different ways. The eager executor does each part at once; the traced one writes the same parts into
a graph; the pure one makes them of differentiable functions, inside a transform of torch.func.
"""

import dataclasses
from collections.abc import Callable
from typing import Generic, NamedTuple, Protocol, TypeVar, runtime_checkable

from torch import Tensor

from shardfn.collectives import Agreed
from shardfn.engine.agreement import Comms
from shardfn.engine.loss import Finish, Loss
from shardfn.optim import GradientTransformation, LossScale
from shardfn.schedules import Actions, PipelineSchedule
from shardfn.state import TrainState

Metrics = dict[str, Tensor]
Out = TypeVar("Out")
New = TypeVar("New")
Result = TypeVar("Result")


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
        loss_scale: the rule of the loss scale; None = the loss is not scaled.
        schedule: the forwards and backwards of the microbatches, in the order in which all ranks run them.
        table: in a pipeline, the actions that each rank runs instead; None if all ranks run the same.
        finish: the end of the step for the model state; None for a step without one.
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

    @property
    def skips(self) -> bool:
        """Whether a step that is not finite is skipped."""
        return self.skip_nonfinite or self.loss_scale is not None


class StepCall(NamedTuple, Generic[Result]):
    """A step, or a half of one, which ranks agree on and then run.

    Attributes:
        run: runs it, given the ranks' agreement.
        known: whether this rank already has the results of a first step; see `Agreed`.
    """

    run: Callable[[Comms, Agreed], Result]
    known: tuple[bool, bool] = (True, True)


@runtime_checkable
class Executor(Protocol[Out, New]):
    """Runs one step. Made for one state and one batch; each part is called once, in the order of `one_step`."""

    def differentiate(self) -> Out:
        """The loss and the gradients of the global batch. Reads the state, and writes nothing of it."""
        ...

    def measure(self, out: Out) -> tuple[Metrics, Tensor | None]:
        """The metrics, equal on all ranks; and the factor that gradients still lack, or None."""
        ...

    def choose(self, metrics: Metrics, update: Callable[[], New]) -> New:
        """The state that `update` makes, or the old one if the step is skipped; records in the metrics which."""
        ...

    def update(self, out: Out, scale: Tensor | None) -> New:
        """The new state. The first part that may write to the old one."""
        ...


def one_step(run: Executor[Out, New]) -> tuple[New, Metrics]:
    """The new state, and the metrics."""
    out = run.differentiate()
    metrics, scale = run.measure(out)
    return run.choose(metrics, lambda: run.update(out, scale)), metrics


def rescaled(new: TrainState, old: TrainState, rule: LossScale, metrics: Metrics) -> TrainState:
    """The new state with the loss scale of the next step, which changes even if a step is skipped."""
    return new._replace(loss_scale=rule.update(old.loss_scale, metrics["finite"]))


def advanced(new: TrainState, old: TrainState, rule: LossScale | None, metrics: Metrics) -> TrainState:
    """The new state with the loss scale of the next step, if it has one; after the step, as it reads the metrics.

    Raises:
        FloatingPointError: the loss scale is at its minimum, and gradients still overflow.
    """
    if rule is None:
        return new
    new = rescaled(new, old, rule, metrics)
    rule.check(new.loss_scale)
    return new
