"""How a microbatch runs on a rank, as the engine sees it: what a forward ends in, and what a backward starts from."""

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from shardfn.core import PyTree
from shardfn.schedules import Action, Actions

from ._loss import Loss, Value, evaluate

# From a microbatch's loss and its weight to the cotangent of the loss.
Seed = Callable[[Tensor, Tensor | None], Tensor]


class Ends(NamedTuple):
    """What a backward starts from, and what it is to give besides the gradients of leaves.

    Attributes:
        outputs: tensors to differentiate.
        cotangents: theirs.
        inputs: tensors whose gradients are wanted.
    """

    outputs: list[Tensor]
    cotangents: list[Tensor]
    inputs: list[Tensor]


class Course(Protocol):
    """One step's microbatches on this rank. Made anew each step.

    For each action of `actions`, in order, the engine calls `receive` and then `forward`; or `receive`, `ends` and
    `send_back`. `receive` stands between two phases of the order of use, and is all that waits for another stage. At
    the end it calls `close` once, `values` and `kept`.

    Attributes:
        actions: what this rank does.
        late_axes: axes along which ranks do other things, so that the gradients of what they share are summed at the
            end.
    """

    actions: Actions
    late_axes: tuple[str, ...]

    def receive(self, action: Action) -> None:
        """Waits for what another stage sends for an action."""
        ...

    def forward(self, action: Action, params: PyTree) -> Value | None:
        """The loss of a microbatch, or None where another stage has it."""
        ...

    def ends(self, action: Action, seed: Seed) -> Ends:
        """What the backward of a microbatch starts from; it is let go."""
        ...

    def send_back(self, action: Action, grads: list[Tensor | None]) -> None:
        """Takes the gradients of the inputs that `ends` has named."""
        ...

    def close(self) -> None:
        """Waits until all that this rank has sent has left it."""
        ...

    def values(self, seen: list[Value]) -> list[Value]:
        """What all microbatches come to, on all ranks, from those that this rank has seen."""
        ...

    def kept(self, model_state: PyTree) -> PyTree:
        """The model state after all microbatches, on all ranks, from what is left of it on this one."""
        ...

    def named(self, action: Action) -> contextlib.AbstractContextManager[None]:
        """Notes on an error that leaves it in which action of which stage it was raised."""
        ...


class Whole:
    """A `Course` of whole losses: each rank runs all of its microbatches by itself.

    Args:
        loss: of one microbatch.
        batches: the microbatches.
        rest: what else the loss takes.
        has_aux: whether it returns an aux.
        actions: what the rank does.
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
        """The loss."""
        k = action.microbatch
        value = self._open[k] = evaluate(self._loss, params, (self._batches[k], *self._rest), self._has_aux)
        return value

    def ends(self, action: Action, seed: Seed) -> Ends:
        """The loss, if it has a gradient."""
        value = self._open.pop(action.microbatch)
        if not value.total.requires_grad:
            return Ends([], [], [])
        return Ends([value.total], [seed(value.total, value.weight)], [])

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
