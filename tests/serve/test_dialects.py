"""Covers responses, Anthropic's messages, tokens of texts, ids of requests and other sites' pages, by real clients."""

import json
import random
from collections.abc import Iterator
from typing import Any

import pytest

from shardfn.serve import _anthropic_messages, _open_responses
from tests.serve.server import LIMIT, NAME, TALKS, Running, tool_text
from tests.serve.test_fuzz import value
from tests.serve.test_tools import CALL, FIND, SAYS

openai = pytest.importorskip("openai")

TOOL = {"type": "function", **FIND}
CLAUDES = {"name": "find", "description": "Finds.", "input_schema": FIND["parameters"]}
TEXT = f"<think>hm</think>OK. {CALL}"


@pytest.fixture(scope="module")
def talks() -> Iterator[Running]:
    made = Running(text=TALKS, origins=("https://a.example",))
    yield made
    made.wait_idle()
    assert made.close() == 0


@pytest.fixture(scope="module")
def client(talks: Running) -> Iterator[Any]:
    with openai.OpenAI(base_url=talks.url, api_key="none", max_retries=0, timeout=LIMIT) as made:
        yield made


def plain(value: Any) -> Any:
    """A value without its ids and times."""
    if isinstance(value, dict):
        drop = ("id", "call_id", "item_id", "created_at", "sequence_number")
        return {key: plain(x) for key, x in value.items() if key not in drop}
    return [plain(x) for x in value] if isinstance(value, list) else value


def test_responses(client: Any) -> None:
    given = {"model": NAME, "input": "SAY:" + TEXT, "tools": [TOOL], "max_output_tokens": 120, "extra_body": SAYS}
    whole = client.responses.create(**given)
    thought, said, call = whole.output
    assert (thought.type, thought.content[0].text) == ("reasoning", "hm") and whole.output_text == "OK."
    assert (call.type, call.name, call.arguments) == ("function_call", "find", '{"a": 1}')
    assert whole.status == "completed" and said.status == "completed" and whole.usage.output_tokens == len(TEXT) + 1
    assert 2 <= whole.usage.output_tokens_details.reasoning_tokens <= len("<think>hm</think>")
    events = list(client.responses.create(**given, stream=True))
    assert [one.sequence_number for one in events] == list(range(len(events)))
    assert plain(events[-1].response.to_dict()) == plain(whole.to_dict()) and events[-1].type == "response.completed"
    assert "".join(x.delta for x in events if x.type == "response.output_text.delta") == "OK."
    assert "".join(x.delta for x in events if x.type == "response.function_call_arguments.delta") == '{"a": 1}'
    items = [x.item for x in events if x.type == "response.output_item.done"]
    assert [plain(x.to_dict()) for x in items] == plain([x.to_dict() for x in whole.output])
    with client.responses.stream(**given) as stream:
        assert stream.get_final_response().output_text == "OK."


def test_items_go_back_into_the_next_response(client: Any, talks: Running) -> None:
    first = client.responses.create(
        model=NAME, input="SAY:" + TEXT, tools=[TOOL], max_output_tokens=120, extra_body=SAYS
    )
    call = first.output[-1]
    items = [{"role": "user", "content": [{"type": "input_text", "text": "hi"}]}, *[x.to_dict() for x in first.output]]
    items.append({"type": "function_call_output", "call_id": call.call_id, "output": "found"})
    made = client.responses.create(model=NAME, input=items, instructions="be", tools=[TOOL], max_output_tokens=1)
    tools = [{"function": FIND}]
    calls = [{"function": {"name": "find", "arguments": {"a": 1}}}]
    messages = [
        *({"role": "system", "content": "be"}, {"role": "user", "content": "hi"}),
        *({"role": "assistant", "content": "OK.", "tool_calls": calls}, {"role": "tool", "content": "found"}),
    ]
    assert made.usage.input_tokens == len(tool_text(messages, tools=tools)) and made.status == "incomplete"
    assert made.incomplete_details.reason == "max_output_tokens"


def test_a_schema_of_a_response(client: Any) -> None:
    pytest.importorskip("llguidance")
    form = {"type": "json_schema", "name": "it", "schema": FIND["parameters"], "strict": True}
    made = client.responses.create(model=NAME, input='SAY:{"a": 5}', text={"format": form}, extra_body=SAYS)
    assert made.output_text == '{"a": 5}'


def fold(events: list[tuple[str, Any]]) -> dict[str, Any]:
    """The message of Anthropic's events, as its clients put it together."""
    assert [name for name, x in events] == [x["type"] for _, x in events]
    message = events[0][1]["message"]
    partial = ""
    for name, x in events[1:]:
        if name == "content_block_start":
            assert x["index"] == len(message["content"])
            message["content"].append(x["content_block"])
            partial = ""
        elif name == "content_block_delta":
            kind = x["delta"]["type"].removesuffix("_delta")
            if kind == "input_json":
                partial += x["delta"]["partial_json"]
            else:
                message["content"][-1][kind] += x["delta"][kind]
        elif name == "content_block_stop" and message["content"][-1]["type"] == "tool_use":
            message["content"][-1]["input"] = json.loads(partial)
        elif name == "message_delta":
            message |= x["delta"] | {"usage": x["usage"]}
    assert events[-1][0] == "message_stop"
    return message


def send_message(talks: Running, text: str, **more: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """The whole message, and the message of the stream."""
    body = {"model": NAME, "max_tokens": 120, "messages": [{"role": "user", "content": "SAY:" + text}], **SAYS, **more}
    whole = talks.send("/v1/messages", body)
    assert whole.status == 200, whole.data
    lines = talks.send("/v1/messages?beta=true", body | {"stream": True}).data.decode().split("\n\n")
    events = [(one.split("\n")[0][7:], json.loads(one.split("\n")[1][6:])) for one in lines if one]
    return whole.json, fold(events)


def test_messages_of_anthropic(talks: Running) -> None:
    whole, streamed = send_message(talks, TEXT, tools=[CLAUDES])
    assert plain(whole) == plain(streamed)
    assert plain(whole["content"]) == [
        {"type": "thinking", "thinking": "hm", "signature": ""},
        {"type": "text", "text": "OK."},
        {"type": "tool_use", "name": "find", "input": {"a": 1}},
    ]
    assert (whole["stop_reason"], whole["usage"]["output_tokens"]) == ("tool_use", len(TEXT) + 1)
    assert whole["content"][-1]["id"].startswith("toolu_")
    for text, more, want in [
        ("to the END of", {"stop_sequences": ["END", "to be"]}, ("to the ", "stop_sequence", "END")),
        ("to the EN", {"stop_sequences": ["END"]}, ("to the EN", "end_turn", None)),
        ("to the end", {"max_tokens": 4}, ("to t", "max_tokens", None)),
    ]:
        whole, streamed = send_message(talks, text, **more)
        assert plain(whole) == plain(streamed)
        assert (whole["content"][0]["text"], whole["stop_reason"], whole["stop_sequence"]) == want


def test_blocks_reach_the_template(talks: Running) -> None:
    messages = [
        {"role": "user", "content": "hi"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "s"},
                {"type": "text", "text": "OK."},
                {"type": "tool_use", "id": "t1", "name": "find", "input": {"a": 7}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "found"}]},
                {"type": "text", "text": "so", "cache_control": {"type": "ephemeral"}},
            ],
        },
    ]
    calls = [{"function": {"name": "find", "arguments": {"a": 7}}}]
    seen = [
        *({"role": "system", "content": "be"}, {"role": "user", "content": "hi"}),
        *({"role": "assistant", "content": "OK.", "tool_calls": calls}, {"role": "tool", "content": "found"}),
        {"role": "user", "content": "so"},
    ]
    text = tool_text(seen, tools=[{"function": FIND}])
    system = [{"type": "text", "text": "be"}]
    body = {"model": NAME, "messages": messages, "system": system, "tools": [CLAUDES]}
    assert talks.send("/v1/messages/count_tokens", body).json == {"input_tokens": len(text)}
    made = talks.send("/v1/messages", body | {"max_tokens": 1}).json
    assert made["usage"]["input_tokens"] == len(text)


def test_by_anthropics_client(talks: Running) -> None:
    anthropic = pytest.importorskip("anthropic")
    url = talks.url.removesuffix("/v1")
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0, timeout=LIMIT) as client:
        said: Any = [{"role": "user", "content": "SAY:" + TEXT}]
        given: Any = {"model": NAME, "max_tokens": 120, "messages": said, "tools": [CLAUDES], "extra_body": SAYS}
        whole = client.messages.create(**given)
        assert whole.content[-1].input == {"a": 1} and whole.stop_reason == "tool_use"
        with client.messages.stream(**given) as stream:
            final = stream.get_final_message()
        assert plain(final.to_dict())["content"] == plain(whole.to_dict())["content"]
        assert client.messages.count_tokens(model=NAME, messages=said).input_tokens == len(tool_text(said))
        with pytest.raises(anthropic.BadRequestError, match="max_tokens must be an integer from 1"):
            client.messages.create(**given | {"max_tokens": 0})


WRONG: list[tuple[str, dict[str, Any], str, str]] = [
    ("responses", {"input": None}, "input", "is missing"),
    ("responses", {"input": []}, "input", "is empty"),
    ("responses", {"input": [{"type": "image"}]}, "input[0].type", "must be one of 'message', 'function_call'"),
    ("responses", {"input": [{"role": "user", "content": [{"type": "a"}]}]}, "input[0].content[0].type", "text"),
    ("responses", {"input": [{"type": "function_call", "name": "f"}]}, "input[0].arguments", "is missing"),
    ("responses", {"input": "x" * 600}, "input", "input must have at most"),
    ("responses", {"max_output_tokens": 0}, "max_output_tokens", "max_output_tokens must be an integer from 1"),
    ("responses", {"previous_response_id": "resp_1"}, "previous_response_id", "is not served"),
    ("responses", {"tools": [{"type": "web_search"}]}, "tools[0].type", "only tools of type 'function'"),
    ("responses", {"tools": [{"type": "function"}]}, "tools[0].name", "is missing"),
    ("responses", {"text": {"format": {"type": "xml"}}}, "text.format", "text.format"),
    ("responses", {"reasoning": {"effort": "high"}}, "reasoning.effort", "is not served"),
    ("responses", {"inptu": 1}, "inptu", "Did you mean 'input'?"),
    ("messages", {"max_tokens": None}, "", "max_tokens is missing"),
    ("messages", {"max_tokens": 0}, "", "max_tokens must be an integer from 1"),
    ("messages", {"messages": [{"role": "system", "content": "a"}]}, "", "messages[0].role must be 'user'"),
    ("messages", {"messages": [{"role": "user", "content": [{"type": "a"}]}]}, "", "messages[0].content[0].type"),
    ("messages", {"tools": [{"name": "f"}]}, "", "tools[0].input_schema is missing"),
    ("messages", {"tool_choice": {"type": "some"}}, "", "tool_choice.type must be"),
    ("messages", {"tool_choice": {"type": "any"}}, "", "tools is empty"),
    ("messages", {"thinking": {"type": "on"}}, "", "thinking.type must be"),
    ("messages", {"stop_sequences": ["a"] * 17}, "", "stop_sequences must have at most 16"),
    ("messages", {"model": "other"}, "", "model 'other' does not exist"),
]  # fmt: skip


@pytest.mark.parametrize(("route", "change", "param", "words"), WRONG, ids=lambda x: str(x)[:40])
def test_wrong_bodies_are_named(talks: Running, route: str, change: dict[str, Any], param: str, words: str) -> None:
    before = talks.engine.core._state.chain
    hi = {"input": "hi"} if route == "responses" else {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    found = talks.send(f"/v1/{route}", {"model": NAME, **hi, **change})
    assert found.status in (400, 404), found.data
    error = found.json["error"]
    assert words in error["message"] and talks.engine.core._state.chain == before
    if route == "messages":
        assert found.json["type"] == "error" and set(error) == {"type", "message"}
    else:
        assert error["param"] == param


@pytest.mark.nightly
def test_any_body_has_an_answer(talks: Running) -> None:
    """Bodies of fields with any values are refused or answered: no failure of the server."""
    draw, found = random.Random(0), set[int]()
    for _ in range(150):
        table, path = draw.choice([(_open_responses.BODY, "/v1/responses"), (_anthropic_messages.BODY, "/v1/messages")])
        body: dict[str, Any] = {"model": NAME, "max_tokens": 2, "messages": [{"role": "user", "content": "hi"}]}
        body = body if path == "/v1/messages" else {"model": NAME, "input": "hi", "max_output_tokens": 2}
        for name in draw.sample([*table], draw.randrange(4)):
            body[name] = draw.choice([value(draw), [], {}, [{"type": "function"}], [{"type": "text", "text": "a"}]])
        found.add(talks.send(path, body).status)
    assert {200, 400} <= found <= {200, 400, 404}


def test_tokens_of_texts(talks: Running) -> None:
    made = talks.send("/tokenize", {"model": NAME, "prompt": "aé", "return_token_strs": True}).json
    spelled = {"tokens": [97, 195, 169], "token_strs": ["a", "\ufffd", "\ufffd"]}
    assert made == {"count": 3, "max_model_len": 512, **spelled}
    assert talks.send("/detokenize", {"tokens": made["tokens"]}).json == {"prompt": "aé"}
    messages = [{"role": "user", "content": "hi"}]
    tools = [{"type": "function", "function": FIND}]
    made = talks.send("/tokenize", {"messages": messages, "tools": tools}).json
    assert bytes(made["tokens"]).decode() == tool_text(messages, tools=tools)
    for path, body, words in [
        ("/tokenize", {}, "prompt or messages is needed"),
        ("/tokenize", {"prompt": "a", "tools": []}, "tools is a field of chats"),
        ("/tokenize", {"prompt": "a" * 600}, "prompt must have at most"),
        ("/detokenize", {"tokens": [256]}, "tokens[0] must be an integer from 0 to 255, got 256"),
    ]:
        found = talks.send(path, body)
        assert found.status == 400 and words in found.error["message"], found.data


def test_ids_of_requests_and_pages_of_other_sites(talks: Running, start: Any) -> None:
    assert talks.get("/health", {"X-Request-Id": "mine"}).headers["x-request-id"] == "mine"
    for given in (None, "a b", "x" * 129):
        assert talks.get("/health", {"X-Request-Id": given}).headers["x-request-id"].startswith("req_")
    ours = {"Origin": "https://a.example"}
    assert talks.get("/v1/models", ours).headers["access-control-allow-origin"] == "https://a.example"
    assert "access-control-allow-origin" not in talks.get("/v1/models", {"Origin": "https://b.example"}).headers
    asks = {**ours, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "x-a"}
    found = talks.send("/v1/completions", None, asks, "OPTIONS")
    assert (found.status, found.headers["access-control-allow-headers"]) == (204, "x-a")
    server = start(keys=("k",))
    assert server.send("/tokenize", {"prompt": "a"}).status == 401
    assert server.send("/v1/messages", {}).json["error"]["type"] == "authentication_error"
    assert server.get("/v1/models", {"X-Api-Key": "k"}).status == 200
    assert server.send("/v1/completions", None, asks, "OPTIONS").status != 204


def test_shorter_embeddings(client: Any) -> None:
    whole, short = (
        client.embeddings.create(model=NAME, input="abc", encoding_format="float", dimensions=n).data[0].embedding
        for n in (32, 8)
    )
    length = sum(x * x for x in whole[:8]) ** 0.5
    assert len(short) == 8 and short == pytest.approx([x / length for x in whole[:8]], rel=1e-6)
