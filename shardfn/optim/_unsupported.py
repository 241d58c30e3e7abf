"""Error texts for arguments that are not optimizers: the kind, and the remedy."""

import inspect
from collections.abc import Sequence
from typing import Any

import torch

from shardfn.core import did_you_mean

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
