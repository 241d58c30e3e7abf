"""Fields of `Zero` and of its parts, by name."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, TypeVar

from ._disk import Disk
from ._errors import did_you_mean
from ._pace import Pace
from ._travel import Travel

T = TypeVar("T")

PARTS: dict[str, type[Any]] = {"travel": Travel, "pace": Pace, "disk": Disk}
# No name is in two parts.
PART_OF = {field.name: part for part, kind in PARTS.items() for field in dataclasses.fields(kind)}


def nested(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the keywords of `Zero` for these fields. Fields of a part change the given part, if any.

    Raises:
        ValueError: fields of a disk are set, but no directory.
    """
    out = {name: value for name, value in fields.items() if name not in PART_OF}
    for part, kind in PARTS.items():
        given = {name: value for name, value in fields.items() if PART_OF.get(name) == part}
        before = out.get(part)
        if kind is Disk and given and given.get("directory", before and before.directory) is None:
            asked = [f"{name}={value!r}" for name, value in given.items() if value]
            if asked:
                raise ValueError(f"Zero({', '.join(asked)}) has no effect without a directory: disk=Disk(directory).")
            out[part] = None
        elif given:
            out[part] = kind(**given) if before is None else dataclasses.replace(before, **given)
    return out


def flattened(zero: Any) -> dict[str, Any]:
    """Returns the fields of a rule and of its parts by name."""
    out: dict[str, Any] = {}
    for name in (field.name for field in dataclasses.fields(zero)):
        value = getattr(zero, name)
        if name not in PARTS:
            out[name] = value
        elif value is not None:
            out |= {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    return out


def check_names(fields: Mapping[str, Any], own: set[str]) -> None:
    """Refuses names that are not fields of a rule or of its parts.

    Raises:
        TypeError: names the nearest field.
    """
    known = (own - PARTS.keys()) | PART_OF.keys()
    for name in fields:
        if name in PARTS:
            inner = ", ".join(f"{n}=" for n, part in PART_OF.items() if part == name)
            raise TypeError(f"Zero.flat takes the fields of {name} by name: {inner}.")
        if name not in known:
            hint = did_you_mean(name, known) or f" It has {', '.join(sorted(known))}."
            raise TypeError(f"Zero has no field {name!r}.{hint}")


def explains_parts(cls: type[T]) -> type[T]:
    """Refuses a field of a part, and an unknown field, with the right spelling."""
    init = cls.__init__

    @functools.wraps(init)
    def __init__(self: T, *args: Any, **fields: Any) -> None:
        own = {field.name for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
        check_names({name: value for name, value in fields.items() if name not in own}, own)
        for name in fields.keys() & PART_OF.keys():
            raise TypeError(f"Zero has no field {name!r}: write Zero({_spell_fields({name: fields[name]})}).")
        init(self, *args, **fields)

    cls.__init__ = __init__
    return cls


def _spell_fields(fields: Mapping[str, Any]) -> str:
    """Returns these fields as the text of arguments of `Zero`."""
    out = [f"{name}={value!r}" for name, value in fields.items() if name not in PART_OF]
    for part, kind in PARTS.items():
        given = [f"{name}={value!r}" for name, value in fields.items() if PART_OF.get(name) == part]
        out += [f"{part}={kind.__name__}({', '.join(given)})"] if given else []
    return ", ".join(out)
