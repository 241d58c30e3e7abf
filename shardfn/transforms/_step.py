"""What a step is made of besides state and batch."""

import dataclasses

from shardfn.optim import GradientTransformation

from ._loss import Loss
from ._schedule import Schedule


@dataclasses.dataclass(frozen=True)
class StepParts:
    """What a step is made of besides state and batch.

    Attributes:
        loss: the user's loss, possibly accumulated.
        optimizer: the optimizer.
        has_aux: whether the loss returns aux.
        skip: whether a step that is not finite returns the state as it was.
        schedule: the forwards and backwards of the loss's microbatches, in the order in which all ranks run them.
    """

    loss: Loss
    optimizer: GradientTransformation
    has_aux: bool
    skip: bool
    schedule: Schedule
