"""Messages about leaves that are not tensors, with the way to make tensors of such leaves."""

import re
from collections.abc import Mapping
from typing import Any

import numpy
from torch import Tensor, nn

from shardfn.core import PyTree, a_kind, first_of, named_leaves

_SHOWN = 20
_INDICES = re.compile(r"(\[\d+\])+$")


def no_tensors(tree: PyTree, name: str) -> list[str]:
    """Returns a line for each leaf of a tree, called `name`, that is not a tensor, with the remedy.

    Lists are trees here. For a list of numbers, at any depth, there is a single line, with the first number.

    Example:
        >>> no_tensors({"x": [[1, 2], [3, 4]]}, "batch")
        ["batch['x'] is a list of numbers (batch['x'][0][0] is an int). Write torch.tensor(batch['x'])"]
    """
    if _are_named(tree):
        return [f"{name} is a {type(tree).__name__} of pairs of a name and a tensor. Write dict({name})"]
    told: dict[str, str] = {}
    named = named_leaves(tree, name)
    mixed = {_INDICES.sub("", path) for path, x in named if not isinstance(x, int | float)}
    for path, x in named:
        if isinstance(x, Tensor):
            continue
        of = _INDICES.sub("", path)
        if isinstance(x, int | float) and of != path and of not in mixed:
            told.setdefault(of, f"{of} is a list of numbers ({path} is {a_kind(x)}). Write torch.tensor({of})")
        else:
            told[path] = f"{path} is {a_kind(x)}{_leaf_remedy(path, x)}"
    return first_of(list(told.values()), _SHOWN)


def _are_named(tree: PyTree) -> bool:
    """Returns whether a tree is the list that a module's `named_parameters()` yields."""
    pairs = isinstance(tree, list | tuple) and bool(tree) and all(isinstance(x, tuple) and len(x) == 2 for x in tree)
    return pairs and all(isinstance(k, str) and isinstance(x, Tensor) for k, x in tree)


def _leaf_remedy(path: str, x: Any) -> str:
    if isinstance(x, numpy.ndarray | numpy.generic):
        make = f"torch.from_numpy({path})" if isinstance(x, numpy.ndarray) else f"torch.tensor({path})"
        return f". Write {make}"
    if isinstance(x, bool | int | float | complex):
        return f". Write torch.tensor({x!r})"
    if isinstance(x, str | bytes):
        return ", which no rank can compute with. Leave it out"
    if isinstance(x, nn.Module):
        return ". For a module write params, apply = sf.from_module(module)"
    if isinstance(x, Mapping):
        return f", a mapping that is no dict. Write dict({path})"
    if callable(x):
        return ". Unpack the result of from_module: params, apply = sf.from_module(module)"
    if hasattr(x, "__iter__"):
        if path == "batch":
            return ", which is not one batch but an iterable: pass its items, for batch in ...: step(state, batch)"
        return ". For a module write params, apply = sf.from_module(module)"
    return ""
