"""Refuses values that cannot be a loss, when the step is built and before anything is sent."""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from shardfn.core import is_own
from shardfn.optim import GradientTransformation


def check_function(who: str, f: Any) -> None:
    """Refuses a value that is not a function of parameters.

    Args:
        who: the function that received the value, such as "jit".
        f: the value that was passed.

    Raises:
        TypeError: names the type of `f` and the remedy.
    """
    if isinstance(f, GradientTransformation):
        raise TypeError(
            f"{who}: the loss is an optimizer. The loss comes first: sf.sharded_step(loss, sf.optim.adamw(1e-3))."
        )
    if isinstance(f, Tensor):
        raise TypeError(
            f"{who} takes a function, and this is a tensor of shape {tuple(f.shape)}: what a function has returned?"
            " Pass the function itself, as in sf.sharded_step(loss, ...), not loss(params, batch)."
        )
    if not callable(f):
        raise TypeError(f"{who} takes a function, loss(params, batch), and this is of type {type(f).__name__}.")


def function_name(f: Any) -> str:
    """Returns the name of a function, also of a function with bound arguments.

    Example:
        >>> import functools
        >>> function_name(functools.partial(check_function, "jit"))
        'check_function'
    """
    while isinstance(f, functools.partial):
        f = f.func
    return getattr(f, "__name__", type(f).__name__)


def module_name(x: Any) -> str | None:
    """Returns the class name of a module, or of a class of modules, or None for anything else."""
    if isinstance(x, type):
        return x.__name__ if issubclass(x, nn.Module) else None
    return type(x).__name__ if isinstance(x, nn.Module) else None


def check_loss(loss: Any, *, key: bool, has_state: bool, count: bool) -> None:
    """Refuses a loss that cannot be called as a step calls it.

    Args:
        loss: the loss, perhaps in transforms.
        key: whether the step has a key. The loss then takes the key.
        has_state: whether the loss takes a model state.
        count: whether the loss takes the number of the step.

    Raises:
        TypeError: lists the loss's arguments, the arguments that the step passes, and the remedy.
    """
    check_function("sharded_step", loss)
    if name := module_name(loss):
        raise TypeError(
            f"sharded_step takes a function of parameters and a batch, and {name} is a module, which keeps its"
            " parameters itself. Write params, apply = sf.from_module(module), and a function that calls it:"
            " def loss(params, batch): return criterion(apply(params, batch['x']), batch['y'])."
        )
    inner = _innermost_function(loss)
    given = ["params", *(["model_state"] if has_state else []), "batch", *(["key"] if key else [])]
    # A pipeline has checked the function that takes the number.
    takes, named = _signature_of(inner), ["step"] if count and not hasattr(inner, "with_count") else []
    if takes is not None and not _accepts_arguments(takes, len(given), named):
        name = function_name(inner)
        call = ", ".join([*given, *(f"{x}={x}" for x in named)])
        remedy = _count_remedy(takes, len(given), count=count)
        remedy = remedy or _signature_remedy(takes, len(given), key=key, has_state=has_state)
        raise TypeError(f"{name}{takes} cannot be called as this step calls it, {name}({call}). {remedy}")


def check_count(who: str, f: Any) -> None:
    """Refuses a function that does not take the number of the step.

    Args:
        who: the function in words, such as "last of a pipeline".
        f: the function, perhaps in transforms.

    Raises:
        TypeError: lists the function's arguments, and the remedy.
    """
    takes = _signature_of(inner := _innermost_function(f))
    if takes is None or "step" in takes.parameters or any(p.kind is p.VAR_KEYWORD for p in takes.parameters.values()):
        return
    raise TypeError(
        f"{who} takes the number of the step under count=True, got {function_name(inner)}{takes}. Add the argument"
        " step, as in last(params, h, batch, *, step), or drop count=."
    )


def check_metrics(metrics: Callable[..., Any], *, has_state: bool) -> None:
    """Refuses metrics that `step.evaluate` cannot call.

    Args:
        metrics: the function.
        has_state: whether the step has a model state. Metrics then take the state.

    Raises:
        TypeError: lists the function's arguments, the arguments that `step.evaluate` passes, and the remedy.
    """
    given = ["params", *(["model_state"] if has_state else []), "batch"]
    takes = _signature_of(metrics)
    if takes is None or _accepts_arguments(takes, len(given)):
        return
    name, call = function_name(metrics), ", ".join(given)
    remedy = (
        "With has_state=True metrics take the model state, such as running statistics, as the loss does."
        if has_state
        else "A model state is passed by a step with has_state=True, and a key by none. Bind other arguments before."
    )
    raise TypeError(f"{name}{takes} cannot be called as evaluate(metrics=) calls it, {name}({call}). {remedy}")


def _count_remedy(takes: inspect.Signature, num: int, *, count: bool) -> str:
    """Returns the remedy for a loss that takes the number of the step where the step passes none, or the reverse."""
    if count and _accepts_arguments(takes, num):
        return (
            "With count=True a loss takes the number of the step by name, loss(params, batch, *, step), or drop count=."
        )
    if not count and "step" in takes.parameters and _accepts_arguments(takes, num, ["step"]):
        return (
            "Is 'step' the number of the step? Then pass sharded_step(..., count=True). If not, bind it before:"
            " functools.partial(loss, step=...)."
        )
    return ""


def _signature_remedy(takes: inspect.Signature, num: int, *, key: bool, has_state: bool) -> str:
    if not key and _accepts_arguments(takes, num + 1):
        last = [p.name for p in takes.parameters.values()][num]
        return (
            f"Is {last!r} a key? Then pass it as one: sharded_step(..., key=sf.key(0)). If not, bind it before:"
            f" functools.partial(loss, {last}=...)."
        )
    if key and _accepts_arguments(takes, num - 1):
        return "With key= a loss takes a key for its random numbers. Write loss(params, batch, key), or drop key=."
    if not has_state and _accepts_arguments(takes, num + 1):
        return "A loss that takes a model state, loss(params, model_state, batch), needs has_state=True."
    if has_state and _accepts_arguments(takes, num - 1):
        return "With has_state=True a loss takes a model state after the parameters. Add it, or drop has_state=."
    return "Bind its other arguments before, functools.partial(loss, name=...). Parameters and batch may be any trees."


def _innermost_function(f: Any) -> Any:
    """Returns the function inside this package's transforms. Other decorators may change arguments, and stay."""
    while True:
        if hasattr(type(f), "transform") and hasattr(f, "inner"):
            f = f.inner
        elif is_own(f) and hasattr(f, "__wrapped__"):
            f = f.__wrapped__
        else:
            return f


def _signature_of(f: Callable[..., Any]) -> inspect.Signature | None:
    try:
        return inspect.signature(f, follow_wrapped=False)
    except (TypeError, ValueError):  # builtins may have no signature
        return None


def _accepts_arguments(takes: inspect.Signature, num: int, named: Sequence[str] = ()) -> bool:
    try:
        takes.bind(*range(num), **dict.fromkeys(named))
    except TypeError:
        return False
    return True
