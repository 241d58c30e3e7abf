"""Hooks of texts, grammars, embeddings, adapters and recorded experts in an engine's step, next to the schedule.

A step calls one hook of all extras before the next hook, in the order of the fields, from `ends` on.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ._plan import StepPlan
from ._requests import Request
from ._runner import StepResults
from ._sampled_tokens import Ends, SampledToken
from ._schedule import Output
from ._state import State


def _do_nothing(*given: Any) -> None:
    del given


def _return_empty(*given: Any) -> dict[Any, Any]:
    del given
    return {}


def list_active(hooks: Sequence["EngineHooks"], name: str) -> list[Callable[..., Any]]:
    """Returns the hooks of a name that do something.

    Example:
        >>> list_active([EngineHooks(), EngineHooks(before=print)], "before")
        [<built-in function print>]
    """
    return [f for x in hooks if (f := getattr(x, name)) is not EngineHooks._field_defaults[name]]


class EngineHooks(NamedTuple):
    """Hooks, pure functions of calls that are equal on all ranks. `EngineHooks()` is the identity.

    Attributes:
        admit: check of a request, with a value for `begin` as its result. The request may never begin.
        begin: hook for a request that begins, with its name and the value of `admit`.
        ends: hook for drawn tokens, with the ends of choices as its result. The ends of earlier extras are given.
        before: hook with the state before the schedule takes the drawn tokens.
        moved: hook for the moves of keys and values at the beginning of the next step.
        fields: hook for an output, with fields of a `Token` as its result.
        take: hook for the outputs of the last plan.
        columns: hook for the next plan, with arguments of `Runner.run` as its result.
        ran: hook for a plan and the plan's results.
    """

    admit: Callable[[Request], Any] = _do_nothing
    begin: Callable[[str, Any], None] = _do_nothing
    ends: Callable[[Sequence[SampledToken], Ends], Ends] = _return_empty
    before: Callable[[State], None] = _do_nothing
    moved: Callable[[Sequence[tuple[int, int]]], None] = _do_nothing
    fields: Callable[[Output], dict[str, Any]] = _return_empty
    take: Callable[[Sequence[Output]], None] = _do_nothing
    columns: Callable[[State, StepPlan], dict[str, Any]] = _return_empty
    ran: Callable[[StepPlan, StepResults], None] = _do_nothing
