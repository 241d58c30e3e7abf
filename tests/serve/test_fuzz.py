"""Covers requests drawn at random from the tables of fields, malformed ones, clients that leave or stall; no leaks."""

import json
import random
import select
import socket
import threading
from collections.abc import Mapping
from typing import Any

import pytest

from shardfn.serve import _anthropic_messages, _connection, _fields, _open_responses
from shardfn.serve._fields import FieldKind
from tests.serve.server import LIMIT, NAME, TALKS, Running, metric, open_files

_FIELDS = sorted({*_fields.COMPLETIONS, *_fields.CHAT, *_fields.EMBEDDINGS, *_fields.REFUSED, "other"})
_TEXTS = ["", "a", "ab c", "é\U0001f642", "\x00", "\ud800", "x" * 600]
_SCHEMAS = [{}, {"type": "integer"}, {"enum": ["a", "\udfff"]}, {"type": "string", "minLength": 3}, {"$ref": "#"}]
_SCHEMAS += [{"type": "array", "items": {"type": "boolean"}, "maxItems": 3}, {"type": 1}, {"x-guidance": 1}]
# Values of the right type, by the name of a field, or of its kind.
_TYPED: dict[str, list[Any]] = {
    "an integer": [0, 1, 2, 5, -1, 2**63],
    "a number": [0, 1, 0.5, 1.0, -1.5, 1e-320, 1e308],
    "true or false": [True, False],
    "a string": _TEXTS,
    "a list of integers": [[], [1], [0, 255], [256]],
    "a list of strings": [[], ["a"], ["bc", "d"], [""], ["a"] * 300],
    "a string or a list of strings": ["", "a", ["a", "bc"], [], [""], ["a"] * 17],
    "an object": [{}, {"a": 1}],
    "a list": [[]],
    "a value": [None],
    "max_tokens": [0, 1, 2, 8, 511],
    "max_completion_tokens": [0, 1, 2, 8],
    "model": [NAME, "tuned", "other"],
    "n": [1, 2, 3, 128],
    "prompt": ["hello", [1, 2, 3], ["a", "b"], [[1], "a"], "", "x" * 600, [256], [], "é" * 300],
    "logit_bias": [{"1": 1}, {"65": -100.0, "66": 100}, {"256": 1}, {"a": 1}],
    "regex": ["[a-c]{3}", "(", "a|b", "(a{0})"],
    "encoding_format": ["float", "base64", "hex"],
    "dimensions": [32, 16],
    "tool_choice": ["auto", "none", "required", {"type": "function", "function": {"name": "f"}}, {}],
    "chat_template_kwargs": [{}, {"thinks": True}, {"other": 1}],
    "arguments": ['{"a": 1}', "{}", "", "{", "[1]", "x" * 600],
    "logits_processors": [[], ["say"], ["even"], ["other"]],
    "role": ["user", "system", "assistant", "developer", "tool"],
}
_TYPED["input"] = _TYPED["prompt"]


def value(draw: random.Random, depth: int = 0) -> Any:
    """Any JSON."""
    kinds = 6 if depth > 2 else 8
    kind = draw.randrange(kinds)
    if kind == 6:
        return [value(draw, depth + 1) for _ in range(draw.randrange(4))]
    if kind == 7:
        return {draw.choice([*_FIELDS, "\ud800"]): value(draw, depth + 1) for _ in range(draw.randrange(3))}
    numbers = [0, 1, -1, 2**31, 2**64, -(2**63), 1e308, -0.0, 0.5, 1e-320]
    return [None, True, False, draw.choice(_TEXTS), draw.choice(numbers), draw.randrange(300)][kind]


def typed(draw: random.Random, name: str, kind: FieldKind) -> Any:
    """A value of a field's type, which may be out of range; of a field that is not served one that asks for nothing."""
    match name:
        case "messages":
            return [some(draw, _fields.MESSAGE, {"role": "user", "content": "hi"}) for _ in range(draw.randrange(1, 4))]
        case "content":
            part = {"type": "text", "text": "hi"}
            says = "SAY:" + "".join(draw.choice(_WRITTEN) for _ in range(draw.randrange(6)))
            return draw.choice(["hi", None, "forbidden", says, says, [some(draw, _fields.PART, part)], [], "é" * 300])
        case "tools":
            return [some(draw, _fields.TOOL, a_tool(draw)) for _ in range(draw.randrange(3))]
        case "tool_calls":
            function = some(draw, _fields.CALLED, {"name": "f", "arguments": draw.choice(_TYPED["arguments"])})
            return [some(draw, _fields.CALL, {"function": function}) for _ in range(draw.randrange(3))]
        case "parameters":
            return draw.choice(_SCHEMAS)
        case "function":
            return some(draw, _fields.FUNCTION, {"name": draw.choice(["f", "g"])})
        case "stream_options":
            return some(draw, _fields.OPTIONS, {})
        case "response_format":
            schema = {"name": "it", "schema": draw.choice(_SCHEMAS)}
            inner = some(draw, _fields.SCHEMA, schema)
            kinds = ["text", "json_object", "json_schema", "json_schema"]
            return some(draw, _fields.FORMAT, {"type": draw.choice(kinds), "json_schema": inner})
        case _ if kind.name in _TYPED or name in _TYPED:
            return draw.choice(_TYPED.get(name, _TYPED.get(kind.name, [])))
        case _:
            return json.loads(draw.choice(kind.name.split(" or ")))


# Pieces of texts for the processor "say".
_WRITTEN = ["<tool_call>", "</tool_call>", '{"name": "f", ', '"arguments": {}}', "<think>", "</think>", "{", "a "]


def a_tool(draw: random.Random) -> dict[str, Any]:
    function = {"name": draw.choice(["f", "g", "a b"]), "parameters": draw.choice(_SCHEMAS)}
    return {"type": "function", "function": some(draw, _fields.FUNCTION, function)}


def some(draw: random.Random, table: Mapping[str, FieldKind], made: dict[str, Any]) -> dict[str, Any]:
    """An object with some fields of a table besides its own, and with some of any kind."""
    for name in draw.sample([*table], draw.randrange(min(4, len(table)))):
        made[name] = typed(draw, name, table[name])
    if draw.random() < 0.15:
        made[draw.choice([*table, *_FIELDS, "\ud800"])] = value(draw)
    return made


def body(draw: random.Random, path: str) -> bytes:
    """A body as clients send it, with some fields out of range, some of another type, or with wrong bytes."""
    table = {"/v1/completions": _fields.COMPLETIONS, "/v1/chat/completions": _fields.CHAT}.get(path, _fields.EMBEDDINGS)
    good: dict[str, Any] = {"model": NAME}
    for name in ("messages", "prompt", "input"):
        good |= {name: typed(draw, name, table[name])} if name in table else {}
    if "max_tokens" in table:
        good |= {"max_tokens": draw.randrange(1, 8), "stream": draw.random() < 0.5}
    if draw.random() < 0.8:
        good = some(draw, table, good)
    if draw.random() < 0.3:
        for name in ("prompt", "input"):
            good |= {name: "hello"} if name in table else {}
    data = json.dumps(good).encode()
    how = draw.random()
    if how < 0.05:
        return data[: draw.randrange(len(data))]
    if how < 0.1:
        at = draw.randrange(len(data))
        return data[:at] + draw.randbytes(3) + data[at + 1 :]
    return b" " * (10 << 20) if how < 0.12 else data


def one(port: int, seed: int, *, late: float) -> int | None:
    """Sends one request; returns its status, or None for a client that leaves, or whose connection is closed.

    An error of the server in a stream counts as 500. A part `late` of the bodies never arrives as a whole.
    """
    draw = random.Random(seed)
    path = draw.choice(["/v1/completions", "/v1/chat/completions", "/v1/embeddings"])
    data = body(draw, path)
    size = len(data) + (draw.random() < late)
    head = (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {size}\r\n\r\n"
    )
    leaves = draw.random()
    with socket.socket() as made:
        made.settimeout(LIMIT)
        try:
            made.connect(("127.0.0.1", port))
            made.sendall(head.encode() + (data[: len(data) // 2] if leaves < 0.05 else data))
            if leaves < 0.1:
                return None
            if leaves < 0.15:
                made.shutdown(socket.SHUT_WR)
            answer = b""
            while more := made.recv(1 << 16):
                answer = (answer + more).replace(NOTE, b"")
                if 0.15 < leaves < 0.2 or b"[DONE]" in answer or (b"event-stream" not in answer and _whole(answer)):
                    break
        except ConnectionError:
            return None
    if not answer and leaves < 0.15 and size > len(data):
        return None  # the body was not whole, and the writing half was closed
    assert answer.startswith(b"HTTP/1.1 "), (seed, answer[:100])
    return 500 if b'"server_error"' in answer else int(answer.split()[1])


def fuzz(port: int, num: int, first: int = 0, late: float = 0.05) -> list[int | None]:
    """Sends requests by eight clients; returns their statuses."""
    found = list[int | None]()

    def some_of_them(start: int) -> None:
        found.extend(one(port, seed, late=late) for seed in range(first + start, first + num, 8))

    threads = [threading.Thread(target=some_of_them, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * LIMIT)
    assert len(found) == num
    assert set(found) <= {None, 200, 400, 404, 408, 413, 415, 429}, sorted(map(str, set(found)))
    assert found.count(200) > num / 10 and found.count(400) > num / 20
    return found


NOTE = b"HTTP/1.1 100 Continue\r\n\r\n"  # to a client without a writing half
STALLS = {"model": NAME, "prompt": "ab", "max_tokens": 500, "ignore_eos": True, "stream": True, "logprobs": 5}


def stall(server: Running) -> None:
    """A client that reads nothing, until the server gives it up."""
    data = json.dumps(STALLS).encode()
    head = f"Host: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n"
    with socket.socket() as made:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        made.connect(("127.0.0.1", server.port))
        made.sendall(f"POST /v1/completions HTTP/1.1\r\n{head}\r\n".encode() + data)
        gone = select.poll()
        gone.register(made, select.POLLHUP)
        assert gone.poll(1000 * LIMIT)


def _whole(answer: bytes) -> bool:
    head, found, rest = answer.partition(b"\r\n\r\n")
    size = next((int(x.split(b":")[1]) for x in head.lower().split(b"\r\n") if x.startswith(b"content-length")), 0)
    return bool(found) and len(rest) >= size


_GOOD = [{"type": "object"}, {"type": "object", "properties": {"a": {"enum": ["x", "yz"]}}, "required": ["a"]}]


def a_response(draw: random.Random, wild: float) -> dict[str, Any]:
    """A body of `/v1/responses` with items, tools and formats, partly wild."""

    def items() -> list[Any]:
        made: list[dict[str, Any]] = [{"type": "message", "role": "user", "content": "hi"}]
        if draw.random() < 0.5:
            made.append({"type": "reasoning", "content": [{"type": "reasoning_text", "text": "hm"}]})
        if draw.random() < 0.5:
            arguments = draw.choice(_TYPED["arguments"]) if draw.random() < wild else '{"a": "x"}'
            made.append({"type": "function_call", "call_id": "c", "name": "f", "arguments": arguments})
            made.append({"type": "function_call_output", "call_id": "c", "output": "found"})
        made.append({"type": "message", "role": "user", "content": says(draw, "input_text")})
        if draw.random() < wild:
            draw.shuffle(made)
        return [some_wild(draw, wild, _open_responses._ITEMS[x["type"]], x) for x in made]

    made: dict[str, Any] = {"model": NAME, "max_output_tokens": draw.randrange(1, 24)}
    made["input"] = says(draw, "input_text") if draw.random() < 0.5 else items()
    made["input"] = made["input"] if isinstance(made["input"], list | str) else "hi"
    if draw.random() < 0.6:
        tool = {"type": "function", "name": "f", "parameters": a_schema(draw, wild)}
        made["tools"] = [some_wild(draw, wild, _open_responses._TOOL, tool)]
        made["tool_choice"] = draw.choice(["auto", "none", "required", {"type": "function", "name": "f"}])
    elif draw.random() < 0.5:
        form = {"type": "json_schema", "name": "it", "schema": a_schema(draw, wild)}
        made["text"] = {"format": some_wild(draw, wild, _open_responses._FORMAT, form)}
    return some_wild(draw, wild, _open_responses.BODY, made)


def a_message(draw: random.Random, wild: float) -> dict[str, Any]:
    """A body of `/v1/messages` with blocks and tools, partly wild."""
    blocks = _anthropic_messages._BLOCKS
    call = [{"type": "thinking", "thinking": "hm"}, {"type": "tool_use", "id": "c", "name": "f", "input": {"a": "x"}}]
    result = [{"type": "tool_result", "tool_use_id": "c", "content": "found"}, {"type": "text", "text": "go on"}]
    messages: list[Any] = [{"role": "user", "content": "hi"}]
    if draw.random() < 0.5:
        for role, several in (("assistant", call), ("user", result)):
            content = [some_wild(draw, wild, blocks[str(x["type"])], dict(x)) for x in several]
            messages.append({"role": role, "content": content})
    messages += [{"role": "assistant", "content": "yes"}, {"role": "user", "content": says(draw, "text")}]
    made: dict[str, Any] = {"model": NAME, "max_tokens": draw.randrange(1, 24), "messages": messages}
    if draw.random() < 0.6:
        tool = {"name": "f", "input_schema": a_schema(draw, wild)}
        made["tools"] = [some_wild(draw, wild, _anthropic_messages._TOOL, tool)]
        made["tool_choice"] = draw.choice([{"type": "auto"}, {"type": "any"}, {"type": "tool", "name": "f"}])
    return some_wild(draw, wild, _anthropic_messages.BODY, made)


def a_tool_chat(draw: random.Random, wild: float) -> dict[str, Any]:
    """A body of a chat with tools, partly wild."""
    function = {"name": "f", "parameters": a_schema(draw, wild), "strict": draw.random() < 0.5}
    tool = {"type": "function", "function": some_wild(draw, wild, _fields.FUNCTION, function)}
    made: dict[str, Any] = {"model": NAME, "max_tokens": draw.randrange(1, 24), "tools": [tool]}
    arguments = draw.choice(_TYPED["arguments"]) if draw.random() < wild else '{"a": "x"}'
    calls = [{"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}]
    made["messages"] = [{"role": "user", "content": says(draw, "text")}]
    if draw.random() < 0.5:
        before = [{"role": "assistant", "content": None, "tool_calls": calls}]
        made["messages"] = [*before, {"role": "tool", "tool_call_id": "c", "content": "found"}, *made["messages"]]
    made["tool_choice"] = draw.choice(_TYPED["tool_choice"][:4])
    made["messages"] = [some_wild(draw, wild, _fields.MESSAGE, x) for x in made["messages"]]
    return some_wild(draw, wild, _fields.CHAT, made)


def some_wild(draw: random.Random, wild: float, table: Mapping[str, FieldKind], made: Any) -> Any:
    """An object, or an object with further fields, of any value, or another value."""
    if draw.random() > wild:
        return made
    return some(draw, table, dict(made)) if draw.random() < 0.8 else value(draw)


def a_schema(draw: random.Random, wild: float) -> Any:
    return draw.choice(_SCHEMAS if draw.random() < wild else _GOOD)


def says(draw: random.Random, kind: str) -> Any:
    """A content by which the processor "say" writes calls, reasoning, and parts of them."""
    text = "SAY:" + "".join(draw.choice(_WRITTEN) for _ in range(draw.randrange(6)))
    return text if draw.random() < 0.7 or kind == "input_text" else [{"type": kind, "text": text}]


HONEST = {
    "/v1/chat/completions": {
        "model": NAME,
        "messages": [{"role": "user", "content": 'SAY:<tool_call>{"name": "f", "arguments": {}}</tool_call>'}],
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
        "logits_processors": ["say"],
    },
    "/v1/responses": {"model": NAME, "input": "SAY:fine", "logits_processors": ["say"]},
}


def ask_honestly(server: Running) -> list[Any]:
    found = [server.send(path, body) for path, body in HONEST.items()]
    assert all(one.status == 200 for one in found), [one.data for one in found]
    [call] = found[0].json["choices"][0]["message"]["tool_calls"]
    return [call["function"], *(x["content"][0]["text"] for x in found[1].json["output"])]


@pytest.mark.nightly
@pytest.mark.parametrize("num", [1000])
def test_tools_and_responses_beside_honest_requests(num: int) -> None:
    server, bodies = Running(text=TALKS), {"/v1/chat/completions": a_tool_chat, "/v1/responses": a_response}
    bodies["/v1/messages"] = a_message
    want, statuses, lost = [{"name": "f", "arguments": "{}"}, "fine"], dict[int, int](), list[Any]()
    assert ask_honestly(server) == want

    def send_some(first: int) -> None:
        for seed in range(first, num, 4):
            draw = random.Random(seed)
            path = draw.choice([*bodies])
            body = bodies[path](draw, draw.choice([0.0, 0.1, 0.4]))
            if isinstance(body, dict):
                body |= {"logits_processors": ["say"]} if draw.random() < 0.7 else {}
                body |= {"stream": True} if draw.random() < 0.5 else {}
            found = server.send(path, body)
            statuses[found.status] = statuses.get(found.status, 0) + 1
            if found.status >= 500 or b"server_error" in found.data or b"api_error" in found.data:
                lost.append((seed, path, body, found.data[:300]))

    threads = [threading.Thread(target=send_some, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    honest = list[Any]()
    while any(thread.is_alive() for thread in threads):
        honest.append(ask_honestly(server))
    assert not lost and set(statuses) <= {200, 400, 404}, (statuses, lost[:3])
    assert statuses[200] > num / 8 and statuses[400] > num / 10, statuses
    assert sum(statuses.values()) == num and all(one == want for one in honest) and honest
    server.wait_idle()
    assert server.close() == 0


@pytest.mark.parametrize(("num", "slow"), [(200, 0), pytest.param(1000, 10, marks=pytest.mark.nightly)])
def test_no_request_takes_it_down(num: int, slow: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_connection, "_UNREAD", 4096)  # a stream of 500 tokens stalls
    server = Running(text=TALKS, body_seconds=0.3, max_body=4 << 20, stall_seconds=0.5, max_waiting=1 << 20)
    first = open_files()
    stalls = threading.Thread(target=lambda: [stall(server) for _ in range(slow)])
    stalls.start()
    fuzz(server.port, num)
    stalls.join(2 * LIMIT)
    server.wait_idle()
    assert not slow or metric(server, "shardfn:stalled_total") >= slow
    good = {"model": NAME, "prompt": "ab", "max_tokens": 2}
    assert server.send("/v1/completions", good).status == 200
    server.wait_idle()
    server.wait_for(lambda: open_files() <= first + 4)
    assert server.close() == 0
