"""Covers every field of every route: out of range, of another type, missing, doubled, not served, unknown."""

import gzip
import json
from typing import Any

import pytest

from shardfn.serve import _fields
from tests.serve.server import CONTEXT, NAME, Running

COMPLETION = {"model": NAME, "prompt": "ab", "max_tokens": 2}
USER = {"role": "user", "content": "ab"}
CHAT = {"model": NAME, "messages": [USER], "max_tokens": 2}
INPUT = {"model": NAME, "input": "ab"}
ROUTES = {"/v1/completions": COMPLETION, "/v1/chat/completions": CHAT, "/v1/embeddings": INPUT}

BOTH: list[tuple[dict[str, Any], str, str]] = [
    ({"temperature": -1}, "temperature", "temperature must be a number from 0 to 100, got -1"),
    ({"temperature": "hot"}, "temperature", 'temperature must be a number, got "hot"'),
    ({"temperature": True}, "temperature", "temperature must be a number, got true"),
    ({"temperature": [1]}, "temperature", "temperature must be a number, got a list"),
    ({"top_p": 0}, "top_p", "top_p must be a number above 0 and at most 1, got 0"),
    ({"top_p": 1.5}, "top_p", ", got 1.5."),
    ({"top_k": -2}, "top_k", "top_k must be an integer from 0 to 16777216, got -2"),
    ({"top_k": 1.5}, "top_k", "top_k must be an integer, got 1.5"),
    ({"min_p": 2}, "min_p", ", got 2."),
    ({"presence_penalty": 3}, "presence_penalty", "from -2 to 2"),
    ({"frequency_penalty": -3}, "frequency_penalty", "from -2 to 2"),
    ({"repetition_penalty": 0}, "repetition_penalty", "from 0.01 to 100"),
    ({"seed": -2}, "seed", ", got -2."),
    ({"seed": 2**64}, "seed", ", got 18446744073709551616."),
    ({"seed": "1"}, "seed", "must be an integer"),
    ({"n": 0}, "n", "n must be an integer from 1 to 128, got 0"),
    ({"n": 129}, "n", ", got 129"),
    ({"n": 1.0}, "n", "n must be an integer, got 1.0"),
    ({"max_tokens": 0}, "max_tokens", ", got 0."),
    ({"max_tokens": CONTEXT}, "prompt", f"fit together in the context of {CONTEXT} tokens"),
    ({"stop": 1}, "stop", "must be a string or a list of strings"),
    ({"stop": ["a", 1]}, "stop", "must be a string or a list of strings"),
    ({"stop_token_ids": [256]}, "stop_token_ids", "stop_token_ids[0] must be an integer from 0 to 255, got 256"),
    ({"stop_token_ids": ["a"]}, "stop_token_ids", "must be a list of integers"),
    ({"ignore_eos": 1}, "ignore_eos", "must be true or false"),
    ({"stream": "yes"}, "stream", "must be true or false"),
    ({"stream_options": {}}, "stream_options", "has no effect without stream"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage", "true or false"),
    ({"stream": True, "stream_options": {"more": 1}}, "stream_options.more", "is not known"),
    ({"cache_salt": 1}, "cache_salt", "must be a string"),
    ({"user": 1}, "user", "user is 1, which is not served; leave it out, or give a string."),
    ({"regex": 1}, "regex", "must be a string"),
    ({"user": "\ud800"}, "user", "user has half of a surrogate pair"),
    ({"model": None}, "model", f"model is missing; this server has '{NAME}'"),
    ({"model": 1}, "model", "must be a string"),
    ({"temprature": 1}, "temprature", "is not known. Did you mean 'temperature'?"),
    ({"logit_bias": []}, "logit_bias", "must be an object"),
    ({"logit_bias": {"a": 1}}, "logit_bias", "logit_bias has a field 'a'; each must be the id of a token"),
    ({"logit_bias": {"-1": 1}}, "logit_bias", "logit_bias has a field '-1'"),
    ({"logit_bias": {"256": 1}}, "logit_bias", "logit_bias must have tokens from 0 to 255, integers, got 256"),
    ({"logit_bias": {"1": "2"}}, "logit_bias", "logit_bias of token 1 must be a number"),
    ({"logit_bias": {"1": 101}}, "logit_bias", "logit_bias of token 1 must be a number from -100 to 100, got 101"),
    ({"logit_bias": {"1": 1, "01": 1}}, "logit_bias", "logit_bias has token 1 twice"),
    ({"functions": [1]}, "functions", "is not served"),
    ({"service_tier": "flex"}, "service_tier", "is not served"),
    ({"store": True}, "store", "store is true, which is not served; leave it out, or give false."),
    ({"min_tokens": 3, "max_tokens": 2}, "min_tokens", "min_tokens must be at most max_tokens=2, got 3"),
    ({"bad_words": "a"}, "bad_words", 'bad_words must be a list of strings, got "a"'),
    ({"allowed_token_ids": []}, "allowed_token_ids", "must have at least one token id"),
    ({"allowed_token_ids": [256]}, "allowed_token_ids", r"allowed_token_ids[0] must be an integer from 0 to 255"),
    (
        {"logits_processors": ["f"]},
        "logits_processors",
        "logits_processors has 'f', but this engine has ['even', 'say']",
    ),
    ({"use_beam_search": 1}, "use_beam_search", "use_beam_search must be true or false, got 1"),
    ({"skip_special_tokens": 1}, "skip_special_tokens", "must be true or false"),
    ({"store": 0}, "store", "store is 0, which is not served"),
    ({"\ud800": 1}, r"'\ud800'", r"'\ud800' has half of a surrogate pair"),
    ({"logit_bias": {"\udfff": 1}}, r"'\udfff'", "half of a surrogate pair"),
]
OLDER: list[tuple[dict[str, Any], str, str]] = [
    ({"prompt": None}, "prompt", "prompt is missing"),
    ({"prompt": ""}, "prompt", f"prompt must have from 1 to {CONTEXT - 1} tokens, got 0"),
    ({"prompt": []}, "prompt", "must be a string, a list of token ids"),
    ({"prompt": ["a", [1], 2]}, "prompt", "must be a string, a list of token ids"),
    ({"prompt": {"a": 1}}, "prompt", "must be a string, a list of token ids"),
    ({"prompt": [True]}, "prompt", "must be a string, a list of token ids"),
    ({"prompt": ["a", "\ud800"]}, "prompt", "half of a surrogate pair"),
    ({"prompt": [256]}, "prompt", "prompt[0] must be an integer from 0 to 255, got 256"),
    ({"prompt": ["a", [-1]]}, "prompt", "prompt 1 of 2: prompt[0] must be an integer from 0 to 255, got -1"),
    ({"prompt": "a" * CONTEXT}, "prompt", f"tokens, got {CONTEXT}: the context has"),
    ({"prompt": ["a"] * 100, "n": 2}, "n", "n must give at most 128 choices, got 200 for n=2 and 100 prompts"),
    ({"logprobs": 6}, "logprobs", "logprobs must be an integer from 0 to 5, got 6"),
    ({"logprobs": -1}, "logprobs", ", got -1."),
    ({"logprobs": True}, "logprobs", "must be an integer"),
    ({"best_of": 2}, "best_of", "best_of is 2, which is not served; leave it out, or give 1, the value of n."),
    ({"best_of": 1, "n": 2}, "best_of", "or give 2, the value of n"),
    ({"echo": 1}, "echo", "must be true or false"),
    ({"echo": True, "max_tokens": 0, "stop_token_ids": [256]}, "stop_token_ids", ", got 256."),
    ({"prompt": "a" * (CONTEXT + 1)}, "prompt", f"prompt must have at most {CONTEXT} bytes, got {CONTEXT + 1}"),
    (
        {"prompt": ["a", "é" * CONTEXT]},
        "prompt",
        f"prompt 1 of 2: prompt must have at most {CONTEXT} bytes, got {2 * CONTEXT}",
    ),
    ({"suffix": "b"}, "suffix", "is not served"),
    ({"tools": [{"type": "function"}]}, "tools", "tools is a list, which is not served; leave it out, or give []."),
    ({"tool_choice": "required"}, "tool_choice", 'leave it out, or give "none" or "auto".'),
]
NEWER: list[tuple[dict[str, Any], str, str]] = [
    ({"messages": None}, "messages", "messages is missing"),
    ({"messages": []}, "messages", "messages is empty"),
    ({"messages": "ab"}, "messages", "must be a list"),
    ({"messages": ["ab"]}, "messages[0]", "must be an object with role and content"),
    ({"messages": [USER, {"role": "user"}]}, "messages[1].content", "is missing"),
    ({"messages": [{"content": "a"}]}, "messages[0].role", "is missing"),
    ({"messages": [USER | {"role": "function"}]}, "messages[0].role", "must be one of system, developer, user"),
    ({"messages": [USER | {"role": 1}]}, "messages[0].role", "must be a string"),
    ({"messages": [USER | {"name": 1}]}, "messages[0].name", "must be a string"),
    ({"messages": [USER | {"tool_calls": [{}]}]}, "messages[0].tool_calls", "is a field of role assistant, got 'user'"),
    ({"messages": [{"role": "user", "content": None}]}, "messages[0].content", "is missing"),
    ({"messages": [USER | {"\ud800": 1}]}, r"'\ud800'", "half of a surrogate pair"),
    ({"messages": [USER | {"content": "é" * CONTEXT}]}, "messages", "must have at most"),
    ({"messages": [USER | {"content": 1}]}, "messages[0].content", "must be a string, or a list of parts"),
    ({"messages": [USER | {"content": ["a"]}]}, "messages[0].content[0]", "must be an object with type and text"),
    (
        {"messages": [USER | {"content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        *("messages[0].content[0].type", "only parts of type 'text' are served"),
    ),
    ({"messages": [USER | {"content": [{"type": "text", "text": 1}]}]}, "messages[0].content[0].text", "a string"),
    ({"messages": [USER | {"content": "forbidden"}]}, "messages", "the chat template refuses these messages"),
    ({"messages": [USER | {"content": "a" * CONTEXT}]}, "messages", "tokens"),
    ({"max_completion_tokens": 1}, "max_tokens", "Give one of them"),
    ({"max_tokens": None, "max_completion_tokens": 0}, "max_completion_tokens", ", got 0."),
    ({"logprobs": 1}, "logprobs", "true or false"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "top_logprobs must be an integer from 0 to 20, got 21"),
    ({"logprobs": True, "top_logprobs": -1}, "top_logprobs", ", got -1."),
    ({"top_logprobs": 2}, "top_logprobs", "top_logprobs has no effect without logprobs: true"),
    (
        {"response_format": {"type": "xml"}},
        "response_format.type",
        "response_format.type must be 'text', 'json_object' or 'json_schema', got 'xml'",
    ),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema", "is missing"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": 1}}},
        "response_format.json_schema.schema",
        "an object",
    ),
    ({"response_format": {"type": "text", "more": 1}}, "response_format.more", "is not known"),
    ({"audio": {}}, "audio", "is not served"),
    ({"reasoning_effort": "low"}, "reasoning_effort", "is not served"),
    ({"web_search_options": {}}, "web_search_options", "is not served"),
]
EMBEDDINGS: list[tuple[dict[str, Any], str, str]] = [
    ({"input": None}, "input", "input is missing"),
    ({"input": ""}, "input", f"input must have from 1 to {CONTEXT - 1} tokens, got 0"),
    ({"input": []}, "input", "must be a string, a list of token ids"),
    ({"input": ["a", 1]}, "input", "must be a string, a list of token ids"),
    ({"input": [256]}, "input", ", got 256."),
    ({"input": ["a", ""]}, "input", f"prompt 1 of 2: input must have from 1 to {CONTEXT - 1} tokens, got 0"),
    ({"input": "a" * CONTEXT}, "input", f"tokens, got {CONTEXT}: the context has"),
    ({"input": ["a"] * 2049}, "input", "input must have at most 2048 entries, got 2049"),
    ({"encoding_format": "hex"}, "encoding_format", "encoding_format must be one of 'float', 'base64', got 'hex'"),
    ({"dimensions": 33}, "dimensions", "dimensions must be from 1 to 32, as embeddings of this model have, got 33"),
    ({"dimensions": "32"}, "dimensions", "must be an integer"),
    ({"temperature": 1}, "temperature", "is not known"),
    ({"user": 1}, "user", "give a string"),
    ({"tools": []}, "tools", "is not served"),
    ({"model": None}, "model", "model is missing"),
]
CASES = [
    *(("/v1/completions", *case) for case in BOTH + OLDER),
    *(("/v1/chat/completions", *case) for case in BOTH + NEWER),
    *(("/v1/embeddings", *case) for case in EMBEDDINGS),
]


@pytest.mark.parametrize(("path", "change", "param", "words"), CASES, ids=lambda x: str(x)[:40])
def test_a_wrong_field_is_named(server: Running, path: str, change: dict[str, Any], param: str, words: str) -> None:
    before = server.engine.core._state.chain
    found = server.send(path, ROUTES[path] | change)
    if param == "prompt" and "chat" in path:
        param = "messages"
    assert found.status == 400, found.data
    assert found.error["param"] == param and words in found.error["message"], found.error
    assert server.engine.core._state.chain == before


# Values of fields of OpenAI's and vLLM's interfaces that ask for nothing.
NEUTRAL: dict[str, Any] = {
    "functions": [],
    "function_call": "none",
    "store": False,
    "metadata": {"a": "b"},
    "service_tier": "default",
    "modalities": ["text"],
    "verbosity": "medium",
    "prompt_cache_key": "k",
    "prompt_cache_retention": "24h",
    "safety_identifier": "u",
    "user": "u",
    "use_beam_search": False,
    "length_penalty": 1.0,
    "min_tokens": 0,
    "bad_words": [],
    "logits_processors": [],
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
    "return_tokens_as_token_ids": False,
    "return_token_ids": False,
    "priority": 0,
    "request_id": "r",
    "kv_transfer_params": {},
    "vllm_xargs": {},
    "temperature": 1,
    "top_k": -1,
    "top_p": 1,
    "min_p": 0,
    "n": 1,
    "stop": "",
    "stop_token_ids": [],
    "logit_bias": {},
    "ignore_eos": False,
    "include_stop_str_in_output": False,
    "response_format": {"type": "text", "json_schema": None},
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "repetition_penalty": 1,
    "stream": False,
}
TOOLS = {"tools": [], "tool_choice": "auto", "parallel_tool_calls": True, "reasoning_effort": "none"}
OF_ROUTES: dict[str, dict[str, Any]] = {
    "/v1/completions": {**NEUTRAL, **TOOLS, "echo": False, "best_of": 1, "suffix": "", "add_special_tokens": True},
    "/v1/chat/completions": {
        **NEUTRAL,
        **TOOLS,
        "echo": False,
        "logprobs": False,
        "top_logprobs": 0,
        "add_special_tokens": False,
        "add_generation_prompt": True,
        "continue_final_message": False,
        "chat_template_kwargs": {},
        "mm_processor_kwargs": {},
        "documents": [],
        "include_reasoning": True,
    },
    "/v1/embeddings": {"user": "u", "add_special_tokens": True, "priority": 0, "request_id": "r"},
}


@pytest.mark.parametrize("path", OF_ROUTES)
def test_values_that_ask_for_nothing_change_nothing(server: Running, path: str) -> None:
    tables = {"/v1/completions": _fields.COMPLETIONS, "/v1/chat/completions": _fields.CHAT}
    table = tables.get(path, _fields.EMBEDDINGS)
    assert {name for name, kind in table.items() if not kind.served} <= set(OF_ROUTES[path])
    given = ROUTES[path] | ({} if "embeddings" in path else {"seed": 3})
    plain = server.send(path, given).json
    for change in ({name: value} for name, value in OF_ROUTES[path].items()):
        found = server.send(path, given | change)
        assert found.status == 200, (change, found.data)
    found = server.send(path, given | OF_ROUTES[path]).json
    same = "data" if "embeddings" in path else "choices"
    assert found[same] == plain[same]


MESSAGES: list[tuple[list[Any], str]] = [
    ([{"role": "developer", "content": "be"}, USER], "system: be\nuser: ab\n"),
    ([USER | {"name": "ann"}], "user: ab\n"),
    ([USER, {"role": "assistant", "content": None, "tool_calls": []}, USER], "user: ab\nassistant: \nuser: ab\n"),
    ([USER, {"role": "assistant"}, USER], "user: ab\nassistant: \nuser: ab\n"),
    ([{"role": "assistant", "content": "a", "reasoning_content": "b", "refusal": ""}], "assistant: a\n"),
    (
        [{"role": "assistant", "content": "a", "annotations": [], "audio": None, "function_call": None}],
        "assistant: a\n",
    ),
]


@pytest.mark.parametrize(("messages", "text"), MESSAGES, ids=lambda x: str(x)[:40])
def test_messages_as_clients_send_them(server: Running, messages: list[Any], text: str) -> None:
    found = server.send("/v1/chat/completions", CHAT | {"messages": messages})
    assert found.status == 200, found.data
    assert found.json["usage"]["prompt_tokens"] == len(text + "assistant: ")


def test_templates_see_names_and_reasoning(start: Any) -> None:
    from tests.serve.server import WORDS

    seen = list[Any]()
    server = start(text=WORDS._replace(chat=lambda messages: str(seen.extend(messages))))
    message = {"role": "assistant", "content": "a", "name": "ann", "reasoning_content": "b", "reasoning": "c"}
    assert server.send("/v1/chat/completions", CHAT | {"messages": [message]}).status == 200
    assert seen == [message]


def test_null_is_as_if_left_out(server: Running) -> None:
    nulls = dict.fromkeys(("temperature", "stop", "tools", "logit_bias", "stream_options", "suffix", "n"))
    assert server.send("/v1/completions", COMPLETION | nulls).status == 200
    message = USER | {"name": None, "tool_calls": None, "refusal": None}
    assert server.send("/v1/chat/completions", CHAT | {"messages": [message]}).status == 200


@pytest.mark.parametrize("field", COMPLETION)
def test_a_doubled_field_is_named(server: Running, field: str) -> None:
    text = json.dumps(COMPLETION)[:-1] + f", {json.dumps(field)}: {json.dumps(COMPLETION[field])}}}"
    found = server.send("/v1/completions", text.encode())
    assert found.status == 400 and found.error["message"] == f"{field} is given twice."
    assert found.error["param"] == field


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "The body is not JSON"),
        (b"{", "The body is not JSON"),
        (b"{} {}", "The body is not JSON"),
        (b"[]", "The body must be an object, got a list"),
        (b"1", "The body must be an object, got 1"),
        (b"null", "The body must be an object, got null"),
        (b'"\xff"', "The body is not JSON"),
        (b'{"temperature": NaN}', "NaN is not a number of JSON"),
        (b'{"n": ' + b"1" * 5000 + b"}", "The body is not JSON"),
        (b'{"temperature": 1e999}', "model is missing"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"a":' * 50_000, "nested too deeply"),
    ],
    ids=lambda x: str(x)[:20],
)
def test_other_bodies(server: Running, body: bytes, words: str) -> None:
    found = server.send("/v1/completions", body)
    assert found.status == 400 and words in found.error["message"]


def test_an_infinite_number(server: Running) -> None:
    body = json.dumps(COMPLETION)[:-1] + ', "temperature": 1e999}'
    found = server.send("/v1/completions", body.encode())
    assert found.status == 400 and found.error["param"] == "temperature"


def test_another_model(server: Running) -> None:
    for path, body in ROUTES.items():
        found = server.send(path, body | {"model": "other"})
        assert (found.status, found.error["code"]) == (404, "model_not_found")
        assert found.error["message"].endswith("this server has 'tiny', 'tuned', 'other/one'.")


def test_a_model_without_embeddings(start: Any) -> None:
    server = start()
    server.front.app.model = server.front.app.model._replace(width=0)
    found = server.send("/v1/embeddings", INPUT)
    assert (found.status, found.error["param"]) == (400, "model") and "has no embeddings" in found.error["message"]


REFUSED = [
    (ValueError("stop_tokens[0] is 256; it must be less."), "stop_token_ids", "stop_token_ids[0] is 256"),
    (TypeError("salt is 1; it must be bytes."), "cache_salt", "cache_salt is 1"),
    (ImportError("grammars need a package"), None, "grammars need a package"),
]


@pytest.mark.day(4)
@pytest.mark.parametrize(("error", "param", "words"), REFUSED, ids=lambda x: str(x)[:20])
@pytest.mark.parametrize("stream", [False, True])
def test_the_reason_of_the_engine_is_the_answer(
    start: Any, error: Exception, param: str | None, words: str, stream: bool
) -> None:
    server = start()

    def refuses(*args: Any, **kwargs: Any) -> Any:
        raise error

    admit, server.engine.core.admit = server.engine.core.admit, refuses
    found = server.send("/v1/completions", COMPLETION | {"stream": stream, "n": 2})
    made = json.loads(found.data.removeprefix(b"data: "))["error"] if stream else found.error
    assert found.status == (200 if stream else 400)  # a stream has begun then
    assert (made["type"], made["param"]) == ("invalid_request_error", param) and words in made["message"]
    server.engine.core.admit = admit
    assert server.send("/v1/completions", COMPLETION).status == 200
    server.wait_idle()


def test_routes_that_do_not_exist(server: Running) -> None:
    assert server.get("/v1/nothing").error["message"] == "GET /v1/nothing is not served."
    found = server.get("/v1/completions")
    assert (found.status, found.headers["allow"]) == (405, "POST")
    assert server.send("/health").status == 405


@pytest.mark.parametrize("kind", [None, "text/plain", "application/x-www-form-urlencoded"])
def test_a_form_of_another_site_is_refused(server: Running, kind: str | None) -> None:
    found = server.send("/v1/completions", COMPLETION, {"Content-Type": kind})
    assert found.status == 415 and "must be 'application/json'" in found.error["message"]


def test_a_field_in_the_address_is_refused(server: Running) -> None:
    for path, body in ROUTES.items():
        found = server.send(f"{path}?n=2", body)
        assert (found.status, found.error["param"]) == (400, "n")
        assert found.error["message"] == "n is not served in the address. Give fields in the body."
    assert server.get("/v1/models?limit=1").error["param"] == "limit"
    assert server.get("/v1/models?").status == 200


def test_a_compressed_body_is_refused(server: Running) -> None:
    found = server.send("/v1/completions", gzip.compress(json.dumps(COMPLETION).encode()), {"Content-Encoding": "gzip"})
    assert found.status == 415 and found.error["message"] == "Content-Encoding is 'gzip'. Send the body as it is."
    assert server.send("/v1/completions", COMPLETION, {"Content-Encoding": "identity"}).status == 200


def test_a_tokenizer_without_a_template(start: Any) -> None:
    from tests.serve.server import WORDS

    server = start(text=WORDS._replace(chat=None))
    found = server.send("/v1/chat/completions", CHAT)
    assert (found.status, found.error["code"]) == (400, "no_chat_template")
    assert server.send("/v1/completions", COMPLETION).status == 200


CHATML = (
    "{% for m in messages %}{% if m['content'] == 'endless' %}"
    "{% for i in range(90000) %}{% for j in range(90000) %}{% endfor %}{% endfor %}{% endif %}"
    "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.mark.nightly
def test_a_template_without_an_end_refuses_its_request(start: Any) -> None:
    from shardfn.pretrained._text import compile_chat_template
    from tests.serve.server import WORDS

    server = start(text=WORDS._replace(chat=compile_chat_template(CHATML)))
    found = server.send("/v1/chat/completions", CHAT | {"messages": [{"role": "user", "content": "endless"}]})
    assert (found.status, found.error["param"]) == (400, "messages")
    assert "refuses these messages: it takes more than 1 s of a processor" in found.error["message"]
    found = server.send("/v1/chat/completions", CHAT)
    assert found.status == 200
    text = "<|im_start|>user\nab<|im_end|>\n<|im_start|>assistant\n"
    assert found.json["usage"]["prompt_tokens"] == len(text)
