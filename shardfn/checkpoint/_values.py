"""A caller's values as JSON. Infinities and NaN, which JSON lacks, become for example `{"$float": "inf"}`.

A dict with the only key "$float" is wrapped in another dict, so that every value is restored exactly.
"""

import math
from typing import Any

from shardfn.core import a_kind, raise_all

_FLOAT = "$float"


def as_json(x: Any, name: str = "user") -> Any:
    """Returns a value of JSON's types, of Python's numbers and containers.

    Args:
        x: dicts, lists and tuples of strings, numbers, bools and None.
        name: name in messages.

    Raises:
        TypeError: entries are of other types. The message lists them by path.

    Example:
        >>> as_json({"best": math.inf, "next": [1, 2.5]})
        {'best': {'$float': 'inf'}, 'next': [1, 2.5]}
    """
    problems: list[str] = []
    out = _encode_value(x, name, problems)
    remedy = "a tensor of one element has .item(), and of more .tolist()"
    raise_all(TypeError, f"checkpoints keep JSON values beside a tree; {remedy}:", problems)
    return out


def from_json(x: Any) -> Any:
    """Returns the inverse of `as_json`.

    Raises:
        ValueError: `x` is not a result of `as_json`.

    Example:
        >>> from_json({"best": {"$float": "inf"}, "next": [1, 2.5]})
        {'best': inf, 'next': [1, 2.5]}
    """
    if isinstance(x, list):
        return [from_json(y) for y in x]
    if not isinstance(x, dict):
        return x
    inner = x[_FLOAT] if x.keys() == {_FLOAT} else None
    if isinstance(inner, str):
        return float(inner)
    plain = inner if isinstance(inner, dict) and inner.keys() == {_FLOAT} else x
    return {k: from_json(y) for k, y in plain.items()}


def _encode_value(x: Any, path: str, problems: list[str]) -> Any:
    if isinstance(x, dict):
        out = {k: _encode_value(y, f"{path}[{k!r}]", problems) for k, y in x.items()}
        problems += [
            f"{path} has the key {k!r}, {a_kind(k)}, which is not JSON serializable"
            for k in x
            if not isinstance(k, str | int | float | None)
        ]
        return {_FLOAT: out} if out.keys() == {_FLOAT} else out
    if isinstance(x, list | tuple):
        return [_encode_value(y, f"{path}[{i}]", problems) for i, y in enumerate(x)]
    if isinstance(x, float) and not math.isfinite(x):
        return {_FLOAT: str(float(x))}
    if not isinstance(x, str | int | float | bool | None):
        problems.append(f"{path}, {a_kind(x)}, is not JSON serializable")
    return x
