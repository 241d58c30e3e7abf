"""Ranges of the arguments of penalties. Each implementation checks the ranges at the run."""

from torch import Tensor


def check_values(
    vocab: int, history: Tensor, prompts: Tensor, repetition: Tensor, presence: Tensor, frequency: Tensor
) -> None:
    """Refuses arguments out of range.

    Raises:
        ValueError: names the argument, the first row, and the range.
    """
    width = history.shape[1]
    for name, x, wrong, allowed in (
        ("history", history, (history < -1) | (history >= vocab), f"from -1 to {vocab - 1}"),
        ("prompts", prompts, (prompts < 0) | (prompts > width), f"from 0 to {width}"),
        ("repetition", repetition, ~((repetition > 0) & repetition.isfinite()), "above 0 and finite"),
        ("presence", presence, ~presence.isfinite(), "finite"),
        ("frequency", frequency, ~frequency.isfinite(), "finite"),
    ):
        if wrong.any():
            at = wrong.nonzero()[0].tolist()
            raise ValueError(f"{name} must be {allowed}, got {x[tuple(at)].item()} in row {at[0]}")
