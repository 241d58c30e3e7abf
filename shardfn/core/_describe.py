"""`describe`: the parts of a value, in lines that are the same in every process with an equal value.

A function is described by place of definition and closure. So all compositions of functions, such as optimizers, can be
described, and no wrapper has to pass anything on.
"""

import dataclasses
import functools
import os
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from shardfn._torch import is_functorch_wrapped_tensor

from ._spec import P, Sharding

_PLAIN = (bool, int, float, complex, str, bytes, types.NoneType, torch.dtype, torch.Size, P, Sharding)
# Each rank may have a separate disk, and a rank that has used a rule locally remembers more.
_OWN = {"directory", "memo"}
# A schedule of a number is described by its values at these steps.
_RATES, _COUNTS = ("learning_rate", "schedule", "schedules", "rate"), (0, 1, 10, 100, 1000, 10000, 100000)
_PACKAGE = __name__.partition(".")[0]


def describe(value: Any, path: str, *, strangers: bool = True) -> list[str]:
    """Returns a line for each fact about a value, with the fact's path.

    Numbers, dtypes and texts are described in full, tensors of a few elements by values, larger tensors by shape and
    dtype. Tuples, dicts, dataclasses and this package's functions are described part by part. A function from elsewhere
    is described by name and line, and from the closure only by values built from this package's functions, because
    other values may legitimately differ between ranks. Bound arguments of methods and partials are skipped for the same
    reason. A schedule of the learning rate adds some of its values. Other objects are described by their types.

    Args:
        value: any value.
        path: name in the lines.
        strangers: whether functions from elsewhere, and the values of tensors, are described at all.

    Example:
        >>> describe({"decay": 0.5, "dtype": torch.float16}, "x")
        ["x['decay'] = 0.5", "x['dtype'] = torch.float16"]
    """
    return list(_describe_lines(value, path, _DescribedObjects(strangers)))


class _DescribedObjects:
    """Objects described so far, kept alive so that no other object gets their ids, and the option `strangers`."""

    def __init__(self, strangers: bool) -> None:
        self.strangers = strangers
        self._kept: dict[int, Any] = {}

    def __contains__(self, x: Any) -> bool:
        return id(x) in self._kept

    def add(self, x: Any) -> None:
        """Marks an object as described."""
        self._kept[id(x)] = x


def _describe_lines(x: Any, path: str, seen: _DescribedObjects) -> Iterator[str]:
    if isinstance(x, _PLAIN):
        yield f"{path} = {x!r}"
    elif isinstance(x, torch.device):
        yield f"{path} = {x.type}"  # the index belongs to this rank
    elif isinstance(x, Tensor):
        yield f"{path} = {_describe_tensor(x, seen.strangers)}"
    elif isinstance(x, set | frozenset):
        yield f"{path} = {sorted(map(_text_without_addresses, x))}"
    elif isinstance(x, type):
        yield f"{path} = {x.__module__}.{x.__qualname__}"
    elif isinstance(x, types.FunctionType) and plain(x) is not x:
        yield from _describe_lines(plain(x), path, seen)
    elif x not in seen:
        seen.add(x)
        yield from _describe_parts(x, path, seen)


def _describe_parts(x: Any, path: str, seen: _DescribedObjects) -> Iterator[str]:
    if isinstance(x, functools.partial | types.MethodType | types.FunctionType):
        yield from _describe_function(x, path, seen)
    elif callable(x) and type(x).__module__.partition(".")[0] != _PACKAGE:
        yield f"{path}: {type(x).__module__}.{type(x).__qualname__}"  # fields may differ between ranks
        yield from _describe_rates(x, path) if seen.strangers else ()
    elif fields := _fields_of(x):
        functions = [f for f in fields.values() if isinstance(f, types.FunctionType)]
        if functions:  # a noun made of functions, such as a rule of an optimizer
            yield from _describe_together(functions, path, seen)
        else:
            yield f"{path}: {type(x).__qualname__}"
        for name, value in fields.items():
            if not isinstance(value, types.FunctionType) and not (functions and (value is None or value is False)):
                yield from _describe_lines(value, f"{path}.{name}", seen)
    elif isinstance(x, Mapping):
        for key in sorted(x, key=_text_without_addresses):
            yield from _describe_lines(x[key], f"{path}[{_text_without_addresses(key)}]", seen)
    elif isinstance(x, list | tuple):
        for i, value in enumerate(x):
            yield from _describe_lines(value, f"{path}[{i}]", seen)
    else:
        yield f"{path}: {type(x).__module__}.{type(x).__qualname__}"


def _describe_function(f: Any, path: str, seen: _DescribedObjects) -> Iterator[str]:
    if isinstance(f, functools.partial | types.MethodType):
        inner, of = (f.func, [f.args, f.keywords]) if isinstance(f, functools.partial) else (f.__func__, f.__self__)
        if isinstance(inner, types.FunctionType) and not is_own(plain(inner)):
            if seen.strangers:
                yield from _describe_together([inner], path, seen)
                yield from _describe_rates(f, path)
            return
        yield from _describe_lines(inner, path, seen)
        if isinstance(inner, types.FunctionType):
            yield from _describe_lines(of, f"{path} of", seen)
    elif seen.strangers or is_own(f):
        yield from _describe_together([f], path, seen)
        if not is_own(f):
            yield from _describe_rates(f, path)


def _describe_together(functions: list[types.FunctionType], path: str, seen: _DescribedObjects) -> Iterator[str]:
    """Describes functions that were defined together by the defining function and by their variables."""
    names: dict[str, None] = {}
    found: dict[str, Any] = {}
    queue, known = [plain(f) for f in functions], list[Any]()
    if len(queue) > 1 and all(f in seen for f in queue):
        return
    while queue:
        f = queue.pop(0)
        if any(f is x for x in known):
            continue
        known.append(f)
        names[_maker_name(f)] = None
        for name, value in closed_over(f).items():
            if (
                isinstance(value, types.FunctionType)
                and _maker_name(plain(value)) == _maker_name(f)
                and "<locals>" in _function_name(f)
            ):
                queue.append(plain(value))
            elif (is_own(f) or _is_own_value(value)) and name not in _OWN:
                found[name if found.get(name, value) is value else f"{f.__name__}.{name}"] = value
    for f in known:
        seen.add(f)
    yield f"{path}: {' + '.join(names)}"
    for name, value in sorted(found.items()):
        yield from _describe_lines(value, f"{path}.{name}", seen)


def _text_without_addresses(x: Any) -> str:
    """Returns a text without memory addresses."""
    return repr(x) if isinstance(x, _PLAIN) else type(x).__qualname__


def _fields_of(x: Any) -> dict[str, Any]:
    """Returns the fields of a NamedTuple, or the shown and compared fields of a dataclass, empty for other values."""
    if dataclasses.is_dataclass(x):
        shown = [f.name for f in dataclasses.fields(x) if f.repr and f.compare]
    else:
        shown = getattr(x, "_fields", ())
    return {name: getattr(x, name) for name in shown if name not in _OWN}


def _describe_rates(f: Callable[..., Any], path: str) -> Iterator[str]:
    if not any(path.endswith(f".{name}") for name in _RATES):
        return
    try:
        values = [float(f(torch.tensor(n, dtype=torch.int32))) for n in _COUNTS]
    except Exception:  # not a schedule. If a schedule is expected, the optimizer raises the error
        return
    yield f"{path} = {values} at {list(_COUNTS)}"


def _describe_tensor(x: Tensor, values: bool) -> str:
    look = f"{x.dtype} {tuple(x.shape)}"
    if not values or type(x) is not Tensor or x.device.type == "meta" or is_functorch_wrapped_tensor(x):
        return look  # no values here, or no readable values
    return f"{x.tolist()} {look}" if x.numel() <= 16 else look


def plain(f: types.FunctionType) -> types.FunctionType:
    """Returns a function without decorators from elsewhere, such as `torch.no_grad()` and type checkers."""
    while not is_own(f) and (wrapped := getattr(f, "__wrapped__", None)) is not None:
        # A decorator runs the function in the closure. `__wrapped__` may have been copied from there.
        inside = [x for x in (*closed_over(f).values(), wrapped) if isinstance(x, types.FunctionType)]
        own = [x for x in inside if is_own(x)] or [x for x in inside if x is wrapped]
        if not own:
            break
        f = own[0]
    return f


def closed_over(f: types.FunctionType) -> dict[str, Any]:
    """Returns the variables of a closure that have a value, and a function's defaults."""
    defaults = f.__defaults__ or ()
    names = f.__code__.co_varnames[f.__code__.co_argcount - len(defaults) : f.__code__.co_argcount]
    given = dict(zip(names, defaults, strict=True)) | (f.__kwdefaults__ or {})
    cells = {k: v for k, v in given.items() if v is not None}
    for name, cell in zip(f.__code__.co_freevars, f.__closure__ or (), strict=True):
        try:
            cells[name] = cell.cell_contents
        except ValueError:  # not set yet
            continue
    return cells


def is_own(f: Any) -> bool:
    """Returns whether a function belongs to this package. A copied name does not count."""
    return isinstance(f, types.FunctionType) and f.__globals__.get("__name__", "").partition(".")[0] == _PACKAGE


def _is_own_value(x: Any) -> bool:
    """Returns whether a value is made of this package's functions."""
    if isinstance(x, types.FunctionType):
        return is_own(plain(x))
    parts = list(_fields_of(x).values()) if hasattr(x, "_fields") else x if isinstance(x, list | tuple) else []
    return any(isinstance(part, types.FunctionType | tuple) and _is_own_value(part) for part in parts)


def _function_name(f: types.FunctionType) -> str:
    return f.__code__.co_qualname


def _maker_name(f: types.FunctionType) -> str:
    """Returns the name of the defining function for this package's functions, else name, line and file."""
    if is_own(f):
        return _function_name(f).partition(".<locals>")[0]
    return f"{_function_name(f)}, line {f.__code__.co_firstlineno} of {os.path.basename(f.__code__.co_filename)}"
