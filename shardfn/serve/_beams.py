"""Beam search over HTTP: a request of one token for each beam in each round, as `Engine.beam_search` has them."""

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from shardfn.inference import Beam, BeamSearch, PromptSearch, Request, Sampling, Token, spell_beam

from ._access import ClientOrigin
from ._errors import ApiError, raise_failures
from ._fields import SAMPLING, TEMPLATE
from ._model import Model
from ._request_tracker import Chunk, ClientRequest, RequestTracker

# Fields that have the same meaning for beams and for draws.
_SHARED = frozenset(
    "model prompt messages n best_of max_tokens max_completion_tokens use_beam_search length_penalty stop_token_ids"
    " ignore_eos skip_special_tokens seed cache_salt tool_choice parallel_tool_calls include_reasoning".split()
)
_NEUTRAL = (False, "", [], {}, {"type": "text"})
_DEFAULTS = {x.name: x.default for x in fields(Sampling)}


def read_beams(given: Mapping[str, Any], how: Sampling, field: str) -> BeamSearch | None:
    """Returns the rule of the search that a body asks for, or None for draws.

    Args:
        given: fields of the body.
        how: sampling of the body's requests.
        field: field that has the grammar, if there is one.

    Raises:
        ApiError: a field cannot be combined with a search, or the rule is out of range.
    """
    if not given.get("use_beam_search"):
        if given.get("length_penalty", 1) != 1:
            text = "length_penalty has no effect without use_beam_search: true. Leave it out."
            raise ApiError(400, text, "length_penalty")
        return None
    for name in given:
        if name not in _SHARED and name not in TEMPLATE and not _is_neutral(name, given[name]):
            text = f"{name} cannot be combined with use_beam_search. Leave one of them out."
            raise ApiError(400, text, name, "unsupported_parameter")
    if how.grammar is not None:
        text = f"{field} has a grammar, which cannot be combined with use_beam_search. Leave one of them out."
        raise ApiError(400, text, field, "unsupported_parameter")
    try:
        penalty = given.get("length_penalty", 1)
        return BeamSearch(how.n, how.max_tokens, penalty, stop_tokens=how.stop_tokens)
    except ValueError as error:
        text = str(error).replace("num_beams", "n", 1)
        raise ApiError(400, text, text.split()[0]) from error


def _is_neutral(name: str, value: Any) -> bool:
    if name == "temperature":  # as of greedy and of plain draws
        return value in (0, 1)
    if name in SAMPLING:
        return value == _DEFAULTS[name]
    return any(value == x and type(value) is type(x) for x in _NEUTRAL)


async def search_beams(
    calls: RequestTracker, model: Model, asked: Sequence[Request], rule: BeamSearch, origin: ClientOrigin
) -> ClientRequest:
    """Returns a call whose choices are the beams of each prompt, the best first.

    Args:
        calls: calls in progress.
        model: model of the answer.
        asked: request of each prompt.
        rule: rule of the search.
        origin: sender.

    Raises:
        ApiError: a round has failed.
    """
    searches, how, first = [PromptSearch(rule) for _ in asked], rule.make_sampling(), True
    while rows := [(i, tokens) for i, one in enumerate(searches) for tokens in one.running]:
        requests = [replace(asked[i], prompt=(*asked[i].prompt, *tokens), sampling=how) for i, tokens in rows]
        call = calls.open(requests, origin=origin, continues=not first)
        try:
            tops = iter(await _read_tops(call, len(rows)))
        finally:
            calls.close(call)
        for search in searches:
            if num := len(search.running):
                search.take([next(tops) for _ in range(num)])
        first = False
    made = ClientRequest(asked, 0)
    texts = model.texts if asked[0].sampling.skip_special_tokens else model.spelling
    for i, (search, request) in enumerate(zip(searches, asked, strict=True)):
        for j, beam in enumerate(search.beams):
            spelled = spell_beam(beam, texts, request.spelled)
            made.put(Chunk(made.starts[i] + j, _make_token(spelled, j)))
            made.drawn += len(beam.tokens)
    return made


async def _read_tops(call: ClientRequest, num: int) -> list[tuple[tuple[int, float], ...]]:
    """Returns the most probable tokens of each beam of a round."""
    found = dict[int, tuple[tuple[int, float], ...]]()
    while pieces := await call.take():
        raise_failures(piece.token.finish_reason for piece in pieces)
        found |= {piece.choice: piece.token.top for piece in pieces if piece.token.top}
    return [found[i] for i in range(num)]


def _make_token(beam: Beam, choice: int) -> Token:
    """Returns the end of a choice, with the text of the whole beam."""
    return Token("", choice, 0, None, None, 0, beam.finish_reason, beam.text)
