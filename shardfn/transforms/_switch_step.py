"""Several steps on one state, of which the host chooses for each batch, by the state.

Each step has its own graph, and a step that is not chosen neither computes nor gathers anything. Rules with a second
gradient for a batch, such as `optim.sam` and `optim.sophia`, and losses that change at some step, such as
`distill.staged_step`, are such choices, so that no part of a step knows of them.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from shardfn.core import PyTree
from shardfn.engine import ShardedStep
from shardfn.optim import SamState, SophiaState, is_hessian_step, is_perturbed
from shardfn.state import TrainState


class StepSwitch(NamedTuple):
    """Steps on one state, chosen by the state. `switch_step` makes it.

    Attributes:
        steps: steps.
        choose: function from a state to the numbers of the steps that the next batch takes, in order.
    """

    steps: tuple[ShardedStep, ...]
    choose: Callable[[TrainState], Sequence[int]]

    def at(self, state: TrainState) -> ShardedStep:
        """Returns the step that a state takes next, with all its functions, such as `evaluate` and `lower`."""
        return self._list_steps(state)[0]

    def init(self, params: PyTree, *args: Any, model_state: PyTree = ()) -> TrainState:
        """Returns the first state, as `ShardedStep.init`."""
        return self.steps[0].init(params, *args, model_state=model_state)

    def __call__(self, state: TrainState, batch: PyTree) -> tuple[TrainState, dict[str, Tensor]]:
        """Makes the steps of a batch, and returns the metrics of the last step.

        Raises:
            ValueError: the state chooses a step that was not passed.
        """
        metrics: dict[str, Tensor] = {}
        for step in self._list_steps(state):
            state, metrics = step(state, batch)
        return state, metrics

    def _list_steps(self, state: TrainState) -> list[ShardedStep]:
        numbers = self.choose(state)
        if not numbers or not all(0 <= n < len(self.steps) for n in numbers):
            raise ValueError(
                f"switch_step: the state chooses the steps {(*numbers,)}, got {len(self.steps)} steps. Pass all steps"
                " in their order; `optim.sophia` needs the step of the sampled loss as the second."
            )
        return [self.steps[n] for n in numbers]


def switch_step(*steps: ShardedStep, choose: Callable[[TrainState], Sequence[int]] | None = None) -> StepSwitch:
    """Returns a step that makes some of several steps for each batch, chosen by the state.

    Args:
        *steps: steps of the same parameters, optimizer and layout, so that each takes the states of the others.
        choose: function from a state to the numbers of the steps that a batch takes, in order, equal on all ranks. It
            reads the state on the host. None asks the optimizer: a batch takes the only step twice for `optim.sam`, and
            for `optim.sophia` the second step, of the sampled loss, before the first where an estimate is due.

    Raises:
        ValueError: there is no step, or (in a call) the state chooses a step that was not passed.

    Example:
        >>> import torch
        >>> import shardfn as sf
        >>> def loss(w, x):
        ...     return (w * x).square().mean() / 2
        >>> step = switch_step(sf.sharded_step(loss, sf.optim.sam(sf.optim.sgd(0.1), rho=0.5)))
        >>> state, metrics = step(step.init(torch.tensor(3.0)), torch.ones(1))  # gradients 3, and then 3.5
        >>> state.params.full_tensor()
        tensor(2.6500)
    """
    if not steps:
        raise ValueError("switch_step: got no step. Pass one at least.")
    return StepSwitch(steps, _ask_optimizer if choose is None else choose)


def _ask_optimizer(state: TrainState) -> tuple[int, ...]:
    if isinstance(state.opt_state, SamState):
        return (0,) if is_perturbed(state.opt_state) else (0, 0)
    return (1, 0) if isinstance(state.opt_state, SophiaState) and is_hessian_step(state.opt_state) else (0,)
