"""The part of a checkpoint of DeepSpeed for each leaf of a state.

params['a'], opt_state...master['a']   fp32 of a
opt_state...mu['a'], ...nu['a']        exp_avg, exp_avg_sq of a
opt_state...trace['a']                 momentum_buffer of a
opt_state...count, step                step
model_state['b']                       buffer b of the module
"""

import re
from collections.abc import Callable
from typing import NamedTuple

from ._dotted import dotted

# From the name of a parameter or buffer here to DeepSpeed's.
Names = Callable[[str], str]
_PARAM = re.compile(r"params(.*)")
_BUFFER = re.compile(r"model_state(.*)")
_STATE = re.compile(r"opt_state(?:\[\d+\]|\.\w+|\['[^']*'\])*?\.(mu|nu|trace|master|count)((?:\[.*|\..*)?)")
_FIELDS = {"mu": "exp_avg", "nu": "exp_avg_sq", "trace": "momentum_buffer", "master": "fp32", "count": "step"}


class StatePart(NamedTuple):
    """Part of a leaf: "fp32", "buffer" or a state, and the parameter's name, empty for the step."""

    kind: str
    name: str = ""


def part_of(path: str, names: Names) -> StatePart | None:
    """Returns the part of a leaf, or None without a counterpart."""
    if found := _PARAM.fullmatch(path):
        return StatePart("fp32", names(dotted(found[1])))
    if found := _BUFFER.fullmatch(path):
        return StatePart("buffer", names(dotted(found[1])))
    if found := _STATE.fullmatch(path):
        kind = _FIELDS[found[1]]
        return StatePart(kind) if kind == "step" else StatePart(kind, names(dotted(found[2])))
    return StatePart("step") if path == "step" else None


def key_of(part: StatePart) -> str:
    """Returns the name of the part in messages.

    Example:
        >>> key_of(StatePart("exp_avg", "a.weight")), key_of(StatePart("step"))
        ('exp_avg of a.weight', 'step')
    """
    return f"{part.kind} of {part.name}" if part.name else part.kind


def is_master(path: str) -> bool:
    """Returns whether a leaf is the wide copy of a parameter."""
    found = _STATE.fullmatch(path)
    return found is not None and found[1] == "master"
