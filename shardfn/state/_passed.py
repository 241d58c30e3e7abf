"""The check of the state that a user passes to a step."""

from typing import Any

from ._state import TrainState


def check_passed(state: Any, other: Any = (), *, call: str = "step(state, batch)") -> None:
    """Refuses other values than a state.

    Args:
        state: the argument.
        other: the argument after it.
        call: the right call, for the message.

    Raises:
        TypeError: `state` is not a `TrainState`; the message names its type and the remedy.
    """
    if isinstance(state, TrainState):
        return
    if isinstance(other, TrainState):
        remedy = f"The arguments are swapped: write {call}."
    elif isinstance(state, tuple) and state and isinstance(state[0], TrainState):
        remedy = "This is the pair that a step returns; unpack it: state, metrics = step(state, batch)."
    else:
        remedy = "Make one from parameters first: state = step.init(params)."
    raise TypeError(f"{call} takes the TrainState that init or a step returned, got {type(state).__name__}. {remedy}")
