"""The description of a step."""

from collections.abc import Sequence
from typing import Any

from shardfn.core import dtype_name
from shardfn.engine.loss import (
    Transform,
    Unwrapped,
    function_name,
    num_microbatches,
)
from shardfn.engine.plan import Planner


def described(unwrapped: Unwrapped, loss: Any, planner: Planner, names: Sequence[str] = ("",)) -> str:
    """The `repr` of a step: its loss or the names of its losses, its stage, its precision and its mesh."""
    inner = unwrapped.loss
    while isinstance(inner, Transform):
        inner = getattr(inner, "inner", type(inner).__name__)
    name = ", ".join(names) or (inner if isinstance(inner, str) else function_name(inner))
    mixed, count = unwrapped.mixed, num_microbatches(loss)
    facts = [f"ZeRO stage {planner.zero.stage}"]
    facts += [f"computed in {dtype_name(mixed.policy.compute)}"] if mixed is not None else []
    facts += [f"{count} microbatches"] if count > 1 else []
    facts += ["jit"] if unwrapped.jitted is not None else []
    return f"ShardedStep({name}: {', '.join(facts)}; {planner.mesh!r})"
