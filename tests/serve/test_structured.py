"""Covers texts with a grammar: schemas, objects, expressions, and wrong, large or slow ones."""

import json
import re
from typing import Any

import pytest

from tests.serve.server import NAME, Running

pytest.importorskip("llguidance")

CHAT = {"model": NAME, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 200}
COMPLETION = {"model": NAME, "prompt": "ab", "max_tokens": 200}
SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["cat", "dog"]}, "age": {"type": "integer", "minimum": 1, "maximum": 20}},
    "required": ["kind", "age"],
    "additionalProperties": False,
}


def of_schema(schema: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "it", "schema": schema}}}


@pytest.mark.nightly
@pytest.mark.parametrize("stream", [False, True])
def test_a_schema(server: Running, stream: bool) -> None:
    for seed in range(3):
        found = server.send("/v1/chat/completions", CHAT | of_schema(SCHEMA) | {"seed": seed, "stream": stream})
        assert found.status == 200, found.data
        if stream:
            lines = [line.removeprefix("data: ") for line in found.data.decode().splitlines() if line]
            chunks = [json.loads(line)["choices"][0] for line in lines[:-1]]
            text, finish = "".join(c["delta"].get("content") or "" for c in chunks), chunks[-1]["finish_reason"]
        else:
            [choice] = found.json["choices"]
            text, finish = choice["message"]["content"], choice["finish_reason"]
        made = json.loads(text)
        assert finish == "stop" and made["kind"] in ("cat", "dog") and 1 <= made["age"] <= 20
    server.wait_idle()


def test_any_object(server: Running) -> None:
    found = server.send("/v1/chat/completions", CHAT | {"response_format": {"type": "json_object"}, "seed": 1})
    assert found.json["choices"][0]["message"]["content"].lstrip().startswith("{")


def test_an_expression(server: Running) -> None:
    found = server.send("/v1/completions", COMPLETION | {"regex": "[a-c]{3}-[0-9]{2}", "n": 3})
    texts = [choice["text"] for choice in found.json["choices"]]
    assert all(re.fullmatch("[a-c]{3}-[0-9]{2}", text) for text in texts)


@pytest.mark.parametrize(
    ("path", "change", "param", "words"),
    [
        ("/v1/completions", {"regex": "("}, "regex", "regex: "),
        ("/v1/completions", {"regex": "(a{0})", "ignore_eos": True}, "regex", "no token of the vocabulary may begin"),
        ("/v1/completions", {"regex": "a" * 70_000}, "regex", "must have at most 65536 bytes, got 70000"),
        ("/v1/completions", {"regex": "a", "n": 17}, "n", "n must be at most 16"),
        ("/v1/completions", {"regex": "a" * 60_000, "n": 5}, "n", "n times the characters at most 262144"),
        (
            "/v1/completions",
            {"response_format": of_schema({})["response_format"] | {"type": "text"}},
            "response_format.json_schema",
            "has no effect with type 'text'",
        ),
        ("/v1/chat/completions", of_schema({"type": "nothing"}), "response_format", "response_format: "),
        ("/v1/chat/completions", of_schema({"enum": ["x" * 1_000_000]}), "response_format", "bytes, got 1000014"),
        ("/v1/chat/completions", of_schema({"$ref": "#/nowhere"}), "response_format", "response_format: "),
        (
            "/v1/chat/completions",
            of_schema({"type": "integer", "multipleOf": 99991}),
            "response_format",
            "99991 states",
        ),
        ("/v1/chat/completions", of_schema(SCHEMA) | {"regex": "a"}, "regex", "Give one of them"),
    ],
    ids=lambda x: str(x)[:30],
)
def test_a_wrong_grammar_never_reaches_the_engine(
    server: Running, path: str, change: dict[str, Any], param: str, words: str
) -> None:
    before = server.engine.core._state.chain
    found = server.send(path, (CHAT if "chat" in path else COMPLETION) | change)
    assert found.status == 400 and found.error["param"] == param and words in found.error["message"], found.data
    assert server.engine.core._state.chain == before


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"regex": "(((a{100}){100}){100}){100}"}, "regex"),
        (
            of_schema({"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(1500)}}),
            "response_format",
        ),
    ],
    ids=["regex", "schema"],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_grammar_that_meets_a_limit_ends_its_request_alone(
    server: Running, change: dict[str, Any], param: str, stream: bool
) -> None:
    plain = server.send("/v1/completions", COMPLETION | {"max_tokens": 8, "temperature": 0}).json["choices"]
    found = server.send("/v1/completions", COMPLETION | change | {"stream": stream})
    last = found.data.decode().strip().rsplit("data: ", 1)[-1]
    error = json.loads(last)["error"]
    assert found.status == (200 if stream else 400) and (error["type"], error["param"]) == (
        "invalid_request_error",
        param,
    )
    assert f"{param} needs more steps for one token than a server takes" in error["message"]
    server.wait_idle()
    assert server.send("/v1/completions", COMPLETION | {"max_tokens": 8, "temperature": 0}).json["choices"] == plain


# Schemas without an end, and with enormous texts: each has an answer at once, and the server goes on.
HOSTILE: dict[str, tuple[Any, int]] = {
    "itself": ({"$ref": "#"}, 400),
    "each other": (
        {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
        400,
    ),
    "any of itself": ({"anyOf": [{"$ref": "#"}, {"$ref": "#"}]}, 400),
    "lists of itself": ({"type": "array", "minItems": 1, "items": {"$ref": "#"}}, 200),
    "objects of itself": (
        {"type": "object", "required": ["a"], "properties": {"a": {"$ref": "#"}}, "additionalProperties": False},
        200,
    ),
    "a long text": ({"type": "string", "minLength": 10**9}, 200),
    "a text too long": ({"type": "string", "minLength": 10**30}, 400),
    "a long list": ({"type": "array", "items": {"type": "integer"}, "minItems": 10**9}, 200),
    "repetitions": ({"type": "string", "pattern": "(a{1000}){1000}"}, 200),
    "many values": ({"enum": list(range(500_000))}, 400),
    "a megabyte of words": ({"type": "object", "description": "x" * 1_000_000}, 400),
    "another file": ({"$ref": "file:///etc/passwd"}, 400),
    "another site": ({"$ref": "http://localhost/schema"}, 400),
}


@pytest.mark.nightly
@pytest.mark.parametrize(("schema", "status"), HOSTILE.values(), ids=HOSTILE)
def test_schemas_of_infinite_size(server: Running, schema: Any, status: int) -> None:
    before = server.engine.core._state.chain
    found = server.send("/v1/completions", COMPLETION | of_schema(schema) | {"max_tokens": 6})
    assert found.status == status, found.data
    if status == 400:
        assert found.error["param"] == "response_format" and server.engine.core._state.chain == before
    else:
        assert found.json["choices"][0]["finish_reason"] == "length"
    server.wait_idle()


def test_grammars_that_are_not_served(start: Any) -> None:
    server = start()
    server.front.app.model = server.front.app.model._replace(compiler=None)
    found = server.send("/v1/completions", COMPLETION | {"regex": "a"})
    assert found.status == 400 and "regex is not served: it needs llguidance" in found.error["message"]
