"""Checks of hyperparameters and of optimizers as arguments.

A hyperparameter may be a 0-d tensor, so that torch.func can map or differentiate over it. The value is then not
checked.

An argument that is not an optimizer is described by its kind, with the remedy.
"""

import inspect
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shardfn.core import a_kind, did_you_mean


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


# The rules with the name of an optimizer of torch.
_TORCH = {"SGD": "sgd", "Adam": "adam", "AdamW": "adamw", "RAdam": "radam", "RMSprop": "rmsprop", "Adagrad": "adagrad"}
_NAMES = (
    *("adafactor", "adagrad", "adam", "adamw", "ademamix", "adopt", "galore", "lamb", "lars", "lion", "muon", "nadamw"),
    *("onebit_adam", "onebit_lamb", "prodigy", "radam", "rmsprop", "sgd", "sophia", "zero_one_adam"),
)
# Keywords of torch and of other libraries, and their names here.
MEANT = {
    "lr": "learning_rate={value!r}",
    "rate": "learning_rate={value!r}",
    "betas": "b1= and b2=, the two of betas",
    "beta1": "b1={value!r}",
    "beta2": "b2={value!r}",
    "wd": "weight_decay={value!r}",
    "max_grad_norm": "max_norm={value!r}",
    "params": "nothing: an optimizer gets the parameters from step.init(params)",
}


def describe_non_rule(tx: Any) -> str:
    """Returns the message for an argument that is not a rule."""
    return f"an optimizer is a pair of functions (init, update), but this is {_show_object(tx)}. {_remedy_for(tx)}"


def describe_non_rate(who: str, rate: Any) -> str | None:
    """Returns the message for an argument that is not a learning rate, or None for a possible learning rate."""
    kind = rate if isinstance(rate, type) else type(rate)
    if issubclass(kind, torch.optim.lr_scheduler.LRScheduler):
        return (
            f"{who}: learning_rate is torch's {kind.__name__}, which changes an optimizer of torch. A schedule is a"
            " function of the number of steps, such as optim.warmup_cosine_decay_schedule(...)."
        )
    if isinstance(rate, torch.nn.Module | list | tuple | dict) or inspect.isgenerator(rate):
        return (
            f"{who}: learning_rate is a {kind.__name__}. An optimizer gets the parameters from step.init(params);"
            f" write {who}(1e-3)."
        )
    if isinstance(rate, type):
        return (
            f"{who}: learning_rate is the class {kind.__name__}; pass a number, or a function of the number of steps."
        )
    return None


def _show_object(tx: Any) -> str:
    if isinstance(tx, type):
        return f"the class {tx.__module__.removesuffix('.' + tx.__name__.lower())}.{tx.__name__}"
    if isinstance(tx, list | tuple):
        return f"a {type(tx).__name__} of {len(tx)}"
    if inspect.isfunction(tx):
        return f"the function {tx.__name__}"
    return repr(tx) if isinstance(tx, str | int | float) else f"an object of type {type(tx).__name__}"


def _remedy_for(tx: Any) -> str:
    kind = tx if isinstance(tx, type) else type(tx)
    if issubclass(kind, torch.optim.Optimizer):
        rate = getattr(tx, "defaults", {}).get("lr", 1e-3)
        name = _TORCH.get(kind.__name__, "adamw")
        return (
            "An optimizer of torch changes a module in place, and knows nothing of parameters that are sharded:"
            f" use shardfn's own, optim.{name}({rate})."
        )
    if isinstance(tx, list | tuple):
        return _remedy_of_several(tx)
    if inspect.isfunction(tx) and tx.__module__.startswith(__package__ or "shardfn.optim"):
        return f"Call it: optim.{tx.__name__}(...) makes a rule."
    if isinstance(tx, str):
        return (
            f"Write optim.{tx}(1e-3)." if tx in _NAMES else f"There are {', '.join(_NAMES)}.{did_you_mean(tx, _NAMES)}"
        )
    if isinstance(tx, int | float):
        return f"Is it a learning rate? Write optim.adamw({tx})."
    return "Use one of shardfn.optim, such as optim.adamw(1e-3), or write optim.GradientTransformation(init, update)."


def _remedy_of_several(rules: Sequence[Any]) -> str:
    return "Rules one after another are one rule: write optim.chain(first, second), or optim.chain(*rules) of a list."
