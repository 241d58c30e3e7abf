"""The parts of a step, and the loss scale of the next step."""

import dataclasses

from torch import Tensor

from shardfn.engine.loss import Finish, Loss
from shardfn.optim import GradientTransformation, LossScale
from shardfn.schedules import Actions, PipelineSchedule
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
