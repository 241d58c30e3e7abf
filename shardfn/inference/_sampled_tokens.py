"""Tokens that a plan has drawn, before the schedule takes them. The text may end a choice."""

from array import array
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ._requests import Request
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
