"""What is passed to a step as its state, and is none."""

from typing import Any

from ._state import TrainState


def check_passed(state: Any, other: Any = (), *, call: str = "step(state, batch)") -> None:
    """Refuses what is no state.

    Args:
        state: what was passed as one.
        other: what was passed beside it.
        call: how to write it.

    Raises:
        TypeError: says what it is, and what to write.
    """
    if isinstance(state, TrainState):
        return
    if isinstance(other, TrainState):
        remedy = f"The arguments are swapped: write {call}."
    elif isinstance(state, tuple) and state and isinstance(state[0], TrainState):
        remedy = "This is the pair that a step returns; unpack it: state, metrics = step(state, batch)."
    else:
        remedy = "Of parameters make one first: state = step.init(params)."
    raise TypeError(f"{call} takes the TrainState that init or a step returned, got {type(state).__name__}. {remedy}")
