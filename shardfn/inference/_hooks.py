"""Hooks of an engine's step next to the schedule, and the tokens that they see before the schedule takes them.

A step calls one hook of all extras before the next hook, in the order of the fields, from `ends` on.
"""

from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from ._plan import StepPlan
from ._requests import Request
from ._runner import StepResults
from ._schedule import Output
from ._state import State

Choice = tuple[str, int]  # the name of a request, and the number of its choice
Place = tuple[str, int, int]  # the name of a request, its choice, and the position of a token
Ends = dict[Place, str]  # how choices finish with the token of a place


class SampledToken(NamedTuple):
    """A token that a plan has drawn.

    Attributes:
        place: place of the token.
        token: id.
        request: request of the choice.
        last: whether the choice ends with the token, by a stop token or the number of tokens.
    """

    place: Place
    token: int
    request: Request
    last: bool


class DrawingRow(NamedTuple):
    """Row of a plan that draws a token.

    Attributes:
        row: number of the row.
        choice: name of the request, and number of the choice.
        request: request of the choice.
        output: drawn tokens before the row's place, and drafts that lead to the place.
        draft: number of the draft that the row follows, or -1 for the last known token.
    """

    row: int
    choice: Choice
    request: Request
    output: Sequence[int]
    draft: int


def list_drawing_rows(state: State) -> Iterator[DrawingRow]:
    """Yields the rows of the plan in flight that draw a token, with the tokens before."""
    for chunk, one, first in state.rows_in_flight():
        known = len(chunk.positions) - len(chunk.drafts) - 1
        if known < 0 or chunk.positions[known] + 1 < len(one.tokens):
            continue  # a part of a prompt, or a scored prompt
        output = one.tokens[one.prompt :]
        for draft in range(-1, len(chunk.drafts)):
            before = output if draft < 0 else output + array("q", chunk.drafts.branch(draft))
            yield DrawingRow(first + known + 1 + draft, (one.name, one.choice), one.request, before, draft)


def list_new_tokens(state: State, drawn: Sequence[int]) -> Iterator[SampledToken]:
    """Yields the drawn tokens of the plan in flight that the schedule takes, unless a text ends before.

    Tokens of logits that were not finite, and tokens after them, are left out.
    """
    for chunk, one, first in state.rows_in_flight():
        how = one.request.sampling
        for _, p, token in chunk.read_rows(drawn, first):
            place = p + 1
            if token < 0:
                break
            if place >= len(one.tokens) and how.max_tokens:
                last = token in how.stop_tokens or place + 1 - one.prompt == how.max_tokens
                yield SampledToken((one.name, one.choice, place), token, one.request, last)
                if last:
                    break


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
