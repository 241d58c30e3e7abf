"""Answers in interfaces other than OpenAI's completions and chats: a writer makes events from the parts of one choice.

A body of such an interface becomes a body of a chat, so that all interfaces have the same checks, prompts and tokens.
"""

import json
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from ._errors import ApiError, raise_failures
from ._message_parser import MessagePart
from ._model import Model
from ._parse_request import ParsedRequest
from ._request_tracker import ClientRequest
from ._responses import ChoiceReader

Events = list[tuple[str, dict[str, Any]]]  # names and objects


class Usage(NamedTuple):
    """Tokens of an answer.

    Attributes:
        prompt: tokens of the prompt.
        drawn: tokens of the answer, its end included.
        reasoning: tokens of the reasoning.
    """

    prompt: int
    drawn: int = 0
    reasoning: int = 0


class AnswerWriter(Protocol):
    """Writer of one answer. The events of a stream have the whole answer in pieces."""

    answer: dict[str, Any]

    def begin(self, usage: Usage) -> Events:
        """Returns the first events."""
        ...

    def add(self, parts: Sequence[MessagePart], ids: Mapping[int, str]) -> Events:
        """Returns the events of further parts. Calls have ids."""
        ...

    def end(self, reason: str, stop: str | None, usage: Usage) -> Events:
        """Returns the last events, from the reason and the stop string that ended the text."""
        ...

    def fail(self, error: ApiError) -> Events:
        """Returns the event of an error."""
        ...


class DialectAnswer:
    """Answer to a call by a writer.

    Args:
        writer: writer of the answer.
        model: model of the answer.
        asked: meaning of the body.
        call: call with its tokens.
    """

    def __init__(self, writer: AnswerWriter, model: Model, asked: ParsedRequest, call: ClientRequest) -> None:
        self._writer, self._asked, self._call = writer, asked, call
        how = asked.requests[0].sampling
        texts = model.texts if how.skip_special_tokens else model.spelling
        self._choice = ChoiceReader(asked.rules, how.stop, texts.decode)

    async def whole(self) -> dict[str, Any]:
        """Returns the answer, once all tokens are there.

        Raises:
            ApiError: the choice has failed.
        """
        self._writer.begin(self._usage)
        async for _ in self._list_events():
            pass
        return self._writer.answer

    async def events(self) -> AsyncIterator[bytes]:
        """Yields the events of a stream."""
        yield _encode_events(self._writer.begin(self._usage))
        try:
            async for made in self._list_events():
                if made:
                    yield _encode_events(made)
        except ApiError as error:
            yield _encode_events(self._writer.fail(error))

    @property
    def _usage(self) -> Usage:
        return Usage(self._call.prompt_tokens, self._call.drawn, self._choice.reasoning)

    async def _list_events(self) -> AsyncIterator[Events]:
        has_grammar = self._asked.requests[0].sampling.grammar is not None
        while pieces := await self._call.take():
            reasons = [piece.token.finish_reason for piece in pieces]
            raise_failures(reasons, self._asked.grammar_field if has_grammar else "")
            for piece in pieces:
                parts, reason = self._choice.take(piece)
                made = self._writer.add(parts, self._choice.ids)
                if reason is not None:
                    made += self._writer.end(reason, self._choice.stop, self._usage)
                yield made


def _encode_events(events: Events) -> bytes:
    lines = (f"event: {name}\ndata: {json.dumps(value, ensure_ascii=False)}\n\n" for name, value in events)
    return "".join(lines).encode()


def make_image_part(url: str, at: str) -> dict[str, Any]:
    """Returns an image as a part of a chat's message, with the place of its address in the body."""
    return {"type": "image_url", "image_url": {"url": url}, "place": at}


def pop_image_places(messages: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Removes the places of images from messages. Returns them by the fields of a chat that have the addresses.

    Example:
        >>> messages = [{"role": "user", "content": [make_image_part("data:...", "input[3].content[0].image_url")]}]
        >>> pop_image_places(messages)
        {'messages[0].content[0].image_url.url': 'input[3].content[0].image_url'}
    """
    return {
        f"messages[{i}].content[{j}].image_url.url": part.pop("place")
        for i, message in enumerate(messages)
        if isinstance(content := message.get("content"), list)
        for j, part in enumerate(content)
        if "place" in part
    }


def rename_fields(error: ApiError, names: Mapping[str, str]) -> ApiError:
    """Returns the error of a chat with the field's name in another interface.

    Args:
        error: error that names a field of a chat.
        names: names by fields of chats.

    Example:
        >>> error = ApiError(400, "max_tokens must be at least 1, got 0.", "max_tokens")
        >>> rename_fields(error, {"max_tokens": "max_output_tokens"}).message
        'max_output_tokens must be at least 1, got 0.'
    """
    field = error.param or ""
    name = next((old for old in names if field == old or field.startswith((f"{old}.", f"{old}["))), None)
    if name is None:
        return error
    text = error.message.replace(field, names[name], 1)
    return ApiError(error.status, text, names[name], error.code, error.headers)
