"""Covers packages that people use as clients, over a real socket: litellm, langchain-openai, instructor, anthropic.

Answers are forced: a logits processor draws the text after SAY:, and a grammar forces JSON.
"""

import functools
import json
import os
from collections.abc import Iterable, Iterator
from typing import Any

import pytest

from tests.serve.server import LIMIT, NAME, TALKS, Running, new_engine, tool_text
from tests.serve.test_tools import CALL, FIND, SAYS, SCHEMA, TOOLS

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.filterwarnings("ignore"),  # of the packages
]
CONTEXT = 4096  # packages put schemas into prompts
THINKS = f"<think>hm</think>OK. {CALL}"
WORDS = "SAY:words\nassistant: "  # as a prompt without a template
PROMPTS = ["a ship", "a tax form"]


@pytest.fixture(scope="module")
def talks() -> Iterator[Running]:
    made = Running(text=TALKS, engine=functools.partial(new_engine, CONTEXT))
    yield made
    made.wait_idle()
    assert made.close() == 0


@pytest.fixture(autouse=True)
def no_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests go to the server of the test."""
    for name in [name for name in os.environ if name.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)


def said(text: str) -> Any:
    return [{"role": "user", "content": "SAY:" + text}]


# litellm


@pytest.fixture(scope="module")
def litellm() -> Any:
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # its prices come from the internet otherwise
    return pytest.importorskip("litellm")


def lite(talks: Running, provider: str = "openai", **more: Any) -> dict[str, Any]:
    url = talks.url.removesuffix("/v1") if provider == "anthropic" else talks.url
    return {"model": f"{provider}/{NAME}", "api_base": url, "api_key": "none", "timeout": LIMIT, **more}


@pytest.mark.parametrize("provider", ["openai", "hosted_vllm"])
def test_chats_of_litellm(litellm: Any, talks: Running, provider: str) -> None:
    given = lite(talks, provider, messages=said("Hello."), extra_body=SAYS, max_tokens=20, temperature=0)
    made = litellm.completion(**given)
    assert (made.choices[0].message.content, made.choices[0].finish_reason) == ("Hello.", "stop")
    assert made.usage.completion_tokens == len("Hello.") + 1
    chunks = list(litellm.completion(**given, stream=True, stream_options={"include_usage": True}))
    assert "".join(x.choices[0].delta.content or "" for x in chunks if x.choices) == "Hello."
    assert litellm.stream_chunk_builder(chunks).usage.completion_tokens == made.usage.completion_tokens


@pytest.mark.parametrize("provider", ["openai", "hosted_vllm", "anthropic"])
def test_tools_of_litellm(litellm: Any, talks: Running, provider: str) -> None:
    how = SAYS if provider == "anthropic" else {"extra_body": SAYS}
    given = lite(talks, provider, messages=said(THINKS), tools=TOOLS[:1], max_tokens=120, **how)
    made = litellm.completion(**given)
    [call] = made.choices[0].message.tool_calls
    assert (call.function.name, call.function.arguments) == ("find", '{"a": 1}')
    assert made.choices[0].message.reasoning_content == "hm" and made.choices[0].finish_reason == "tool_calls"
    chunks = list(litellm.completion(**given, stream=True))
    message = litellm.stream_chunk_builder(chunks).choices[0].message
    assert (message.tool_calls[0].function.name, message.tool_calls[0].function.arguments) == ("find", '{"a": 1}')
    assert message.reasoning_content == "hm" and message.content.strip() == "OK."


def test_completions_and_responses_of_litellm(litellm: Any, talks: Running) -> None:
    given = lite(talks, "text-completion-openai", prompt=WORDS, extra_body=SAYS, max_tokens=20)
    assert litellm.text_completion(**given).choices[0].text == "words"
    given = lite(talks, input="SAY:" + THINKS, tools=[{"type": "function", **FIND}], extra_body=SAYS)
    made = litellm.responses(**given, max_output_tokens=120)
    assert [one.type for one in made.output] == ["reasoning", "message", "function_call"]
    assert made.output[-1].arguments == '{"a": 1}'
    events = list(litellm.responses(**given, max_output_tokens=120, stream=True))
    assert "".join(x.delta for x in events if x.type == "response.output_text.delta") == "OK."
    assert events[-1].type == "response.completed"


def test_structured_output_of_litellm(litellm: Any, talks: Running) -> None:
    pytest.importorskip("llguidance")
    form = {"type": "json_schema", "json_schema": {"name": "it", "schema": SCHEMA, "strict": True}}
    given = lite(
        talks, messages=said('{"a": []}'), response_format=form, extra_body=SAYS, max_tokens=150, temperature=0
    )
    text = litellm.completion(**given).choices[0].message.content
    assert 0 <= json.loads(text)["a"] <= 99


def test_vectors_and_ranks_of_litellm(litellm: Any, talks: Running) -> None:
    want = new_engine(CONTEXT).embed([list(x.encode()) for x in PROMPTS], normalize=True)
    made = litellm.embedding(**lite(talks, input=PROMPTS, encoding_format="float"))
    assert [row["embedding"] for row in made.data] == want.tolist()
    ranked = litellm.rerank(**lite(talks, "hosted_vllm", query="the sea", documents=PROMPTS, top_n=1))
    [best] = ranked.results
    body = {"model": NAME, "query": "the sea", "documents": PROMPTS, "top_n": 1}
    assert best["index"] == talks.send("/v1/rerank", body).json["results"][0]["index"]


def test_errors_of_litellm(litellm: Any, talks: Running) -> None:
    with pytest.raises(litellm.BadRequestError, match="temperature must be"):
        litellm.completion(**lite(talks, messages=said("a"), temperature=1000))
    with pytest.raises(litellm.NotFoundError, match="does not exist"):
        litellm.completion(**lite(talks, messages=said("a")) | {"model": "openai/other"})


# langchain-openai


def chain(talks: Running, **more: Any) -> Any:
    package = pytest.importorskip("langchain_openai")
    given = {"base_url": talks.url, "api_key": "none", "max_retries": 0, "timeout": LIMIT}
    return package.ChatOpenAI(model=NAME, max_tokens=150, extra_body=SAYS, **given, **more)


@pytest.mark.parametrize("responses", [False, True])
def test_chats_of_langchain(talks: Running, responses: bool) -> None:
    model = chain(talks, use_responses_api=responses, temperature=0)
    made = model.invoke("SAY:Hello.")
    assert made.text.strip() == "Hello." and made.usage_metadata["output_tokens"] == len("Hello.") + 1
    chunks = list(model.stream("SAY:Hello."))
    assert "".join(chunk.text for chunk in chunks) == "Hello." and len(chunks) > 3
    assert model.batch(["SAY:one", "SAY:two"])[1].text == "two"


@pytest.mark.parametrize("responses", [False, True])
def test_tools_of_langchain(talks: Running, responses: bool) -> None:
    messages = pytest.importorskip("langchain_core.messages")
    model = chain(talks, use_responses_api=responses).bind_tools(TOOLS[:1])
    first = messages.HumanMessage("SAY:" + THINKS)
    made = model.invoke([first])
    [call] = made.tool_calls
    assert (call["name"], call["args"]) == ("find", {"a": 1})
    result = messages.ToolMessage("found", tool_call_id=call["id"])
    after = model.invoke([first, made, result, messages.HumanMessage("SAY:Done.")])
    assert after.text.strip() == "Done."
    whole = functools.reduce(lambda a, b: a + b, model.stream([first]))
    assert whole.tool_calls[0]["args"] == {"a": 1}


@pytest.mark.parametrize("method", ["json_schema", "function_calling", "json_mode"])
def test_structured_output_of_langchain(talks: Running, method: str) -> None:
    pytest.importorskip("llguidance")
    pydantic = pytest.importorskip("pydantic")
    form = pydantic.create_model("find", a=(int, pydantic.Field(ge=0, le=99)), b=(str | None, None))
    model = chain(talks).with_structured_output(form, method=method)
    made = model.invoke("SAY:" + (CALL if method == "function_calling" else '{"a": 5, "b": null}'))
    assert made == form(a=1 if method == "function_calling" else 5)


def test_completions_and_vectors_of_langchain(talks: Running) -> None:
    package = pytest.importorskip("langchain_openai")
    given: Any = {"base_url": talks.url, "api_key": "none", "max_retries": 0}
    llm = package.OpenAI(model=NAME, max_tokens=20, extra_body=SAYS, **given)
    assert llm.invoke(WORDS) == "words" and "".join(llm.stream(WORDS)) == "words"
    made = package.OpenAIEmbeddings(model=NAME, check_embedding_ctx_length=False, **given).embed_documents(PROMPTS)
    want = new_engine(CONTEXT).embed([list(x.encode()) for x in PROMPTS], normalize=True)
    assert made == want.tolist()


# instructor


@pytest.mark.parametrize("mode", ["TOOLS", "TOOLS_STRICT", "PARALLEL_TOOLS", "JSON", "JSON_SCHEMA", "MD_JSON"])
def test_modes_of_instructor(talks: Running, mode: str) -> None:
    pytest.importorskip("llguidance")
    instructor, openai = pytest.importorskip("instructor"), pytest.importorskip("openai")
    pydantic = pytest.importorskip("pydantic")
    form = pydantic.create_model("find", a=(int, pydantic.Field(ge=0, le=99)))
    text = CALL if "TOOLS" in mode else '```json\n{"a": 1}\n```' if mode == "MD_JSON" else '{"a": 1}'
    with openai.OpenAI(base_url=talks.url, api_key="none", max_retries=0, timeout=LIMIT) as inner:
        client = instructor.from_openai(inner, mode=getattr(instructor.Mode, mode))
        given: Any = {"model": NAME, "max_tokens": 150, "max_retries": 0, "extra_body": SAYS}
        several = mode == "PARALLEL_TOOLS"
        wanted = Iterable[form] if several else form
        made = client.chat.completions.create(response_model=wanted, messages=said(text), **given)
        assert [one.a for one in (made if several else [made])] == [1]


@pytest.mark.parametrize("mode", ["ANTHROPIC_TOOLS", "ANTHROPIC_JSON"])
def test_instructor_by_messages(talks: Running, mode: str) -> None:
    pytest.importorskip("llguidance")
    instructor, anthropic = pytest.importorskip("instructor"), pytest.importorskip("anthropic")
    pydantic = pytest.importorskip("pydantic")
    form = pydantic.create_model("find", a=(int, pydantic.Field(ge=0, le=99)))
    url = talks.url.removesuffix("/v1")
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0, timeout=LIMIT) as inner:
        client = instructor.from_anthropic(inner, mode=getattr(instructor.Mode, mode))
        text = CALL if mode == "ANTHROPIC_TOOLS" else '{"a": 1}'
        given: Any = {"model": NAME, "max_tokens": 150, "max_retries": 0, "extra_body": SAYS}
        assert client.messages.create(response_model=form, messages=said(text), **given).a == 1


# anthropic


def test_a_round_of_tools_by_anthropic(talks: Running) -> None:
    anthropic = pytest.importorskip("anthropic")
    tool = {"name": "find", "description": "Finds.", "input_schema": SCHEMA}
    url = talks.url.removesuffix("/v1")
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0, timeout=LIMIT) as client:
        given: Any = {"model": NAME, "max_tokens": 120, "tools": [tool], "extra_body": SAYS}
        first = client.messages.create(messages=said(THINKS), **given)
        call = first.content[-1]
        result = {"type": "tool_result", "tool_use_id": call.id, "content": "found"}
        more = [{"role": "user", "content": [result, {"type": "text", "text": "SAY:Done."}]}]
        messages = [*said(THINKS), {"role": "assistant", "content": first.content}, *more]
        with client.messages.stream(messages=messages, **given) as stream:
            assert "".join(stream.text_stream) == "Done."
        assert {one.id for one in client.models.list()} >= {NAME}
        forced = client.messages.create(messages=said(CALL), tool_choice={"type": "tool", "name": "find"}, **given)
        assert forced.content[-1].input == {"a": 1}


# openai


def test_helpers_of_openai(talks: Running) -> None:
    """`parse`, `stream` and the routes without a method of their own."""
    pytest.importorskip("llguidance")
    openai, pydantic = pytest.importorskip("openai"), pytest.importorskip("pydantic")
    form = pydantic.create_model("Found", a=(int, pydantic.Field(ge=0, le=99)))
    with openai.OpenAI(base_url=talks.url, api_key="none", max_retries=0, timeout=LIMIT) as client:
        given: Any = {"model": NAME, "extra_body": SAYS}
        made = client.chat.completions.parse(messages=said('{"a": 5}'), response_format=form, **given)
        assert made.choices[0].message.parsed == form(a=5)
        with client.chat.completions.stream(messages=said('{"a": 5}'), response_format=form, **given) as stream:
            assert [one.type for one in stream][-1] == "content.done"
            assert stream.get_final_completion().choices[0].message.parsed == form(a=5)
        tool = openai.pydantic_function_tool(form, name="find")
        made = client.chat.completions.parse(messages=said(CALL), tools=[tool], **given)
        assert made.choices[0].message.tool_calls[0].function.parsed_arguments == form(a=1)
        made = client.responses.parse(input='SAY:{"a": 5}', text_format=form, **given)
        assert made.output_parsed == form(a=5)
        url = talks.url.removesuffix("/v1")
        found = client.post(f"{url}/tokenize", cast_to=object, body={"model": NAME, "messages": said("hi")})
        assert found["count"] == len(tool_text(said("hi")))
        body = {"model": NAME, "query": "the sea", "documents": PROMPTS}
        ranked = client.post("/rerank", cast_to=object, body=body)
        assert sorted(row["index"] for row in ranked["results"]) == [0, 1]
