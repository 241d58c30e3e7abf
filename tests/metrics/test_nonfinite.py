"""Covers shardfn/metrics/_stopping.py: a run whose steps are not finite ends."""

import pytest
import torch

from shardfn.metrics import NonFiniteGuard


def row(loss: float) -> dict[str, torch.Tensor]:
    x = torch.tensor(loss)
    return {"loss": x, "grad_norm": x, "finite": x.isfinite()}


def test_steps_in_a_row_are_counted() -> None:
    guard = NonFiniteGuard(3)
    nan, inf = float("nan"), float("inf")
    assert [guard(n, row(x)) for n, x in enumerate((1.0, nan, inf, 2.0, nan, nan), 1)] == [
        True, False, False, True, False, False,
    ]  # fmt: skip
    with pytest.raises(FloatingPointError, match=r"in steps 5 to 7 \(in the last one: loss inf, gradient norm inf\)"):
        guard(7, row(inf))


def test_the_last_step_must_be_finite() -> None:
    guard = NonFiniteGuard(3)
    assert guard(1, row(1.0), last=True)
    with pytest.raises(FloatingPointError, match=r"in step 2 .*Use a smaller learning rate"):
        guard(2, row(float("nan")), last=True)
    with pytest.raises(ValueError, match=r"NonFiniteGuard\(max_steps=0\): must be at least 1"):
        NonFiniteGuard(0)
