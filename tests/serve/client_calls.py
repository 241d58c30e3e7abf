"""Calls of a server by packages that its users have, as a program of the environment that has them.

python client_calls.py CLIENT http://127.0.0.1:PORT MODEL   prints the results as JSON
"""

import json
import sys
from collections.abc import Callable
from typing import Any, Literal

from pydantic import BaseModel

TEXT = "Fine, **thanks**."
SAY = {"logits_processors": ["say"]}
TALK: list[Any] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": f"SAY:{TEXT}"}]
CALL = 'SAY:<tool_call>{"name": "find", "arguments": {"place": "here"}}</tool_call>'
ASK: list[Any] = [{"role": "user", "content": CALL}]
SCHEMA = {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]}
FIND = {"name": "find", "description": "Finds a place.", "parameters": SCHEMA}
TOOLS: list[Any] = [{"type": "function", "function": FIND}]
INPUTS = ["one", "two words"]


class Answer(BaseModel):
    """An answer."""

    kind: Literal["x", "yz"]
    sure: bool


def by_openai(url: str, model: str) -> dict[str, Any]:
    from openai import OpenAI

    client = OpenAI(base_url=f"{url}/v1", api_key="key", max_retries=0)
    how: dict[str, Any] = {"model": model, "max_tokens": 200, "temperature": 0}
    chat = client.chat.completions.create(messages=TALK, extra_body=SAY, **how)
    stream = client.chat.completions.create(messages=TALK, extra_body=SAY, stream=True, **how)
    pieces = "".join(x.choices[0].delta.content or "" for x in stream if x.choices)
    called = client.chat.completions.create(messages=ASK, tools=TOOLS, extra_body=SAY, **how).choices[0].message
    parsed = client.chat.completions.parse(messages=TALK, response_format=Answer, **how).choices[0].message.parsed
    answer = client.responses.create(model=model, input=f"SAY:{TEXT}", extra_body=SAY, max_output_tokens=200)
    with client.responses.stream(model=model, input=f"SAY:{TEXT}", extra_body=SAY, max_output_tokens=200) as events:
        streamed = "".join(x.delta for x in events if x.type == "response.output_text.delta")
        assert events.get_final_response().output_text == streamed
    rows = client.embeddings.create(model=model, input=INPUTS, dimensions=16).data
    assert answer.output_text == streamed == TEXT and called.tool_calls and parsed
    return {
        **{"chat": chat.choices[0].message.content, "stream": pieces, "structured": parsed.model_dump()},
        "tools": [[x.function.name, json.loads(x.function.arguments)] for x in called.tool_calls],
        "embeddings": [row.embedding for row in rows],
    }


def by_anthropic(url: str, model: str) -> dict[str, Any]:
    from anthropic import Anthropic

    client = Anthropic(base_url=url, api_key="key", max_retries=0)
    how: dict[str, Any] = {"model": model, "max_tokens": 200}
    talk, tools = [TALK[1]], [{"name": "find", "description": "Finds a place.", "input_schema": SCHEMA}]
    chat = client.messages.create(system="Be brief.", messages=talk, extra_body=SAY, **how)
    with client.messages.stream(system="Be brief.", messages=talk, extra_body=SAY, **how) as stream:
        pieces = "".join(stream.text_stream)
    called = client.messages.create(messages=ASK, tools=tools, extra_body=SAY, **how)
    form = {"name": "answer", "input_schema": Answer.model_json_schema()}
    choice = {"type": "tool", "name": "answer"}
    forced = client.messages.create(messages=ASK, tools=[form], tool_choice=choice, **how)
    assert called.stop_reason == "tool_use" and client.messages.count_tokens(model=model, messages=talk).input_tokens
    return {
        **{"chat": chat.content[0].text, "stream": pieces, "structured": dict(forced.content[0].input)},
        "tools": [[x.name, x.input] for x in called.content if x.type == "tool_use"],
    }


def by_langchain(url: str, model: str) -> dict[str, Any]:
    from langchain_core.messages import ToolMessage
    from langchain_openai import ChatOpenAI, OpenAIEmbeddings

    how: dict[str, Any] = {"model": model, "base_url": f"{url}/v1", "api_key": "key", "max_retries": 0}
    plain = ChatOpenAI(**how, temperature=0, max_tokens=200)
    client = ChatOpenAI(**how, temperature=0, max_tokens=200, extra_body=SAY)
    called = client.bind_tools(TOOLS).invoke(ASK)
    back = [*ASK, called, ToolMessage("found", tool_call_id=called.tool_calls[0]["id"]), TALK[1]]
    assert client.bind_tools(TOOLS).invoke(back).content == TEXT
    table = OpenAIEmbeddings(**how, check_embedding_ctx_length=False, dimensions=16)
    return {
        "chat": client.invoke(TALK).content,
        "stream": "".join(str(x.content) for x in client.stream(TALK)),
        "tools": [[x["name"], x["args"]] for x in called.tool_calls],
        "structured": plain.with_structured_output(Answer, method="json_schema").invoke(TALK).model_dump(),
        "embeddings": table.embed_documents(INPUTS),
    }


def by_litellm(url: str, model: str) -> dict[str, Any]:
    import litellm

    litellm.telemetry = False
    how: dict[str, Any] = {"model": f"openai/{model}", "api_base": f"{url}/v1", "api_key": "key", "num_retries": 0}
    more: dict[str, Any] = {"max_tokens": 200, "temperature": 0}
    chat = litellm.completion(messages=TALK, extra_body=SAY, **how, **more)
    stream = litellm.completion(messages=TALK, extra_body=SAY, stream=True, **how, **more)
    pieces = "".join(x.choices[0].delta.content or "" for x in stream)
    called = litellm.completion(messages=ASK, tools=TOOLS, extra_body=SAY, **how, **more).choices[0].message
    formed = litellm.completion(messages=TALK, response_format=Answer, **how, **more).choices[0].message.content
    rows = litellm.embedding(input=INPUTS, dimensions=16, encoding_format="float", **how).data
    other = {"model": f"anthropic/{model}", "api_base": url, "api_key": "key"}
    there = litellm.completion(messages=TALK, extra_body=SAY, **other, **more).choices[0].message.content
    assert there == TEXT, there
    return {
        **{"chat": chat.choices[0].message.content, "stream": pieces, "structured": json.loads(formed)},
        "tools": [[x.function.name, json.loads(x.function.arguments)] for x in called.tool_calls],
        "embeddings": [row["embedding"] for row in rows],
    }


def by_instructor(url: str, model: str) -> dict[str, Any]:
    import instructor
    from openai import OpenAI

    made = list[Any]()
    for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
        inner = OpenAI(base_url=f"{url}/v1", api_key="key", max_retries=0)
        client = instructor.from_openai(inner, mode=mode)
        how: dict[str, Any] = {"model": model, "messages": TALK, "max_retries": 0, "max_tokens": 200}
        made.append(client.chat.completions.create(response_model=Answer, temperature=0, **how).model_dump())
    assert all(Answer(**one) for one in made)
    return {"structured": made[0]}


CLIENTS: dict[str, Callable[[str, str], dict[str, Any]]] = {
    "openai": by_openai,
    "anthropic": by_anthropic,
    "langchain-openai": by_langchain,
    "litellm": by_litellm,
    "instructor": by_instructor,
}

if __name__ == "__main__":
    print(json.dumps(CLIENTS[sys.argv[1]](*sys.argv[2:])))
