"""The calls of an eager step: the step, its gradients, its update; `CapturedSteps` has the same of a jitted one."""

import dataclasses
from typing import Any

from shardfn.engine.plan import Plan
from shardfn.engine.transfers import Metrics, StepCall, StepParts
from shardfn.state import TrainState

from ._eager_step import run_eager
from ._opened import (
    GradientCall,
    Passed,
    apply_eagerly,
    run_gradients,
    run_update,
)


@dataclasses.dataclass(frozen=True)
class EagerSteps:
    """The eager calls of one step.

    Attributes:
        parts: loss, optimizer and flags of the step.
    """

    parts: StepParts

    def call(self, plan: Plan, state: TrainState, args: tuple[Any, ...]) -> StepCall[tuple[TrainState, Metrics]]:
        """One step."""
        return StepCall(lambda comms, agreed: run_eager(self.parts, plan, comms, state, args, agreed.even))

    def gradients(self, plan: Plan, state: TrainState, args: tuple[Any, ...]) -> GradientCall:
        """The gradients of one step."""
        del state
        return GradientCall(lambda comms, agreed, now: run_gradients(self.parts, plan, comms, now, args, agreed.even))

    def update(self, plan: Plan, state: TrainState, passed: Passed) -> StepCall[tuple[TrainState, Metrics]]:
        """The update by gradients."""
        apply = apply_eagerly(self.parts, plan, passed.finish(self.parts))
        return StepCall(lambda comms, agreed: run_update(self.parts, plan, comms, state, passed, apply))
