"""From the tokens of a call to OpenAI's answers: whole, or as events that a client reads while tokens come."""

import json
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, NamedTuple

from shardfn.inference import Detokenizer

from ._errors import ApiError, raise_failures
from ._message_parser import MessagePart, join_parts
from ._model import Model
from ._parse_request import MessageRules, ParsedRequest
from ._request_tracker import Chunk, ClientRequest


class Spelled(NamedTuple):
    """A token with its log probability.

    Attributes:
        text: text of the single token.
        data: bytes of the token, or None for a token without bytes by itself.
        logprob: log probability under the raw logits, or None for the first token of a prompt.
        offset: place in the choice's text at which the token begins.
        top: most probable tokens at the token's position.
    """

    text: str
    data: bytes | None
    logprob: float | None
    offset: int = 0
    top: "Sequence[Spelled]" = ()


class Speller:
    """Speller of the tokens of a single choice.

    Args:
        spelling: texts of single tokens, also of special tokens.
        texts: texts of choices.
        prompt: tokens before the first token that is spelled.
    """

    def __init__(self, spelling: Detokenizer, texts: Detokenizer, prompt: Sequence[int]) -> None:
        self._spelling, self._growing, self._offset = spelling, texts.start(prompt), 0
        self._holds = False  # whether bytes wait for the rest of their character

    def spell(self, token: int, logprob: float | None, top: Sequence[tuple[int, float]] = ()) -> Spelled:
        """Returns the next token."""
        made, text, begin = self._spell_token(token, logprob), self._growing.add(token), self._offset
        self._offset += len(text)
        if self._holds:  # bytes that turn out to be no character are a separate text before the token
            begin = max(begin, self._offset - len(made.text))
        self._holds = not text
        return made._replace(offset=begin, top=[self._spell_token(*x) for x in top])

    def _spell_token(self, token: int, logprob: float | None) -> Spelled:
        data = None if self._spelling.bytes_of is None else self._spelling.bytes_of(token)
        return Spelled(self._spelling.decode([token]), data, logprob)


Shape = Callable[[list[Spelled], int], dict[str, Any]]


def completion_logprobs(tokens: list[Spelled], num: int) -> dict[str, Any]:
    """Returns the form of `/v1/completions`, with `num` most probable tokens and the token itself, by their texts.

    Example:
        >>> completion_logprobs([Spelled("b", b"b", -1.5, 3, [Spelled("a", b"a", -0.5)])], 1)["top_logprobs"]
        [{'a': -0.5, 'b': -1.5}]
    """
    return {
        "tokens": [_name_token(t) for t in tokens],
        "token_logprobs": [t.logprob for t in tokens],
        "top_logprobs": [_group_texts([*t.top, t]) for t in tokens] if num else None,
        "text_offset": [t.offset for t in tokens],
    }


def chat_logprobs(tokens: list[Spelled], num: int) -> dict[str, Any]:
    """Returns the form of `/v1/chat/completions`.

    Example:
        >>> chat_logprobs([Spelled("b", b"b", -1.5)], 0)["content"]
        [{'token': 'b', 'logprob': -1.5, 'bytes': [98], 'top_logprobs': []}]
    """
    del num
    return {
        "content": [{**_make_row(t), "top_logprobs": [_make_row(x) for x in t.top]} for t in tokens],
        "refusal": None,
    }


def _make_row(token: Spelled) -> dict[str, Any]:
    data = None if token.data is None else list(token.data)
    return {"token": token.text, "logprob": token.logprob, "bytes": data}


def _name_token(token: Spelled) -> str:
    """Returns the text of a token, or its bytes as OpenAI writes them where the bytes are not valid text."""
    try:
        return token.text if token.data is None else token.data.decode() and token.text
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token.data or b"")


def _group_texts(tokens: Sequence[Spelled]) -> dict[str, float] | None:
    """Returns log probabilities by text, or None without a value. For equal texts the most probable token counts."""
    found: dict[str, float] = {}
    for token in tokens:
        if token.logprob is not None:
            found.setdefault(_name_token(token), token.logprob)
    return found or None


class CallIds(dict[int, str]):
    """Ids of a choice's calls by their numbers. An id is drawn when it is first read."""

    def __missing__(self, call: int) -> str:
        return self.setdefault(call, "call_" + secrets.token_hex(12))


class ResponseFormat(NamedTuple):
    """Words in which two routes answer differently.

    Attributes:
        prefix: prefix of the answer's id.
        whole: name of an answer's object.
        chunk: name of a piece's object.
        opens: whether each choice begins with a piece that has its role.
        text: function from the parts of a whole answer to a choice's fields.
        delta: function from further parts to a choice's fields.
        logprobs: function from tokens with log probabilities, and the number of most probable tokens of each, to
            fields.
    """

    prefix: str
    whole: str
    chunk: str
    opens: bool
    text: Callable[[list[MessagePart], CallIds], dict[str, Any]]
    delta: Callable[[list[MessagePart], CallIds], dict[str, Any]]
    logprobs: Shape


def _join_text(parts: list[MessagePart], ids: CallIds) -> dict[str, Any]:
    del ids
    return {"text": "".join(part.text for part in parts)}


def _make_message(parts: list[MessagePart], ids: CallIds) -> dict[str, Any]:
    """Returns the field of a whole message."""
    joined = {kind: "".join(x.text for x in parts if x.kind == kind) for kind in ("content", "reasoning")}
    calls = list[dict[str, Any]]()
    for part in parts:
        if part.kind == "call":
            function = {"name": part.text, "arguments": ""}
            calls.append({"id": ids[part.call], "type": "function", "function": function})
        elif part.kind == "arguments":
            calls[part.call]["function"]["arguments"] += part.text
    made = {"role": "assistant", "content": joined["content"] or (None if calls else ""), "refusal": None}
    made |= {"reasoning_content": joined["reasoning"]} if joined["reasoning"] else {}
    return {"message": made | ({"tool_calls": calls} if calls else {})}


def _make_delta(parts: list[MessagePart], ids: CallIds) -> dict[str, Any]:
    """Returns the field of a further piece of a message."""
    made = dict[str, Any]()
    for part in parts:
        name = {"content": "content", "reasoning": "reasoning_content"}.get(part.kind)
        if name is not None:
            made[name] = made.get(name, "") + part.text
        elif part.kind == "call":
            call = {"index": part.call, "id": ids[part.call], "type": "function"}
            made.setdefault("tool_calls", []).append(call | {"function": {"name": part.text, "arguments": ""}})
        else:
            calls = made.setdefault("tool_calls", [])
            if not calls or calls[-1]["index"] != part.call:
                calls.append({"index": part.call, "function": {"arguments": ""}})
            calls[-1]["function"]["arguments"] += part.text
    return {"delta": made}


COMPLETION_FORMAT = ResponseFormat(
    *("cmpl-", "text_completion", "text_completion", False),
    *(_join_text, _join_text, completion_logprobs),
)
CHAT_FORMAT = ResponseFormat(
    *("chatcmpl-", "chat.completion", "chat.completion.chunk", True),
    *(_make_message, _make_delta, chat_logprobs),
)


class ChoiceReader:
    """Reader of the parts of a choice.

    Args:
        rules: rules of messages. Without rules all text is content.
        stops: stop strings of the request.
        decode: function from the tokens of the choice to their text, the stop string included.

    Attributes:
        ids: ids of calls.
        stop: stop string that has ended the text, or None.
        reasoning: number of tokens of the reasoning so far.
    """

    def __init__(
        self,
        rules: MessageRules | None,
        stops: Sequence[str] = (),
        decode: Callable[[Sequence[int]], str] = lambda tokens: "",
    ) -> None:
        self._stops, self._decode, self._tokens, self._length = stops, decode, list[int](), 0
        self.stop: str | None = None
        self.reasoning = 0
        self._shows = rules is None or rules.shows
        self._parser = None if rules is None else rules.make_parser()
        self.ids = CallIds()

    def take(self, piece: Chunk) -> tuple[list[MessagePart], str | None]:
        """Returns the parts that are certain with a piece, and the reason if the choice ends."""
        text, reason = piece.token.text, piece.token.finish_reason
        if self._stops:
            self._find_stop(piece)
        if self._parser is None:
            return [MessagePart("content", text)] if text else [], reason
        parts = self._parser.add(text)
        self.reasoning += self._parser.is_reasoning
        if reason is not None:
            parts = join_parts(parts + self._parser.end())
            if reason == "stop" and self._parser.malformed:
                reason = "invalid_tool_call"
            elif reason == "stop" and self._parser.num_calls:
                reason = "tool_calls"
        return [part for part in parts if self._shows or part.kind != "reasoning"], reason

    def _find_stop(self, piece: Chunk) -> None:
        self._tokens += [] if piece.token.token is None else [piece.token.token]
        self._length += len(piece.token.text)
        if piece.token.finish_reason == "stop":
            rest = self._decode(self._tokens)[self._length :]
            self.stop = max((x for x in self._stops if rest.startswith(x)), key=len, default=None)


class ResponseBuilder:
    """Answer to a single call.

    Args:
        form: form of the route.
        model: model of the answer.
        asked: meaning of the body.
        call: call with its tokens.
    """

    def __init__(self, form: ResponseFormat, model: Model, asked: ParsedRequest, call: ClientRequest) -> None:
        self._form, self._model, self._asked, self._call = form, model, asked, call
        self._spellers = dict[int, Speller]()  # by choice
        self._choices = [ChoiceReader(asked.rules) for _ in range(call.starts[-1])]
        self._head = {"id": form.prefix + secrets.token_hex(12), "created": int(time.time()), "model": asked.model}
        seeds = [request.sampling.seed for request in asked.requests]
        self._seeds = seeds if len(set(seeds)) > 1 else []  # where prompts have drawn separate seeds
        self._head |= {} if self._seeds else {"seed": seeds[0]}

    async def whole(self) -> dict[str, Any]:
        """Returns the answer, once all tokens are there.

        Raises:
            ApiError: a choice has failed.
        """
        num = self._call.starts[-1]
        begins = [self._spell_echo(i) for i in range(num)]
        parts, tokens, ends = [text for text, _ in begins], [found for _, found in begins], [""] * num
        while pieces := await self._read_pieces():
            for piece in pieces:
                more, end = self._choices[piece.choice].take(piece)
                parts[piece.choice] += more
                tokens[piece.choice] += self._choose_logprob(piece)
                ends[piece.choice] = end or ""
        rows = zip(parts, tokens, ends, strict=True)
        choices = [
            self._make_choice(i, self._form.text(join_parts(text), self._choices[i].ids), found, end)
            for i, (text, found, end) in enumerate(rows)
        ]
        return {**self._head, "object": self._form.whole, "choices": choices, "usage": self.usage}

    async def events(self) -> AsyncIterator[bytes]:
        """Yields the events of a stream. Events due at one time come as a single piece."""
        if self._form.opens:
            first = {"delta": {"role": "assistant", "content": ""}}
            yield b"".join(self._make_event(i, first, [], None) for i in range(self._call.starts[-1]))
        if self._asked.echo:
            begins = [self._spell_echo(i) for i in range(self._call.starts[-1])]
            yield b"".join(
                self._make_event(i, self._form.delta(text, CallIds()), found, None)
                for i, (text, found) in enumerate(begins)
            )
        try:
            while pieces := await self._read_pieces():
                if due := b"".join(self._list_due(pieces)):
                    yield due
        except ApiError as error:
            yield error.event()
            return
        if self._asked.usage:
            yield _encode_line({**self._head, "object": self._form.chunk, "choices": [], "usage": self.usage})
        yield b"data: [DONE]\n\n"

    @property
    def usage(self) -> dict[str, int]:
        """Returns the numbers of tokens. Tokens that end a completion are among those drawn."""
        prompt, drawn = self._call.prompt_tokens, 0 if self._asked.scores else self._call.drawn
        return {"prompt_tokens": prompt, "completion_tokens": drawn, "total_tokens": prompt + drawn}

    async def _read_pieces(self) -> list[Chunk]:
        pieces = await self._call.take()
        has_grammar = self._asked.requests[0].sampling.grammar is not None
        reasons = [piece.token.finish_reason for piece in pieces]
        raise_failures(reasons, self._asked.grammar_field if has_grammar else "")
        return [self._drop_drawn(piece) for piece in pieces] if self._asked.scores else pieces

    def _drop_drawn(self, piece: Chunk) -> Chunk:
        """Returns a piece of an answer that has only its prompt: the drawn token is left out."""
        if piece.token.position < len(self._get_prompt(piece.choice)):
            return piece
        return piece._replace(token=piece.token._replace(token=None, logprob=None, text="", top=()))

    def _get_prompt(self, choice: int) -> tuple[int, ...]:
        return self._asked.requests[self._call.request_of(choice)].prompt

    def _spell_echo(self, choice: int) -> tuple[list[MessagePart], list[Spelled]]:
        """Returns the beginning of a choice: its prompt's text, and the first token, which has no log probability."""
        if not self._asked.echo:
            return [], []
        prompt = self._get_prompt(choice)
        found = [] if self._asked.logprobs is None else [self._get_speller(choice).spell(prompt[0], None)]
        return [MessagePart("content", self._model.texts.decode(prompt))], found

    def _get_speller(self, choice: int) -> Speller:
        if choice not in self._spellers:
            before = () if self._asked.echo else self._asked.requests[self._call.request_of(choice)].spelled
            self._spellers[choice] = Speller(self._model.spelling, self._model.texts, before)
        return self._spellers[choice]

    def _list_due(self, pieces: list[Chunk]) -> list[bytes]:
        """Returns one event for each choice that has something new."""
        made = []
        for choice in dict.fromkeys(piece.choice for piece in pieces):
            mine = [piece for piece in pieces if piece.choice == choice]
            taken = [self._choices[choice].take(piece) for piece in mine]
            parts, finish = join_parts([part for more, _ in taken for part in more]), taken[-1][1]
            tokens = [found for piece in mine for found in self._choose_logprob(piece)]
            if parts or tokens or finish:
                fields = self._form.delta(parts, self._choices[choice].ids)
                made.append(self._make_event(choice, fields, tokens, finish))
        return made

    def _make_event(self, i: int, fields: dict[str, Any], tokens: list[Spelled], finish: str | None) -> bytes:
        usage = {"usage": None} if self._asked.usage else {}
        choices = [self._make_choice(i, fields, tokens, finish)]
        return _encode_line({**self._head, "object": self._form.chunk, "choices": choices, **usage})

    def _make_choice(self, i: int, fields: dict[str, Any], tokens: list[Spelled], finish: str | None) -> dict[str, Any]:
        found = self._form.logprobs(tokens, self._asked.logprobs or 0) if tokens else None
        seed = {"seed": self._seeds[self._call.request_of(i)]} if self._seeds else {}
        return {"index": i, **fields, "logprobs": found, "finish_reason": finish, **seed}

    def _choose_logprob(self, piece: Chunk) -> list[Spelled]:
        token = piece.token
        if self._asked.logprobs is None or token.token is None or token.logprob is None:
            return []
        return [self._get_speller(piece.choice).spell(token.token, token.logprob, token.top)]


def _encode_line(value: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"
