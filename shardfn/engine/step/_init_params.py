"""Parameters as `init` takes them: a tree of tensors, or a function that makes one."""

import inspect
from collections.abc import Callable
from typing import Any

from shardfn.core import PyTree, deferred, named_leaves, raise_all
from shardfn.engine.loss import check_params, function_name, module_name


def made(params: PyTree, args: tuple[Any, ...]) -> PyTree:
    """The tree itself, or the one that the function makes of `args`, with its draws deferred.

    Raises:
        TypeError: there is no such tree; names the value that was passed, and the remedy.
    """
    _refuse_module(params)
    if callable(params):
        _check_arguments(params, args)
        with deferred():
            params = params(*args)
        _refuse_module(params)
    elif args:
        raise TypeError(
            f"init(params, ...) got a tree of parameters and {len(args)} argument{'s' * (len(args) > 1)} more, which"
            " nothing takes. Write step.init(params), and step.init(params, model_state=...) for a step with has_state;"
            " parameters are drawn by a function: step.init(f, sf.key(0)), for f(sf.key(0))."
        )
    check_params(params)
    _refuse_mixture(params)
    return params


def _refuse_module(params: Any) -> None:
    if name := module_name(params):
        raise TypeError(
            f"init takes a tree of tensors, or a function that makes one, and {name} is a module. Take its parameters"
            " out: params, apply = sf.from_module(module); call apply(params, ...) in the loss, and step.init(params)."
        )


def _refuse_mixture(params: PyTree) -> None:
    """Refuses trees in which some leaves have values and others do not. A tree without values is for `step.lower`."""
    named = named_leaves(params, "params")
    without = [path for path, x in named if x.device.type == "meta"]
    if 0 < len(without) < len(named):
        raise_all(
            ValueError,
            "some parameters are on 'meta', where they have no values, and others are not; load or draw these first"
            " (of a module: module.to_empty(device='cpu'), and then its weights):",
            without,
        )


def _check_arguments(f: Callable[..., Any], args: tuple[Any, ...]) -> None:
    try:
        takes = inspect.signature(f)
    except (TypeError, ValueError):  # builtins may have no signature
        return
    try:
        takes.bind(*args)
    except TypeError as error:
        name = function_name(f)
        raise TypeError(
            f"init({name}, ...) calls {name}{takes} with {len(args)} arguments: {error}. Pass them after it, as in"
            f" step.init({name}, sf.key(0)); or pass the parameters themselves."
        ) from error
