"""Covers each field of each route by the tables of fields: another type, out of range, missing, doubled, refused."""

import json
import socket
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from shardfn.inference import SAMPLING_OPTIONS
from shardfn.inference._options import Range
from shardfn.serve import _fields
from shardfn.serve._fields import FieldKind
from tests.serve.server import CONTEXT, LIMIT, NAME, TALKS, Received, Running, classifier_of

Path = tuple[str | int, ...]
_PART = {"type": "text", "text": "ab"}
_FORMAT = {"type": "json_schema", "json_schema": {"name": "it", "schema": {"type": "integer"}}}
_MORE = {"model": NAME, "max_tokens": 2, "stream": True, "stream_options": {"include_usage": True}}
_FUNCTION = {"name": "f", "parameters": {"type": "object"}}
_TOOLS = {
    "tools": [{"type": "function", "function": _FUNCTION}],
    "tool_choice": {"type": "function", "function": {"name": "f"}},
}
_MESSAGES = [
    {"role": "user", "content": [_PART]},
    {"role": "assistant", "content": "a", "tool_calls": [{"function": {"name": "f", "arguments": '{"a": 1}'}}]},
]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {**_MORE, "prompt": "ab", "response_format": _FORMAT},
    "/v1/chat/completions": {**_MORE, **_TOOLS, "messages": _MESSAGES, "response_format": _FORMAT},
    "/v1/embeddings": {"model": NAME, "input": "ab"},
    "/v1/score": {"model": NAME, "text_1": "ab", "text_2": ["cd", [1, 2]]},
    "/v1/rerank": {"model": NAME, "query": "ab", "documents": ["cd", {"text": "e"}]},
    "/classify": {"model": NAME, "input": "ab"},
}
_BOTH: dict[Path, Mapping[str, FieldKind]] = {
    ("stream_options",): _fields.OPTIONS,
    ("response_format",): _fields.FORMAT,
    ("response_format", "json_schema"): _fields.SCHEMA,
}
ALIASES = {"/score", "/rerank", "/v2/rerank", "/v1/classify"}
# Routes whose bodies become others: tests of their own cover them.
DIALECTS = {"/v1/responses", "/v1/messages", "/v1/messages/count_tokens", "/tokenize", "/detokenize"}
DIALECTS |= {"/v1/audio/transcriptions"}
# The objects of each body, by their places.
TABLES: dict[str, dict[Path, Mapping[str, FieldKind]]] = {
    "/v1/completions": {(): _fields.COMPLETIONS, **_BOTH},
    "/v1/chat/completions": {
        (): _fields.CHAT,
        **_BOTH,
        ("messages", 0): _fields.MESSAGE,
        ("messages", 0, "content", 0): _fields.PART,
        ("messages", 1, "tool_calls", 0): _fields.CALL,
        ("messages", 1, "tool_calls", 0, "function"): _fields.CALLED,
        ("tools", 0): _fields.TOOL,
        ("tools", 0, "function"): _fields.FUNCTION,
        ("tool_choice",): _fields.CHOICE,
        ("tool_choice", "function"): _fields.CHOSEN,
    },
    "/v1/embeddings": {(): _fields.EMBEDDINGS},
    "/v1/score": {(): _fields.SCORE},
    "/v1/rerank": {(): _fields.RERANK},
    "/classify": {(): _fields.CLASSIFY},
}
PLACES = [(route, at) for route, tables in TABLES.items() for at in tables]
PARTS = {
    "TRANSCRIPTIONS",
    "_KINDS",
    "_NEUTRAL",
    "_POOLED",
    "_CLASSIFIED",
    "COMMON",
    "SAMPLING",
    "TEMPLATE",
    "IMAGE",
    "IMAGE_PART",
}  # tables within tables

VALUES = [True, False, 0, -1, 1.5, 2**70, -1e308, "", "x", "1", [], [1], [1.5], ["x"], [None], [[]], [{}], {}, {"a": 1}]
# Values that are wrong where a field takes several types.
OTHERS: dict[str, list[Any]] = {
    "prompt": [True, 1, 1.5, {}, {"a": 1}, [], [1.5], [None], [True], [[]], [{}], [[1.5]], ["a", 1], [[1], 1]],
    "content": [True, 1, 1.5, {}, {"text": "a"}, [1], ["a"], [None], [[]]],
}
_PAIRS = [True, 1, 1.5, {}, [], [1.5], [None], [[]], [{}], [{"text": 1}], [{"text": "a", "b": 1}]]
OTHERS |= {name: OTHERS["prompt"] for name in ("input", "choices")}
OTHERS |= {name: _PAIRS for name in ("text_1", "text_2", "queries", "documents", "query")}
OTHERS["tool_choice"] = [True, 1, 1.5, [], ["auto"], {}, {"a": 1}]
_IDS = [-1, 256, 2**70]
OUTSIDE: dict[str, list[Any]] = {
    "model": ["other", "", "x" * 10_000],
    "prompt": ["", "a" * CONTEXT, [256], [-1], [2**70], ["a", ""], ["a"] * 129],
    "prompt_embeds": ["", "x", ["x"], ["x"] * 129],
    "length_penalty": [2, -11, 11, 2**70],
    "input": ["", "a" * CONTEXT, [256], [-1], [2**70], ["a", ""], ["a"] * 2049],
    "messages": [[]],
    "tools": [_TOOLS["tools"] * 129, _TOOLS["tools"] * 2, [1]],
    "tool_choice": ["", "some", "x" * 10_000],
    "parameters": [{"type": "nothing"}, {"$ref": "#"}, {"enum": ["x" * 1_000_000]}],
    "arguments": ["{", "[1]", "x" * 10_000],
    "chat_template_kwargs": [{"other": 1}, {"messages": []}, {"x" * 10_000: 1}],
    "reasoning_effort": ["low", "", "x" * 10_000],
    "role": ["function", "", "x" * 10_000],
    "content": ["a" * CONTEXT, "forbidden"],
    "type": ["image_url", "", "x" * 10_000],
    "logprobs": [-1, 6, 2**70],
    "max_completion_tokens": [0, -1, CONTEXT, 2**70],
    "best_of": [0, 2, -1, 2**70],
    "stop": [[""], ["a"] * 1000, "a" * 100_000],
    "stop_token_ids": [[one] for one in _IDS],
    "bad_words": [[""], [" "], [*"ab"] * 1000, ["a" * 1000]],
    "allowed_token_ids": [[], *([one] for one in _IDS)],
    "logits_processors": [["unknown"], [""], [*"ab"] * 1000],
    "logit_bias": [{str(one): 1} for one in _IDS] + [{"1": 101}, {"1": -1e308}, {"a": 1}, {"": 1}, {"1": None}],
    "regex": ["(", "a" * 70_000, "\x00"],
    "text_1": ["", "a" * CONTEXT, [256], ["a", "b", "c"]],
    "text_2": ["", "a" * CONTEXT, [256], ["a"] * 2049],
    "queries": [["a", "b", "c"]],
    "documents": ["", "a" * CONTEXT, [256], ["a"] * 2049],
    "query": ["", "a" * CONTEXT, [256], ["a", "b"]],
    "choices": ["a", [""], [["a"], ["b"]]],
    "top_n": [-1, -(2**70)],
    "encoding_format": ["hex", "", "x" * 10_000],
    "dimensions": [0, -1, 33, 2**70],
    "thinking_token_budget": [-1, 2**70],
    "schema": [{"type": "nothing"}, {"enum": ["x" * 1_000_000]}, {"$ref": "#"}, {"type": "string", "minLength": -1}],
}
OUTSIDE |= {
    option.name: [one.low if one.above else one.low - 1, one.high + 1, 2**70, -(2**70)]
    for option in SAMPLING_OPTIONS
    if isinstance(one := option.check, Range)
}
OUTSIDE |= {name: [-2, *OUTSIDE[name][1:]] for name in ("top_k", "seed")}  # -1 is vLLM's word for no choice
# Each value of the right type is within the range of these.
UNBOUNDED = set("stream stream_options ignore_eos cache_salt response_format include_usage json_schema".split())
UNBOUNDED |= set("name description strict text echo include_stop_str_in_output reasoning reasoning_content".split())
UNBOUNDED |= set("function tool_calls tool_call_id id parallel_tool_calls include_reasoning".split())
UNBOUNDED |= set("skip_special_tokens add_generation_prompt continue_final_message".split())
UNBOUNDED |= set("use_activation return_documents use_beam_search".split())
REQUIRED = {"function", "model", "prompt", "messages", "input", "role", "content", "type", "text", "schema"}
REQUIRED |= {"text_1", "text_2", "query", "documents"}


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    """A server whose model calls tools."""
    made = Running(text=TALKS, classifier=classifier_of("reward"))
    yield made
    made.wait_idle()
    assert made.close() == 0


def changed(value: Any, at: Path, name: str, new: Any) -> Any:
    """A body in which one field is another; `...` leaves it out."""
    if at:
        inner = changed(value[at[0]], at[1:], name, new)
        return (
            [inner if i == at[0] else x for i, x in enumerate(value)]
            if isinstance(value, list)
            else value | {at[0]: inner}
        )
    rest = {key: x for key, x in value.items() if key != name}
    return rest if new is ... else rest | {name: new}


def doubled(value: Any, at: Path, name: str) -> str:
    """The JSON of a body in which one field is given twice."""
    if at:
        pairs = [(at[0], doubled(value[at[0]], at[1:], name))]
        rest = [(key, json.dumps(x)) for key, x in value.items() if key != at[0]] if isinstance(value, dict) else []
    else:
        pairs = [(name, json.dumps(value.get(name)))] * 2
        rest = [(key, json.dumps(x)) for key, x in value.items() if key != name]
    if isinstance(value, list):
        return f"[{', '.join(pairs[0][1] if i == at[0] else json.dumps(x) for i, x in enumerate(value))}]"
    return "{" + ", ".join(f"{json.dumps(key)}: {text}" for key, text in [*rest, *pairs]) + "}"


def base(route: str, name: str) -> dict[str, Any]:
    """A body in which a field has an effect."""
    body = dict(BODIES[route])
    if name == "regex":
        del body["response_format"]
    if name == "regex" and "tools" in body:
        del body["tools"], body["tool_choice"]
    if name == "max_completion_tokens":
        del body["max_tokens"]
    if name in ("schema", "json_schema", "response_format") and "tools" in body:
        body["tool_choice"] = "auto"  # a forced call has its tool's schema
    if name == "choices":
        del body["text_2"]
    if name == "queries" or (name == "documents" and "text_2" in body):
        body |= {"queries": body.pop("text_1"), "documents": body.pop("text_2")}
    if name == "messages" and "input" in body:
        del body["input"]
    return body | {"logprobs": True} if name == "top_logprobs" else body


def refuse(server: Running, route: str, body: Any, param: str | None) -> Received:
    """Sends a body that must be refused, and change no state."""
    before = server.engine.core._state.chain, server.front.calls.num_events, server.engine.stats.counts
    found = server.send(route, body)
    assert found.status in (400, 404), (found.status, str(body)[:200], found.data[:200])
    error = found.error
    kind = "not_found_error" if found.status == 404 else "invalid_request_error"
    assert error["type"] == kind and len(error["message"]) < 2000, error
    if param is not None:
        assert error["param"] == param or error["param"].startswith((param + "[", param + ".")), (
            error,
            str(body)[:200],
        )
    assert (server.engine.core._state.chain, server.front.calls.num_events, server.engine.stats.counts) == before
    return found


def full(at: Path, name: str) -> str:
    text = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in (*at, name))
    return text.removeprefix(".")


def cases(route: str, at: Path) -> Iterator[tuple[str, Any]]:
    """Fields, and values that are not theirs."""
    for name, kind in TABLES[route][at].items():
        given = OTHERS[name] if name in OTHERS and kind.served else [x for x in VALUES if not kind.has(x)]
        assert given
        yield from ((name, value) for value in given)


@pytest.mark.nightly
def test_the_bodies_are_served(server: Running) -> None:
    pytest.importorskip("llguidance")
    for route, body in BODIES.items():
        assert server.send(route, body).status == 200


def test_all_routes_and_tables_are_here(server: Running) -> None:
    routes = server.front.app.asgi().args[0].routes  # pyright: ignore
    assert {one.path for one in routes if "POST" in one.methods} == set(BODIES) | ALIASES | DIALECTS
    made = {name for name, x in vars(_fields).items() if isinstance(x, Mapping) and name.isupper()}
    used = [id(table) for tables in TABLES.values() for table in tables.values()]
    assert {name for name in made if id(getattr(_fields, name)) in used} == made - PARTS
    tables = [table for tables in TABLES.values() for table in tables.values()]
    names = {name for table in tables for name, kind in table.items() if kind.served}
    assert names - UNBOUNDED <= set(OUTSIDE) and not names & UNBOUNDED & set(OUTSIDE)


@pytest.mark.day(4)
@pytest.mark.parametrize(("route", "at"), PLACES, ids=str)
def test_another_type(server: Running, route: str, at: Path) -> None:
    for name, value in cases(route, at):
        refuse(server, route, changed(base(route, name), at, name, value), full(at, name))


@pytest.mark.parametrize(("route", "at"), PLACES, ids=str)
def test_out_of_range(server: Running, route: str, at: Path) -> None:
    pytest.importorskip("llguidance")
    for name, kind in TABLES[route][at].items():
        if not kind.served or name in UNBOUNDED or kind.name == "true or false":  # `logprobs` of chats is a flag
            continue
        for value in OUTSIDE[name]:
            found = refuse(server, route, changed(base(route, name), at, name, value), None)
            assert found.error["param"], found.error
        if kind.name == "a number":
            for text in ("NaN", "Infinity", "-Infinity", "1e999", "-1e999"):
                data = json.dumps(changed(base(route, name), at, name, "@")).replace('"@"', text)
                refuse(server, route, data.encode(), name if text.endswith("1e999") else None)


@pytest.mark.parametrize(("route", "at"), PLACES, ids=str)
def test_missing(server: Running, route: str, at: Path) -> None:
    either = {"messages"} if route == "/classify" else set() if route == "/v1/rerank" else {"documents"}
    for name in REQUIRED & set(TABLES[route][at]) - either - ({"type"} if at[-2:-1] == ("tool_calls",) else set()):
        for value in (..., None):
            found = refuse(server, route, changed(BODIES[route], at, name, value), full(at, name))
            assert "missing" in found.error["message"], found.error


@pytest.mark.parametrize(("route", "at"), PLACES, ids=str)
def test_given_twice(server: Running, route: str, at: Path) -> None:
    for name in TABLES[route][at]:
        found = refuse(server, route, doubled(base(route, name), at, name).encode(), name)
        assert found.error["message"] == f"{name} is given twice."


@pytest.mark.day(6)
@pytest.mark.parametrize(("route", "at"), PLACES, ids=str)
def test_fields_that_are_not_served(server: Running, route: str, at: Path) -> None:
    for name in {*_fields.REFUSED, "unheard", ""} - set(TABLES[route][at]):
        found = refuse(server, route, changed(BODIES[route], at, name, 1), full(at, name))
        words = "is not served. Leave it out" if name in _fields.REFUSED else "is not known"
        assert words in found.error["message"]


@pytest.mark.day(3)
@pytest.mark.parametrize("given", [None, "", "Bearer", "Bearer other", "Bearer key other", "Basic key", "key"])
def test_no_body_is_read_without_a_key(start: Any, given: str | None) -> None:
    """A body that is declared and never sent is waited for by no answer; no state changes."""
    server = start(keys=("key",))
    before = server.engine.core._state.chain, server.front.calls.num_events
    header = "" if given is None else f"Authorization: {given}\r\n"
    for route in BODIES:
        for more in ("Content-Length: 1000000000\r\n", "Content-Length: 9\r\nExpect: 100-continue\r\n"):
            head = f"POST {route} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n{header}{more}\r\n"
            with socket.create_connection(("127.0.0.1", server.port), timeout=LIMIT) as one:
                one.sendall(head.encode())
                answer = one.recv(10_000)
            assert answer.startswith(b"HTTP/1.1 401 ") and b"100 Continue" not in answer
            error = json.loads(answer.partition(b"\r\n\r\n")[2] or b"{}") or None
            assert error is None or error["error"]["code"] == "invalid_api_key"
    for route in ("/v1/models", f"/v1/models/{NAME}", "/v1/nothing"):
        assert server.get(route, None if given is None else {"Authorization": given}).status == 401
    assert (server.engine.core._state.chain, server.front.calls.num_events) == before
