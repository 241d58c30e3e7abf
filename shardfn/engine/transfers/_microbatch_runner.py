"""`MicrobatchRunner`: the interface by which the engine runs a microbatch on a rank, for whole losses and stages."""

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from shardfn.core import PyTree
from shardfn.engine.loss import Loss, Value, evaluate
from shardfn.schedules import Action, Actions

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
