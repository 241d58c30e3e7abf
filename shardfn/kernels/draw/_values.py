"""Ranges of a draw's arguments. Each implementation checks the ranges at the run, for captured programs, too."""

import math

import torch
from torch import Tensor

# A lower temperature counts as 0: a quotient by such a temperature could overflow.
COLDEST = 1e-5


def check_values(
    vocab: int,
    uniform: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    targets: Tensor | None,
) -> None:
    """Refuses arguments out of range.

    Raises:
        ValueError: names the argument, the first row, and the range.
    """
    drawn = temperature >= COLDEST
    if targets is not None:
        drawn = drawn & (targets < 0)
    for name, x, low, high in (
        ("temperature", temperature, 0, math.inf),
        ("top_p", top_p, 0, 1.0),
        ("min_p", min_p, 0, 1.0),
        ("uniform", uniform, 0, 1.0),
        ("top_k", top_k, 0, vocab),
        ("targets", targets, -1, vocab - 1),
    ):
        if x is None:
            continue
        wrong = ~((x >= low) & (x <= high))
        if name == "uniform":
            wrong = (wrong | (x == 1)) & drawn
        if torch.any(wrong):
            row = int(wrong.nonzero()[0])
            below = " and below" if name == "uniform" else " to"
            raise ValueError(f"{name} must be from {low}{below} {high}, got {x[row].item()} in row {row}")
