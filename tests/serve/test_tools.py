"""Covers calls of tools and reasoning by OpenAI's client: choices, streams, grammars, results, continued messages."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from shardfn.inference import Sampling
from tests.serve.server import LIMIT, NAME, TALKS, Running, new_engine, tool_text

openai = pytest.importorskip("openai")

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["a"],
    "additionalProperties": False,
}
FIND: dict[str, Any] = {"name": "find", "description": "Finds.", "parameters": SCHEMA}
TOOLS: list[Any] = [{"type": "function", "function": f} for f in (FIND, FIND | {"name": "ask", "strict": False})]
SAYS = {"logits_processors": ["say"]}
CALL = '<tool_call>\n{"name": "find", "arguments": {"a": 1}}\n</tool_call>'


@pytest.fixture(scope="module")
def talks() -> Iterator[Running]:
    made = Running(text=TALKS, max_body=4 << 20)
    yield made
    made.wait_idle()
    assert made.close() == 0


@pytest.fixture(scope="module")
def client(talks: Running) -> Iterator[Any]:
    with openai.OpenAI(base_url=talks.url, api_key="none", max_retries=0, timeout=LIMIT) as made:
        yield made


def ask(client: Any, text: str, stream: bool = False, **more: Any) -> tuple[dict[str, Any], str]:
    """The message and the finish reason of an answer that is `text` before it is parsed, whole or from a stream."""
    said = {"messages": [{"role": "user", "content": "SAY:" + text}], "extra_body": SAYS} if text else {}
    given: dict[str, Any] = {"model": NAME, "max_tokens": 150, "temperature": 0, "tools": TOOLS, **said, **more}
    if not stream:
        [choice] = client.chat.completions.create(**given).choices
        made = choice.message.to_dict()
        for call in made.get("tool_calls") or ():
            assert call.pop("id").startswith("call_") and call.pop("type") == "function"
        return made, choice.finish_reason
    made: dict[str, Any] = {"role": None, "content": "", "refusal": None}
    ends = []
    for chunk in client.chat.completions.create(**given, stream=True):
        [choice] = chunk.choices
        delta = choice.delta.to_dict()
        ends.append(choice.finish_reason)
        made["role"] = made["role"] or delta.get("role")
        for name in ("content", "reasoning_content"):
            if delta.get(name):
                made[name] = made.get(name, "") + delta[name]
        for one in delta.get("tool_calls", ()):
            calls = made.setdefault("tool_calls", [])
            if one["index"] == len(calls):
                assert one["id"].startswith("call_") and one["type"] == "function"
                calls.append({"function": {"name": one["function"]["name"], "arguments": ""}})
            assert one["index"] == len(calls) - 1
            calls[-1]["function"]["arguments"] += one["function"]["arguments"]
    assert not any(ends[:-1])
    made["content"] = made["content"] or (None if "tool_calls" in made else "")
    return made, ends[-1]


ANSWERS: list[tuple[str, dict[str, Any], str]] = [
    ("Hello <b>.", {"content": "Hello <b>."}, "stop"),
    (
        f"<think>\nhm\n</think>\n\nOK. {CALL}",
        {"reasoning_content": "hm", "content": "OK.", "tool_calls": [("find", '{"a": 1}')]},
        "tool_calls",
    ),
    (f"{CALL}\n{CALL}", {"content": None, "tool_calls": [("find", '{"a": 1}')] * 2}, "tool_calls"),
    (CALL.replace("1", "1,"), {"content": None, "tool_calls": [("find", '{"a": 1,}')]}, "invalid_tool_call"),
    (CALL[:45], {"content": None, "tool_calls": [("find", '{"a')]}, "invalid_tool_call"),
    ("<tool_call>find</tool_call>", {"content": "<tool_call>find</tool_call>"}, "invalid_tool_call"),
]


def message(fields: dict[str, Any]) -> dict[str, Any]:
    calls = [{"function": {"name": name, "arguments": text}} for name, text in fields.get("tool_calls", ())]
    return {"role": "assistant", "refusal": None, **fields, **({"tool_calls": calls} if calls else {})}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("text", "fields", "finish"), ANSWERS, ids=range(len(ANSWERS)))
def test_texts_become_messages(client: Any, text: str, fields: dict[str, Any], finish: str, stream: bool) -> None:
    assert ask(client, text, stream) == (message(fields), finish)


@pytest.mark.parametrize("stream", [False, True])
def test_options_of_messages(client: Any, stream: bool) -> None:
    one = {"content": None, "tool_calls": [("find", '{"a": 1}')]}
    assert ask(client, f"{CALL}\n{CALL}", stream, parallel_tool_calls=False) == (message(one), "tool_calls")
    assert ask(client, CALL, stream, max_tokens=47) == (message({**one, "tool_calls": [("find", '{"a":')]}), "length")
    for more in ({"tool_choice": "none"}, {"tools": []}):
        assert ask(client, CALL, stream, **more) == (message({"content": CALL}), "stop")
    thought = {"extra_body": {**SAYS, "include_reasoning": False}}
    assert ask(client, "<think>hm</think>a", stream, **thought) == (message({"content": "a"}), "stop")
    inside = {"extra_body": {**SAYS, "chat_template_kwargs": {"thinks": True}}}
    want = message({"reasoning_content": "hm", "content": "a"})
    assert ask(client, "hm</think>a", stream, **inside) == (want, "stop")


@pytest.mark.parametrize("stream", [False, True])
def test_a_budget_of_reasoning_forces_its_end(client: Any, stream: bool) -> None:
    more = {"extra_body": {**SAYS, "thinking_token_budget": 2}}
    want = message({"reasoning_content": "ab", "content": "done"})
    assert ask(client, "<think>ab--------done", stream, **more) == (want, "stop")
    want = message({"reasoning_content": "a", "content": "b"})
    assert ask(client, "<think>a</think>b", stream, **more) == (want, "stop")
    with pytest.raises(openai.BadRequestError) as error:
        ask(client, "a", extra_body={"thinking_token_budget": -1})
    assert error.value.param == "thinking_token_budget"


def holds(calls: Any, names: set[str]) -> bool:
    def fits(call: Any) -> bool:
        arguments = json.loads(call["function"]["arguments"])
        return call["function"]["name"] in names and list(arguments) == ["a"] and 0 <= arguments["a"] <= 99

    return bool(calls) and all(map(fits, calls))


CHOICES: list[tuple[Any, set[str], dict[str, Any]]] = [
    ("required", {"find", "ask"}, {"parallel_tool_calls": False}),
    ({"type": "function", "function": {"name": "ask"}}, {"ask"}, {}),
    ({"type": "function", "function": {"name": "find"}}, {"find"}, {"extra_body": {"include_reasoning": False}}),
]  # fmt: skip


@pytest.mark.parametrize("parser", ["hermes", pytest.param("mistral", marks=pytest.mark.nightly), "llama3_json"])
@pytest.mark.parametrize("stream", [False, True])
def test_forced_calls_have_their_schemas(start: Any, parser: str, stream: bool) -> None:
    pytest.importorskip("llguidance")
    server = start(text=TALKS, tool_call_parser=parser)
    hi: Any = [{"role": "user", "content": "hi"}]
    with openai.OpenAI(base_url=server.url, api_key="none", max_retries=0, timeout=LIMIT) as client:
        for choice, names, more in CHOICES:
            given = {"messages": hi, "tool_choice": choice, "temperature": 1, "seed": 3, "max_tokens": 400, **more}
            given |= {"logit_bias": {"60": -100}} if parser == "llama3_json" else {}  # no <think>
            made, finish = ask(client, "", stream, **given)
            assert finish in ("tool_calls", "length"), made
            if finish == "tool_calls":
                assert holds(made["tool_calls"], names) and len(made["tool_calls"]) == 1


@pytest.mark.parametrize("stream", [False, True])
def test_strict_arguments_under_a_free_choice(client: Any, stream: bool) -> None:
    """The model would write a list. The grammar permits only an integer."""
    pytest.importorskip("llguidance")
    strict = [{"type": "function", "function": FIND | {"strict": True}}]
    made, finish = ask(client, "No. " + CALL.replace("1", "[]"), stream, tools=strict)
    assert finish == "tool_calls" and made["content"] == "No." and holds(made["tool_calls"], {"find"})
    assert ask(client, "Just words.", stream, tools=strict) == (message({"content": "Just words."}), "stop")


def test_a_schema_beside_tools_and_after_reasoning(client: Any) -> None:
    pytest.importorskip("llguidance")
    form = {"type": "json_schema", "json_schema": {"name": "it", "schema": SCHEMA}}
    assert ask(client, '{"a": 5}', response_format=form) == (message({"content": '{"a": 5}'}), "stop")
    assert ask(client, CALL, response_format=form)[1] == "tool_calls"
    inside = {**SAYS, "chat_template_kwargs": {"thinks": True}}
    made, _ = ask(client, 'hm</think>\n{"a": 5}', tools=[], response_format=form, extra_body=inside)
    assert made == message({"reasoning_content": "hm", "content": '{"a": 5}'})


def test_results_of_tools_reach_the_template(client: Any) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "find", "arguments": '{"a": 7}'}}
    messages: Any = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "found"}]},
    ]
    made = client.chat.completions.create(model=NAME, messages=messages, tools=TOOLS, max_tokens=6, temperature=0)
    seen = [dict(messages[0]), {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "find",
            "arguments": {"a": 7}}}]}, {"role": "tool", "content": "found"}]  # fmt: skip
    text = tool_text(seen, tools=TOOLS)
    assert "call: find 7\n" in text and made.usage.prompt_tokens == len(text)
    want = new_engine().generate([list(text.encode())], Sampling(max_tokens=6, temperature=0.0, stop_tokens=(0,)))[0]
    assert made.choices[0].message.content == want.text


def test_a_message_is_continued(client: Any) -> None:
    messages: Any = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "The sea"}]
    more = {"continue_final_message": True, "add_generation_prompt": False}
    made = client.chat.completions.create(model=NAME, messages=messages, max_tokens=6, temperature=0, extra_body=more)
    prompt = b"user: hi\nassistant: The sea"
    want = new_engine().generate([list(prompt)], Sampling(max_tokens=6, temperature=0.0, stop_tokens=(0,)))[0]
    assert (made.choices[0].message.content, made.usage.prompt_tokens) == (want.text, len(prompt))


def tool(**change: Any) -> dict[str, Any]:
    return {"tools": [{"type": "function", "function": {**FIND, **change}}]}


def assistant(**call: Any) -> dict[str, Any]:
    return {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{}"} | call}]}]}


WRONG: list[tuple[dict[str, Any], str, str]] = [
    ({"tools": [1]}, "tools[0]", "must be an object with type and function"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type", "only tools of type 'function' are served"),
    ({"tools": [{"type": "function"}]}, "tools[0].function", "is missing"),
    ({"tools": TOOLS[:1] * 129}, "tools", "at most 128 entries, got 129"),
    ({"tools": TOOLS[:1] * 2}, "tools[1].function.name", "is 'find', which an earlier tool has"),
    (tool(name=None), "tools[0].function.name", "is missing"),
    (tool(name="a b"), "tools[0].function.name", "from 1 to 64 letters, digits"),
    (tool(parameters=1), "tools[0].function.parameters", "must be an object, got 1"),
    (tool(parameters=None, strict=True), "tools[0].function.parameters", "a strict function needs the schema"),
    (tool(parameters={"$ref": "#"}, strict=True), "tools[0].function.parameters", "tools[0].function.parameters: "),
    (tool(parameters={"type": 1}) | {"tool_choice": "required"}, "tools[0].function.parameters", "parameters: "),
    (tool(parameters={"title": "\ud800"}), "tools", "half of a surrogate pair"),
    ({"tools": [], "tool_choice": "required"}, "tool_choice", "tools is empty"),
    ({"tool_choice": "some"}, "tool_choice", "must be one of 'auto', 'none', 'required', or an object"),
    ({"tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice.function.name", "tools has 'find'"),
    ({"tool_choice": {"type": "mcp"}}, "tool_choice.type", "must be 'function'"),
    ({"tool_choice": 1}, "tool_choice", "must be a string, or an object"),
    ({"regex": "a"}, "regex", "regex cannot be combined with tools"),
    (assistant(arguments="{"), "messages[0].tool_calls[0].function.arguments", "the text of a JSON object, got '{'"),
    (assistant(arguments="[1]"), "messages[0].tool_calls[0].function.arguments", "the text of a JSON object"),
    (assistant(name=None), "messages[0].tool_calls[0].function.name", "is missing"),
    ({"chat_template_kwargs": {"thikns": 1}}, "chat_template_kwargs.thikns", "has no such variable"),
    ({"chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs.chat_template", "has no effect"),
    ({"continue_final_message": True}, "continue_final_message", "needs a last message of role assistant, got 'user'"),
    ({"reasoning_effort": "low"}, "reasoning_effort", "is not served"),
]


@pytest.mark.parametrize(("change", "param", "words"), WRONG, ids=lambda x: str(x)[:40])
def test_wrong_tools_are_named(talks: Running, change: dict[str, Any], param: str, words: str) -> None:
    before = talks.engine.core._state.chain
    given = {"model": NAME, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, "tools": TOOLS}
    found = talks.send("/v1/chat/completions", given | change)
    assert found.status == 400 and found.error["param"] == param and words in found.error["message"], found.data
    assert talks.engine.core._state.chain == before


def test_a_template_without_tools(server: Running) -> None:
    found = server.send(
        "/v1/chat/completions", {"model": NAME, "messages": [{"role": "user", "content": "hi"}], "tools": TOOLS}
    )
    assert found.status == 400 and "--tool-call-parser" in found.error["message"] and found.error["param"] == "tools"
