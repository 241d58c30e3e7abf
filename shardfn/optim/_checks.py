"""Checks of hyperparameters.

A hyperparameter may be a 0-d tensor, so that torch.func can map or differentiate over it. The value is then not
checked.
"""

import math
from typing import Any

import torch
from torch import Tensor

from shardfn.core import a_kind


def check_not_negative(who: str, **values: Any) -> None:
    """Checks that each value is a finite number >= 0."""
    _require_values(who, values, lambda v: v >= 0, "a finite number >= 0")


def check_positive(who: str, **values: Any) -> None:
    """Checks that each value is a finite number > 0."""
    _require_values(who, values, lambda v: v > 0, "a finite number > 0")


def check_decay_rate(who: str, **values: Any) -> None:
    """Checks that each value is the rate of an exponential average, in [0, 1)."""
    _require_values(who, values, lambda v: 0 <= v < 1, "a number in [0, 1)")


def check_finite(who: str, **values: Any) -> None:
    """Checks that each value is a finite number."""
    _require_values(who, values, lambda v: True, "a finite number")


def check_num_steps(who: str, **values: Any) -> None:
    """Checks that each value is an int >= 1."""
    _require_values(
        who, values, lambda v: isinstance(v, int) and v >= 1, "an int >= 1; to go without, leave that piece out"
    )


def check_float_dtype(who: str, **values: Any) -> None:
    """Checks that each value is a dtype of floating point, or None."""
    for name, value in values.items():
        if value is not None and not (isinstance(value, torch.dtype) and value.is_floating_point):
            raise ValueError(f"{who}: {name}={value!r} must be a dtype of floating point, such as torch.bfloat16.")


def _require_values(who: str, values: dict[str, Any], ok: Any, need: str) -> None:
    for name, value in values.items():
        if isinstance(value, Tensor) and value.is_floating_point() and not need.startswith("an int"):
            if value.ndim:
                raise ValueError(f"{who}: {name} has shape {tuple(value.shape)}, but must be a number or a 0-d tensor.")
            continue
        number = isinstance(value, float | int) and not isinstance(value, bool)
        if not (number and math.isfinite(value) and ok(value)):
            raise ValueError(f"{who}: {name}={_show_value(value)} must be {need}.{_type_hint(value, need)}")


def _show_value(value: Any) -> str:
    return repr(value) if isinstance(value, str | float | int | None) else a_kind(value)


def _type_hint(value: Any, need: str) -> str:
    if isinstance(value, str):
        return " Write it without quotes."
    return f" Write {int(value)}." if isinstance(value, float) and need.startswith("an int") and value >= 1 else ""
