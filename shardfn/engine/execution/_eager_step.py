"""Runs a step eagerly: each part at once, on real tensors and real transfers."""

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shardfn.core import tree_leaves
from shardfn.engine.agreement import Comms, named_range
from shardfn.engine.plan import Plan
from shardfn.engine.transfers import Metrics, Outcome, StepParts, one_step
from shardfn.optim import summing_exactly
from shardfn.state import Ahead, TrainState, looked_at, scale_of

from ._backward import run_backward
from ._metrics import measure
from ._overlapped_update import early
from ._update import update


def run_eager(
    parts: StepParts, plan: Plan, comms: Comms, state: TrainState, args: tuple[Any, ...], even: bool
) -> tuple[TrainState, Metrics]:
    """One step. The mesh must be bound.

    Args:
        parts: the parts of the step.
        plan: the layout.
        comms: the communicators.
        state: the current state; consumed if the step donates.
        args: this rank's batch, and a key if the loss takes one.
        even: whether all ranks hold batches of the same shapes.
    """
    with early(plan, parts.optimizer, state, decided=not parts.skips and parts.table is None) as ahead:
        with contextlib.nullcontext() if plan.chunks is None else summing_exactly():
            return one_step(EagerStep(parts, plan, comms, state, args, even, ahead))


@dataclasses.dataclass
class EagerStep:
    """An `Executor` whose new state is a `TrainState`."""

    parts: StepParts
    plan: Plan
    comms: Comms
    state: TrainState
    args: tuple[Any, ...]
    even: bool
    ahead: Ahead | None

    def differentiate(self) -> Outcome:
        blocks = [g.held for g in tree_leaves(self.state.params)]
        return run_backward(
            self.plan,
            self.comms,
            blocks,
            self.parts,
            self.args,
            even=self.even,
            model_state=looked_at(self.state.model_state),
            loss_scale=scale_of(self.state),
            ahead=self.ahead,
        )

    def measure(self, out: Outcome) -> tuple[Metrics, Tensor | None]:
        return measure(self.plan, out, scale_of(self.state))

    def choose(self, metrics: Metrics, update: Callable[[], TrainState]) -> TrainState:
        if self.parts.skips and not bool(metrics["finite"]):
            metrics["skipped"] = torch.ones_like(metrics["finite"])
            return self.state
        return update()

    def update(self, out: Outcome, scale: Tensor | None) -> TrainState:
        with named_range("reduce"):
            grads = out.reducer.gradients()
        parts, channels = self.parts, self.comms.channels
        with named_range("update"):
            return update(
                self.plan,
                channels,
                parts,
                self.state,
                grads.take,
                model_state=out.model_state,
                finish=parts.finish,
                scale=scale,
                ahead=self.ahead,
            )
