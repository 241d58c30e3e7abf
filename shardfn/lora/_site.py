"""Leaves with an adapter, and the choice of rank and scale by patterns."""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any, TypeVar

from shardfn.core import P

V = TypeVar("V")


@dataclasses.dataclass(frozen=True)
class Site:
    """Leaf with an adapter, or with a trained copy.

    Attributes:
        entries: keys of the path.
        shape: global shape.
        spec: spec of the leaf.
        stacked: whether layers are gathered one at a time (`Sharding`).
        rank: r.
        alpha: the numerator of the scale.
        full: whether a copy of the whole leaf is trained, in place of an adapter.
    """

    entries: tuple[Any, ...]
    shape: tuple[int, ...]
    spec: P
    stacked: bool = False
    rank: int = 0
    alpha: float = 0.0
    full: bool = False


def of_pattern(patterns: Mapping[str, V], path: str, default: V) -> V:
    """Returns the value of the first pattern that matches the end of a module's path after a dot, as in `peft`.

    Example:
        >>> of_pattern({"v_proj": 4}, "layers.0.v_proj.weight", 8), of_pattern({"proj": 4}, "layers.0.v_proj.weight", 8)
        (4, 8)
    """
    names = {path, path.removesuffix(".weight")}
    fits = (v for p, v in patterns.items() if any(re.match(rf"(.*\.)?({p})$", name) for name in names))
    return next(fits, default)


def unused(patterns: Mapping[str, Any], paths: list[str]) -> list[str]:
    """Returns the patterns that match no path."""
    missing = object()
    return [p for p in patterns if all(of_pattern({p: 0}, path, missing) is missing for path in paths)]
