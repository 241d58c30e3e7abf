"""Anthropic's interface of messages: from content blocks to messages of a chat, and from parts to blocks and events."""

import json
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from ._dialects import Events, Usage, make_image_part, pop_image_places, rename_fields
from ._errors import ApiError
from ._fields import (
    ANY,
    CHAT,
    FLAG,
    INTEGER,
    LIST,
    OBJECT,
    SAMPLING,
    STRINGS,
    TEXT,
    FieldKind,
    get_required,
    ignored_kind,
    neutral_kind,
    read_fields,
)
from ._message_parser import MessagePart, is_object
from ._model import Model
from ._parse_request import ParsedRequest, parse_chat

_SAME = ("model", "stream", "chat_template_kwargs", "cache_salt", "ignore_eos", "stop_token_ids")
_SAMPLED = [name for name in SAMPLING if name != "n"]
COUNTED: Mapping[str, FieldKind] = {
    "model": TEXT,
    "messages": LIST,
    "system": ANY,
    "tools": LIST,
    "tool_choice": OBJECT,
    "thinking": OBJECT,
    "chat_template_kwargs": OBJECT,
}
BODY: Mapping[str, FieldKind] = {
    **{name: CHAT[name] for name in (*_SAME, *_SAMPLED)},
    **COUNTED,
    "max_tokens": INTEGER,
    "stop_sequences": STRINGS,
    "metadata": ignored_kind(OBJECT),
    "service_tier": neutral_kind("auto", "standard_only"),
}
_CACHED = {"cache_control": ignored_kind(OBJECT)}  # prefixes are cached in any case
_BLOCKS: Mapping[str, Mapping[str, FieldKind]] = {
    "text": {**_CACHED, "type": TEXT, "text": TEXT, "citations": neutral_kind([])},
    "tool_use": {**_CACHED, "type": TEXT, "id": TEXT, "name": TEXT, "input": OBJECT},
    "tool_result": {**_CACHED, "type": TEXT, "tool_use_id": TEXT, "content": ANY, "is_error": ignored_kind(FLAG)},
    "thinking": {"type": TEXT, "thinking": TEXT, "signature": ignored_kind(TEXT)},
    "image": {**_CACHED, "type": TEXT, "source": OBJECT},
}
_SOURCES: Mapping[str, Mapping[str, FieldKind]] = {
    "base64": {"type": TEXT, "media_type": TEXT, "data": TEXT},
    "url": {"type": TEXT, "url": TEXT},
}
_MEDIA = ("image/jpeg", "image/png", "image/gif", "image/webp", "image/bmp")
_MESSAGE: Mapping[str, FieldKind] = {"role": TEXT, "content": ANY}
_TOOL: Mapping[str, FieldKind] = {
    **_CACHED,
    "type": neutral_kind("custom"),
    "name": TEXT,
    "description": TEXT,
    "input_schema": OBJECT,
    "strict": FLAG,
}
_CHOICE: Mapping[str, FieldKind] = {"type": TEXT, "name": TEXT, "disable_parallel_tool_use": FLAG}
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_THINKING: Mapping[str, FieldKind] = {
    "type": TEXT,
    "budget_tokens": INTEGER,
    "display": ignored_kind(TEXT),
}
_RENAMED = {"max_completion_tokens": "max_tokens", "stop": "stop_sequences"}
_RENAMED |= {"thinking_token_budget": "thinking.budget_tokens"}


def parse_messages(body: Mapping[str, Any], model: Model) -> tuple[ParsedRequest, "MessageWriter"]:
    """Returns the meaning of a body of `/v1/messages`, and the writer of its answer.

    Raises:
        ApiError: names the field that is wrong.
    """
    given = read_fields(body, BODY)
    chat = _make_chat(given, model)
    chat["max_completion_tokens"] = get_required(given, "max_tokens")
    chat["stop"] = given.get("stop_sequences", [])
    return _parse_chat(chat, model), MessageWriter(given["model"])


def count_tokens(body: Mapping[str, Any], model: Model) -> dict[str, int]:
    """Returns the answer to a body of `/v1/messages/count_tokens`.

    Raises:
        ApiError: names the field that is wrong.
    """
    chat = _make_chat(read_fields(body, COUNTED), model)
    asked = _parse_chat({**chat, "max_completion_tokens": 1}, model)
    return {"input_tokens": len(asked.requests[0].given)}


def _parse_chat(chat: Mapping[str, Any], model: Model) -> ParsedRequest:
    """Returns the meaning of a chat's body. Errors have the names of Anthropic's fields."""
    names = {**pop_image_places(chat["messages"]), **_RENAMED}
    try:
        return parse_chat(chat, model)
    except ApiError as error:
        raise rename_fields(error, names) from error


def _make_chat(given: Mapping[str, Any], model: Model) -> dict[str, Any]:
    """Returns the body of a chat, without the number of its tokens."""
    chat = {name: given[name] for name in (*_SAME, *_SAMPLED) if name in given}
    system = "".join(x["text"] for x in _read_blocks(given.get("system", []), "system", ("text",)))
    chat["messages"] = [{"role": "system", "content": system}] if system else []
    for i, message in enumerate(get_required(given, "messages")):
        chat["messages"] += _read_message(message, f"messages[{i}]", model.text.images is not None)
    chat["tools"] = [_read_tool(tool, f"tools[{i}]") for i, tool in enumerate(given.get("tools", []))]
    choice = read_fields(given.get("tool_choice", {"type": "auto"}), _CHOICE, "tool_choice")
    kind = get_required(choice, "type", "tool_choice")
    if kind == "tool":
        name = get_required(choice, "name", "tool_choice")
        chat["tool_choice"] = {"type": "function", "function": {"name": name}}
    elif kind in _CHOICES:
        chat["tool_choice"] = _CHOICES[kind]
    else:
        text = f"tool_choice.type must be 'auto', 'any', 'none' or 'tool', got {kind[:60]!r}."
        raise ApiError(400, text, "tool_choice.type")
    chat["parallel_tool_calls"] = not choice.get("disable_parallel_tool_use", False)
    asked = read_fields(given.get("thinking", {}), _THINKING, "thinking")
    thinking = asked.get("type")
    if thinking == "enabled" and "budget_tokens" in asked and model.reasoning is not None:
        chat["thinking_token_budget"] = asked["budget_tokens"]
    if thinking is not None:
        if thinking not in ("enabled", "disabled", "adaptive"):
            text = f"thinking.type must be 'enabled', 'disabled' or 'adaptive', got {thinking[:60]!r}."
            raise ApiError(400, text, "thinking.type")
        if model.names_variable("enable_thinking"):
            more = {"enable_thinking": thinking != "disabled"}
            chat["chat_template_kwargs"] = {**more, **chat.get("chat_template_kwargs", {})}
        chat["include_reasoning"] = thinking != "disabled"
    return chat


def _read_message(message: Any, at: str, has_images: bool) -> list[dict[str, Any]]:
    """Returns the messages of a chat that have the blocks of a message."""
    if not isinstance(message, dict):
        raise ApiError(400, f"{at} must be an object with role and content.", at)
    given = read_fields(message, _MESSAGE, at)
    role = get_required(given, "role", at)
    if role not in ("user", "assistant"):
        raise ApiError(400, f"{at}.role must be 'user' or 'assistant', got {role[:60]!r}.", f"{at}.role")
    shown = ("text", "image") if has_images else ("text",)
    kinds = (*shown, "tool_result") if role == "user" else ("text", "tool_use", "thinking")
    blocks = _read_blocks(get_required(given, "content", at), f"{at}.content", kinds)
    parts = _list_parts(blocks, f"{at}.content")
    if role == "user":
        results = [
            {
                "role": "tool",
                "tool_call_id": get_required(x, "tool_use_id", f"{at}.content[{i}]"),
                "content": _list_parts(
                    _read_blocks(x.get("content", ""), f"{at}.content[{i}].content", shown),
                    f"{at}.content[{i}].content",
                ),
            }
            for i, x in enumerate(blocks)
            if x["type"] == "tool_result"
        ]
        return results + ([{"role": "user", "content": parts}] if parts or not results else [])
    calls = [
        {
            "id": get_required(x, "id", f"{at}.content[{i}]"),
            "function": {
                "name": get_required(x, "name", f"{at}.content[{i}]"),
                "arguments": json.dumps(x.get("input", {}), ensure_ascii=False),
            },
        }
        for i, x in enumerate(blocks)
        if x["type"] == "tool_use"
    ]
    thoughts = "".join(x.get("thinking", "") for x in blocks if x["type"] == "thinking")
    more = {**({"tool_calls": calls} if calls else {}), **({"reasoning_content": thoughts} if thoughts else {})}
    return [{"role": "assistant", "content": parts, **more}]


def _list_parts(blocks: Sequence[Mapping[str, Any]], at: str) -> list[dict[str, Any]]:
    """Returns the parts of a chat's message that have the texts and images of blocks."""
    return [
        {"type": "text", "text": x["text"]} if x["type"] == "text" else _read_image(x, f"{at}[{i}]")
        for i, x in enumerate(blocks)
        if x["type"] in ("text", "image")
    ]


def _read_image(block: Mapping[str, Any], at: str) -> dict[str, Any]:
    """Returns the part of a chat's message that has the image of a block."""
    source, at = get_required(block, "source", at), f"{at}.source"
    kind = get_required(source, "type", at)
    if not isinstance(kind, str) or kind not in _SOURCES:
        text = f"{at}.type must be one of {', '.join(map(repr, _SOURCES))}, got {kind!r:.60}."
        raise ApiError(400, text, f"{at}.type", "unsupported_parameter")
    given = read_fields(source, _SOURCES[kind], at)
    if kind == "url":
        return make_image_part(get_required(given, "url", at), f"{at}.url")
    media = get_required(given, "media_type", at)
    if media not in _MEDIA:
        text = f"{at}.media_type must be one of {', '.join(map(repr, _MEDIA))}, got {media[:60]!r}."
        raise ApiError(400, text, f"{at}.media_type")
    return make_image_part(f"data:{media};base64,{get_required(given, 'data', at)}", f"{at}.data")


def _read_blocks(content: Any, at: str, kinds: Sequence[str]) -> list[dict[str, Any]]:
    """Returns content blocks of some kinds. A string is a block of text."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list):
        raise ApiError(400, f"{at} must be a string, or a list of blocks.", at)
    made = list[dict[str, Any]]()
    for i, block in enumerate(content):
        if not isinstance(block, dict):
            raise ApiError(400, f"{at}[{i}] must be an object with a type.", f"{at}[{i}]")
        kind = get_required(block, "type", f"{at}[{i}]")
        if not isinstance(kind, str) or kind not in kinds:
            text = f"{at}[{i}].type must be one of {', '.join(map(repr, kinds))}, got {kind!r:.60}."
            raise ApiError(400, text, f"{at}[{i}].type", "unsupported_parameter")
        made.append(read_fields(block, _BLOCKS[kind], f"{at}[{i}]"))
        if kind == "text":
            get_required(made[-1], "text", f"{at}[{i}]")
    return made


def _read_tool(tool: Any, at: str) -> dict[str, Any]:
    if not isinstance(tool, dict):
        raise ApiError(400, f"{at} must be an object with name and input_schema.", at)
    given = read_fields(tool, _TOOL, at)
    function = {name: given[name] for name in ("description", "strict") if name in given}
    function |= {"name": get_required(given, "name", at), "parameters": get_required(given, "input_schema", at)}
    return {"type": "function", "function": function}


class MessageWriter:
    """Writer of a message.

    Args:
        model: name of the model that the client has given.

    Attributes:
        answer: message so far.
    """

    def __init__(self, model: str) -> None:
        self._open, self._blocks = "", list[dict[str, Any]]()
        self._arguments = ""
        self.answer: dict[str, Any] = {
            "id": f"msg_{secrets.token_hex(12)}",
            "type": "message",
            "role": "assistant",
            "model": model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
        }

    def begin(self, usage: Usage) -> Events:
        """Returns the first event."""
        message = {**self.answer, "usage": {"input_tokens": usage.prompt, "output_tokens": 0}}
        return [("message_start", {"type": "message_start", "message": message})]

    def add(self, parts: Sequence[MessagePart], ids: Mapping[int, str]) -> Events:
        """Returns the events of further parts."""
        made: Events = []
        for part in parts:
            kind = "call" if part.kind == "arguments" else part.kind
            if part.kind == "call" or kind != self._open:
                made += self._close() + self._begin_block(kind, part, ids)
            if part.kind != "call":
                made += self._extend(kind, part.text)
        return made

    def end(self, reason: str, stop: str | None, usage: Usage) -> Events:
        """Returns the last events."""
        made = self._close()
        reasons = {"stop": "end_turn" if stop is None else "stop_sequence", "length": "max_tokens"}
        reasons["tool_calls"] = "tool_use"
        ended = {"stop_reason": reasons.get(reason, reason), "stop_sequence": stop}
        counts = {"input_tokens": usage.prompt, "output_tokens": usage.drawn}
        self.answer |= {"content": self._blocks, **ended, "usage": counts}
        made.append(("message_delta", {"type": "message_delta", "delta": ended, "usage": counts}))
        return [*made, ("message_stop", {"type": "message_stop"})]

    def fail(self, error: ApiError) -> Events:
        """Returns the event of an error."""
        return [("error", error.anthropic_body)]

    def _list(self, kind: str, **fields: Any) -> Events:
        return [(kind, {"type": kind, "index": len(self._blocks) - 1, **fields})]

    def _begin_block(self, kind: str, part: MessagePart, ids: Mapping[int, str]) -> Events:
        self._open, self._arguments = kind, ""
        if kind == "call":
            name = ids[part.call].replace("call_", "toolu_")
            self._blocks.append({"type": "tool_use", "id": name, "name": part.text, "input": {}})
        elif kind == "reasoning":
            self._blocks.append({"type": "thinking", "thinking": "", "signature": ""})
        else:
            self._blocks.append({"type": "text", "text": ""})
        return self._list("content_block_start", content_block=dict(self._blocks[-1]))

    def _extend(self, kind: str, text: str) -> Events:
        if kind == "call":
            self._arguments += text
            return self._list("content_block_delta", delta={"type": "input_json_delta", "partial_json": text})
        name = "thinking" if kind == "reasoning" else "text"
        self._blocks[-1][name] += text
        return self._list("content_block_delta", delta={"type": f"{name}_delta", name: text})

    def _close(self) -> Events:
        """Returns the event of the end of the open block. Arguments that are not an object stay text."""
        if not self._open:
            return []
        if self._open == "call":
            found = is_object(self._arguments)
            more = {"input": json.loads(self._arguments)} if found else {"partial_json": self._arguments}
            self._blocks[-1] |= more
        self._open = ""
        return self._list("content_block_stop")
