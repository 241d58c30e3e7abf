"""OpenAI's interface of responses: from items to messages of a chat, and from parts to items and their events."""

import secrets
import time
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
    TEXT,
    FieldKind,
    get_required,
    ignored_kind,
    neutral_kind,
    read_fields,
)
from ._message_parser import MessagePart
from ._model import Model
from ._parse_request import ParsedRequest, parse_chat

_SAME = ("model", "stream", "parallel_tool_calls", "chat_template_kwargs", "cache_salt", "ignore_eos", "stop_token_ids")
_SAMPLED = [name for name in SAMPLING if name != "n"]
BODY: Mapping[str, FieldKind] = {
    **{name: CHAT[name] for name in (*_SAME, *_SAMPLED)},
    "input": ANY,
    "instructions": TEXT,
    "max_output_tokens": INTEGER,
    "tools": LIST,
    "tool_choice": ANY,
    "text": OBJECT,
    "reasoning": OBJECT,
    "store": ignored_kind(FLAG),  # answers are never stored
    "include": neutral_kind([], ["reasoning.encrypted_content"]),
    "stream_options": neutral_kind({}, {"include_obfuscation": False}),
    "metadata": ignored_kind(OBJECT),
    "user": ignored_kind(TEXT),
    "safety_identifier": ignored_kind(TEXT),
    "prompt_cache_key": ignored_kind(TEXT),
    "prompt_cache_retention": ignored_kind(TEXT),
    "client_metadata": ignored_kind(OBJECT),
    "truncation": neutral_kind("disabled"),
    "background": neutral_kind(False),
    "service_tier": neutral_kind("auto", "default"),
    "top_logprobs": neutral_kind(0),
}
_SEEN = {"id": ignored_kind(TEXT), "status": ignored_kind(TEXT), "type": TEXT}  # of items that clients send back
_ITEMS: Mapping[str, Mapping[str, FieldKind]] = {
    "message": {**_SEEN, "role": TEXT, "content": ANY, "phase": ignored_kind(TEXT)},
    "function_call": {**_SEEN, "call_id": TEXT, "name": TEXT, "arguments": TEXT},
    "function_call_output": {**_SEEN, "call_id": TEXT, "output": ANY},
    "reasoning": {**_SEEN, "summary": ignored_kind(LIST), "content": LIST, "encrypted_content": neutral_kind("")},
}
_PART: Mapping[str, FieldKind] = {
    **{"type": TEXT, "text": TEXT},
    **{"annotations": ignored_kind(LIST), "logprobs": ignored_kind(LIST)},
}
_PARTS = ("input_text", "output_text", "reasoning_text", "text")
_IMAGE: Mapping[str, FieldKind] = {"type": TEXT, "image_url": TEXT, "detail": ignored_kind(TEXT)}
_TOOL: Mapping[str, FieldKind] = {
    **{"type": TEXT, "name": TEXT, "description": TEXT},
    **{"parameters": OBJECT, "strict": FLAG},
}
_TEXT: Mapping[str, FieldKind] = {"format": OBJECT, "verbosity": neutral_kind("medium")}
_FORMAT: Mapping[str, FieldKind] = {
    **{"type": TEXT, "name": TEXT, "description": TEXT},
    **{"schema": OBJECT, "strict": FLAG},
}
_REASONING: Mapping[str, FieldKind] = {
    "effort": TEXT,
    "summary": ignored_kind(TEXT),
    "generate_summary": ignored_kind(TEXT),
}
_RENAMED = {
    **{"messages": "input", "max_tokens": "max_output_tokens", "max_completion_tokens": "max_output_tokens"},
    **{"response_format": "text.format", "reasoning_effort": "reasoning.effort"},
}


def parse_responses(body: Mapping[str, Any], model: Model) -> tuple[ParsedRequest, "ResponseWriter"]:
    """Returns the meaning of a body of `/v1/responses`, and the writer of its answer.

    Raises:
        ApiError: names the field that is wrong.
    """
    given = read_fields(body, BODY)
    chat = {name: given[name] for name in (*_SAME, *_SAMPLED) if name in given}
    has_images = model.text.images is not None
    chat["messages"] = _read_input(get_required(given, "input"), given.get("instructions"), has_images)
    names = {**pop_image_places(chat["messages"]), **_RENAMED}
    if "max_output_tokens" in given:
        chat["max_completion_tokens"] = given["max_output_tokens"]
    chat["tools"] = [_read_tool(tool, f"tools[{i}]") for i, tool in enumerate(given.get("tools", []))]
    choice = given.get("tool_choice", "auto")
    if isinstance(choice, dict) and "name" in choice:
        rest = {key: value for key, value in choice.items() if key != "name"}
        choice = {**rest, "function": {"name": choice["name"]}}
    chat["tool_choice"] = choice
    form = read_fields(given.get("text", {}), _TEXT, "text").get("format")
    if form is not None:
        schema = read_fields(form, _FORMAT, "text.format")
        kind = schema.pop("type", None)
        chat["response_format"] = {"type": kind, **({"json_schema": schema} if kind == "json_schema" else {})}
    reasoning = read_fields(given.get("reasoning", {}), _REASONING, "reasoning")
    chat |= {"reasoning_effort": reasoning["effort"]} if "effort" in reasoning else {}
    try:
        asked = parse_chat(chat, model)
    except ApiError as error:
        raise rename_fields(error, names) from error
    return asked, ResponseWriter(given, body.get("metadata") or {})


def _read_input(given: Any, instructions: str | None, has_images: bool) -> list[dict[str, Any]]:
    """Returns the messages of items. The items of one answer are one message."""
    messages = list[dict[str, Any]]()
    if instructions:
        messages.append({"role": "system", "content": instructions})
    if isinstance(given, str):
        return [*messages, {"role": "user", "content": given}]
    if not isinstance(given, list):
        raise ApiError(400, "input must be a string, or a list of items.", "input")
    for i, item in enumerate(given):
        message = _read_item(item, f"input[{i}]", has_images)
        last = messages[-1] if messages else {}
        if message["role"] == last.get("role") == "assistant" and not ("content" in message and "content" in last):
            calls = [*last.get("tool_calls", []), *message.get("tool_calls", [])]
            last |= message | ({"tool_calls": calls} if calls else {})
        else:
            messages.append(message)
    return messages


def _read_item(item: Any, at: str, has_images: bool) -> dict[str, Any]:
    if not isinstance(item, dict):
        raise ApiError(400, f"{at} must be an object with a type, or with role and content.", at)
    kind = item.get("type") or "message"
    if not isinstance(kind, str) or kind not in _ITEMS:
        text = f"{at}.type must be one of {', '.join(map(repr, _ITEMS))}, got {kind!r:.60}."
        raise ApiError(400, text, f"{at}.type", "unsupported_parameter")
    given = read_fields(item, _ITEMS[kind], at)
    if kind == "function_call":
        function = {name: get_required(given, name, at) for name in ("name", "arguments")}
        call = {"id": get_required(given, "call_id", at), "type": "function", "function": function}
        return {"role": "assistant", "tool_calls": [call]}
    if kind == "function_call_output":
        output = _read_content(get_required(given, "output", at), f"{at}.output", has_images)
        return {"role": "tool", "tool_call_id": get_required(given, "call_id", at), "content": output}
    if kind == "reasoning":
        text = "".join(part["text"] for part in _read_content(given.get("content", []), f"{at}.content"))
        return {"role": "assistant", "reasoning_content": text}
    content = _read_content(get_required(given, "content", at), f"{at}.content", has_images)
    return {"role": get_required(given, "role", at), "content": content}


def _read_content(content: Any, at: str, has_images: bool = False) -> Any:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ApiError(400, f"{at} must be a string, or a list of parts.", at)
    return [_read_part(part, f"{at}[{i}]", has_images) for i, part in enumerate(content)]


def _read_part(part: Any, at: str, has_images: bool) -> dict[str, Any]:
    if not isinstance(part, dict):
        raise ApiError(400, f"{at} must be an object with type and text.", at)
    kind = get_required(part, "type", at)
    if kind == "input_image" and has_images:
        url = get_required(read_fields(part, _IMAGE, at), "image_url", at)
        return make_image_part(url, f"{at}.image_url")
    if kind not in _PARTS:
        known = "text and of type 'input_image'" if has_images else "text"
        text = f"{at}.type is {kind!r:.60}; only parts of {known} are served."
        raise ApiError(400, text, f"{at}.type", "unsupported_parameter")
    return {"type": "text", "text": get_required(read_fields(part, _PART, at), "text", at)}


def _read_tool(tool: Any, at: str) -> Any:
    if not isinstance(tool, dict) or tool.get("type") != "function":
        return tool  # refused as a tool of a chat
    given = read_fields(tool, _TOOL, at)
    get_required(given, "name", at)
    return {"type": given.pop("type"), "function": given}


class ResponseWriter:
    """Writer of the events of an answer of `/v1/responses`.

    Args:
        given: fields of the body.
        metadata: metadata of the body.

    Attributes:
        answer: response so far.
    """

    def __init__(self, given: Mapping[str, Any], metadata: Mapping[str, Any]) -> None:
        self._number, self._open, self._output = 0, "", list[dict[str, Any]]()
        echoed = {name: given.get(name) for name in ("instructions", "max_output_tokens", "temperature", "top_p")}
        self.answer: dict[str, Any] = {
            "id": f"resp_{secrets.token_hex(12)}",
            "object": "response",
            "created_at": int(time.time()),
            "status": "in_progress",
            "error": None,
            "incomplete_details": None,
            "model": given.get("model"),
            "output": [],
            "parallel_tool_calls": given.get("parallel_tool_calls", True),
            "tool_choice": given.get("tool_choice", "auto"),
            "tools": given.get("tools", []),
            "text": given.get("text", {"format": {"type": "text"}}),
            "reasoning": given.get("reasoning", {}),
            "metadata": dict(metadata),
            "previous_response_id": None,
            "store": False,
            "truncation": "disabled",
            "usage": None,
            **echoed,
        }

    def begin(self, usage: Usage) -> Events:
        """Returns the first events."""
        del usage
        return self._list("response.created", response=dict(self.answer)) + self._list(
            "response.in_progress", response=dict(self.answer)
        )

    def add(self, parts: Sequence[MessagePart], ids: Mapping[int, str]) -> Events:
        """Returns the events of further parts."""
        made: Events = []
        for part in parts:
            kind = "call" if part.kind == "arguments" else part.kind
            if part.kind == "call" or kind != self._open:
                made += self._close("completed") + self._begin_item(kind, part, ids)
            if part.kind != "call":
                made += self._extend(kind, part.text)
        return made

    def end(self, reason: str, stop: str | None, usage: Usage) -> Events:
        """Returns the last events."""
        del stop
        is_whole = reason in ("stop", "tool_calls")
        made = self._close("completed" if is_whole else "incomplete")
        details = {"length": "max_output_tokens"}.get(reason, reason)
        self.answer |= {
            "status": "completed" if is_whole else "incomplete",
            "incomplete_details": None if is_whole else {"reason": details},
            "output": self._output,
            "usage": {
                "input_tokens": usage.prompt,
                "input_tokens_details": {"cached_tokens": 0},
                "output_tokens": usage.drawn,
                "output_tokens_details": {"reasoning_tokens": usage.reasoning},
                "total_tokens": usage.prompt + usage.drawn,
            },
        }
        return made + self._list(f"response.{self.answer['status']}", response=self.answer)

    def fail(self, error: ApiError) -> Events:
        """Returns the event of an error."""
        code = error.code or error.body["error"]["type"]
        self.answer |= {"status": "failed", "error": {"code": code, "message": error.message}, "output": self._output}
        return self._list("response.failed", response=self.answer)

    def _list(self, kind: str, **fields: Any) -> Events:
        self._number += 1
        return [(kind, {"type": kind, "sequence_number": self._number - 1, **fields})]

    @property
    def _place(self) -> dict[str, Any]:
        item = self._output[-1]
        place = {"item_id": item["id"], "output_index": len(self._output) - 1}
        return place if self._open == "call" else place | {"content_index": 0}

    def _begin_item(self, kind: str, part: MessagePart, ids: Mapping[int, str]) -> Events:
        self._open = kind
        name = secrets.token_hex(12)
        if kind == "call":
            item = {"id": f"fc_{name}", "type": "function_call", "call_id": ids[part.call], "name": part.text}
            item |= {"arguments": ""}
        elif kind == "reasoning":
            item = {"id": f"rs_{name}", "type": "reasoning", "summary": [], "content": []}
        else:
            item = {"id": f"msg_{name}", "type": "message", "role": "assistant", "content": []}
        self._output.append(item | {"status": "in_progress"})
        index = len(self._output) - 1
        made = self._list("response.output_item.added", output_index=index, item=dict(self._output[-1]))
        if kind == "call":
            return made
        begun = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        begun = begun if kind == "content" else {"type": "reasoning_text", "text": ""}
        made += self._list("response.content_part.added", **self._place, part=dict(begun))
        self._output[-1]["content"] = [begun]
        return made

    def _extend(self, kind: str, text: str) -> Events:
        item = self._output[-1]
        if kind == "call":
            item["arguments"] += text
            return self._list("response.function_call_arguments.delta", **self._place, delta=text)
        item["content"][0]["text"] += text
        if kind == "reasoning":
            return self._list("response.reasoning_text.delta", **self._place, delta=text)
        return self._list("response.output_text.delta", **self._place, delta=text, logprobs=[])

    def _close(self, status: str) -> Events:
        """Returns the events of the end of the open item."""
        if not self._open:
            return []
        item, place = self._output[-1], self._place
        item["status"] = status
        if self._open == "call":
            done = {"name": item["name"], "arguments": item["arguments"]}
            made = self._list("response.function_call_arguments.done", **place, **done)
        else:
            part = item["content"][0]
            kind, more = ("output_text", {"logprobs": []}) if self._open == "content" else ("reasoning_text", {})
            made = self._list(f"response.{kind}.done", **place, text=part["text"], **more)
            made += self._list("response.content_part.done", **place, part=part)
        self._open = ""
        return made + self._list("response.output_item.done", output_index=place["output_index"], item=item)
