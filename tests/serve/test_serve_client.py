"""Covers the routes by OpenAI's own client: completions, chat, streams, usage, choices, seeds, log probabilities."""

import base64
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from shardfn.inference import Sampling
from tests.serve.server import ADAPTERS, CONTEXT, LIMIT, NAME, Running, chat_text, metric, new_engine

openai = pytest.importorskip("openai")


@pytest.fixture(scope="module")
def client(server: Running) -> Iterator[Any]:
    with openai.OpenAI(base_url=server.url, api_key="none", max_retries=0, timeout=LIMIT) as made:
        yield made


def alone(prompt: str, **sampling: Any) -> Any:
    """The completion by an engine without a server."""
    return new_engine().generate([list(prompt.encode())], Sampling(stop_tokens=(0,), **sampling))[0]


def test_a_completion_is_that_of_the_engine(client: Any) -> None:
    made = client.completions.create(model=NAME, prompt="abc", max_tokens=12, temperature=0, logprobs=0)
    want = alone("abc", max_tokens=12, temperature=0.0)
    assert made.choices[0].text == want.text and made.choices[0].finish_reason == want.finish_reason
    assert made.choices[0].logprobs.token_logprobs == want.logprobs
    assert made.usage.to_dict() == {"prompt_tokens": 3, "completion_tokens": len(want.tokens), "total_tokens": 15}
    assert (made.object, made.model) == ("text_completion", NAME) and made.id.startswith("cmpl-")


def test_seeds_and_choices(client: Any) -> None:
    made = client.completions.create(model=NAME, prompt=["ab", "cd"], n=2, seed=5, max_tokens=6)
    want = [
        new_engine().generate([list(p)], Sampling(n=2, seed=5, max_tokens=6, stop_tokens=(0,)))[0]
        for p in (b"ab", b"cd")
    ]
    assert [c.index for c in made.choices] == [0, 1, 2, 3]
    assert [c.text for c in made.choices] == [c.text for pair in want for c in pair]
    assert made.usage.completion_tokens == sum(len(c.tokens) for pair in want for c in pair)


@pytest.mark.parametrize(
    ("fields", "options"),
    [
        ({"min_tokens": 5, "stop_token_ids": [*range(128)]}, {"min_tokens": 5, "stop_tokens": (*range(128),)}),
        ({"bad_words": ["a", "bc"]}, {"bad_words": ("a", "bc")}),
        ({"allowed_token_ids": [97, 98, 99]}, {"allowed_token_ids": (97, 98, 99)}),
        ({"logits_processors": ["even"]}, {"logits_processors": ("even",)}),
    ],
    ids=str,
)
def test_options_of_vllm(client: Any, fields: dict[str, Any], options: dict[str, Any]) -> None:
    made = client.completions.create(model=NAME, prompt="abc", max_tokens=12, seed=4, logprobs=0, extra_body=fields)
    how: dict[str, Any] = {"stop_tokens": (0,), "max_tokens": 12, "seed": 4, **options}
    [want] = new_engine().generate([list(b"abc")], Sampling(**how))
    assert made.choices[0].text == want.text and made.choices[0].logprobs.token_logprobs == want.logprobs
    assert want != alone("abc", max_tokens=12, seed=4)


def test_prompts_of_ids(client: Any) -> None:
    texts = [
        client.completions.create(model=NAME, prompt=prompt, max_tokens=5, temperature=0).choices[0].text
        for prompt in ("abc", [97, 98, 99], [[97, 98, 99]], ["abc"])
    ]
    assert len(set(texts)) == 1


def test_requests_without_a_seed_differ(client: Any) -> None:
    made = client.completions.create(model=NAME, prompt=["ab"] * 3, max_tokens=16)
    assert len({choice.text for choice in made.choices}) > 1


def test_a_chat_is_a_completion_of_its_template(client: Any) -> None:
    messages = [{"role": "system", "content": "be"}, {"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    made = client.chat.completions.create(model=NAME, messages=messages, max_tokens=8, temperature=0, logprobs=True)
    prompt = chat_text([{"role": "system", "content": "be"}, {"role": "user", "content": "hi"}])
    want = alone(prompt, max_tokens=8, temperature=0.0)
    assert made.choices[0].message.content == want.text and made.choices[0].message.role == "assistant"
    assert [row.logprob for row in made.choices[0].logprobs.content] == want.logprobs
    assert made.usage.prompt_tokens == len(prompt) and made.object == "chat.completion"


def test_a_chat_goes_on_to_the_end_of_the_context(client: Any) -> None:
    messages = [{"role": "user", "content": "x" * 450}]
    made = client.chat.completions.create(model=NAME, messages=messages, extra_body={"ignore_eos": True})
    assert made.usage.total_tokens == CONTEXT and made.choices[0].finish_reason == "length"


@pytest.mark.parametrize("n", [1, 3])
def test_a_stream_is_the_whole_in_pieces(client: Any, n: int) -> None:
    given = {"model": NAME, "prompt": "stream", "max_tokens": 20, "seed": 3, "n": n}
    whole = client.completions.create(**given)
    texts, ends, usage = [""] * n, [None] * n, []
    for chunk in client.completions.create(**given, stream=True, stream_options={"include_usage": True}):
        usage.append(chunk.usage)
        for choice in chunk.choices:
            assert ends[choice.index] is None
            texts[choice.index] += choice.text
            ends[choice.index] = choice.finish_reason
    assert texts == [choice.text for choice in whole.choices]
    assert ends == [choice.finish_reason for choice in whole.choices]
    assert usage[-1] == whole.usage and not any(usage[:-1]) and len(usage) > n


def test_a_streamed_chat(client: Any) -> None:
    given = {"model": NAME, "messages": [{"role": "user", "content": "hi"}], "max_completion_tokens": 9, "seed": 1}
    whole = client.chat.completions.create(**given)
    chunks = list(client.chat.completions.create(**given, stream=True, logprobs=True))
    assert chunks[0].choices[0].delta.role == "assistant" and chunks[0].object == "chat.completion.chunk"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == whole.choices[0].message.content
    assert [c.choices[0].finish_reason for c in chunks][-1] == whole.choices[0].finish_reason
    found = [chunk.choices[0].logprobs for chunk in chunks]
    rows = [row for one in found if one is not None for row in one.content]
    assert bytes(byte for row in rows for byte in row.bytes).decode(errors="replace").startswith(text)
    assert len(rows) == whole.usage.completion_tokens
    assert all(chunk.usage is None for chunk in chunks) and len({chunk.id for chunk in chunks}) == 1


@pytest.mark.day("True")
@pytest.mark.parametrize("stream", [False, True])
def test_top_log_probabilities_of_completions(client: Any, stream: bool) -> None:
    given = {"model": NAME, "prompt": ["abc", "d"], "max_tokens": 20, "seed": 4, "logprobs": 3, "n": 2}
    made = client.completions.create(**given, stream=stream, extra_body={"ignore_eos": True})
    texts, rows = [""] * 4, [list[Any]() for _ in range(4)]
    for choice in [c for chunk in made for c in chunk.choices] if stream else made.choices:
        texts[choice.index] += choice.text
        if (found := choice.logprobs) is not None:
            parts = found.tokens, found.token_logprobs, found.top_logprobs, found.text_offset
            rows[choice.index] += zip(*parts, strict=True)
    how = Sampling(max_tokens=20, seed=4, n=2, top_logprobs=3)
    want = [one for both in new_engine().generate([list(b"abc"), list(b"d")], how) for one in both]
    for text, row, one in zip(texts, rows, want, strict=True):
        assert (text, [r[1] for r in row]) == (one.text, one.logprobs)
        for i, (token, logprob, top, offset) in enumerate(row):
            pairs = [*one.top_logprobs[i], (one.tokens[i], logprob)]
            assert list(top.items()) == list(dict((named(t), x) for t, x in pairs).items())
            assert token == named(one.tokens[i]) and top[token] == logprob
            if not token.startswith("bytes:"):
                assert text[offset:].startswith(token)


def named(token: int) -> str:
    """A token of bytes, as OpenAI writes it."""
    return chr(token) if token < 128 else f"bytes:\\x{token:02x}"


@pytest.mark.parametrize("stream", [False, True])
def test_top_log_probabilities_of_chats(client: Any, stream: bool) -> None:
    given = {"model": NAME, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 8, "temperature": 0}
    made = client.chat.completions.create(**given, logprobs=True, top_logprobs=20, stream=stream)
    choices = [c for chunk in made for c in chunk.choices] if stream else made.choices
    rows = [row for choice in choices if choice.logprobs is not None for row in choice.logprobs.content]
    want = alone(chat_text(given["messages"]), max_tokens=8, temperature=0.0, top_logprobs=20)
    assert [row.logprob for row in rows] == want.logprobs
    for row, top in zip(rows, want.top_logprobs, strict=True):
        assert [(x.bytes, x.logprob) for x in row.top_logprobs] == [([token], logprob) for token, logprob in top]
        assert (row.top_logprobs[0].token, row.top_logprobs[0].logprob) == (row.token, row.logprob)
        assert set(row.to_dict()) == {"token", "logprob", "bytes", "top_logprobs"}
        assert set(row.top_logprobs[0].to_dict()) == {"token", "logprob", "bytes"}


def test_biases_of_tokens(client: Any) -> None:
    given = {"model": NAME, "max_tokens": 5, "temperature": 0}
    made = client.completions.create(prompt="abc", logit_bias={"65": 100, "66": 99.5}, **given)
    assert made.choices[0].text == "AAAAA"
    made = client.chat.completions.create(messages=[{"role": "user", "content": "a"}], logit_bias={"66": 100}, **given)
    assert made.choices[0].message.content == "BBBBB"


def test_tokens_that_end(client: Any) -> None:
    given = {"model": NAME, "prompt": "abc", "max_tokens": 30, "seed": 7}
    free = client.completions.create(**given, extra_body={"ignore_eos": True})
    assert free.usage.completion_tokens == 30
    tokens = alone("abc", max_tokens=30, seed=7).tokens
    made = client.completions.create(**given, extra_body={"stop_token_ids": [tokens[4]]})
    first = tokens.index(tokens[4])
    assert made.choices[0].finish_reason == "stop" and made.usage.completion_tokens == first + 1


def test_the_model_is_listed(client: Any) -> None:
    assert [model.id for model in client.models.list()] == [NAME, *ADAPTERS]
    assert client.models.retrieve(NAME).max_model_len == CONTEXT
    assert "parent" not in client.models.retrieve(NAME).to_dict()
    for name in ADAPTERS:
        assert client.models.retrieve(name).parent == NAME
    with pytest.raises(openai.NotFoundError, match="model 'other' does not exist; this server has 'tiny', 'tuned'"):
        client.models.retrieve("other")


def test_a_model_that_is_an_adapter(client: Any) -> None:
    given = {"prompt": "abc", "max_tokens": 12, "temperature": 0, "logprobs": 0}
    texts = set()
    for name in (NAME, *ADAPTERS):
        how = Sampling(max_tokens=12, temperature=0.0, stop_tokens=(0,))
        [want] = new_engine().generate([list(b"abc")], how, adapter=None if name == NAME else name)
        made = client.completions.create(model=name, **given)
        assert (made.model, made.choices[0].text) == (name, want.text)
        assert made.choices[0].logprobs.token_logprobs == want.logprobs
        texts.add(want.text)
    assert len(texts) == 3
    with pytest.raises(openai.NotFoundError, match="this server has 'tiny', 'tuned', 'other/one'"):
        client.completions.create(model="unknown", **given)
    messages = [{"role": "user", "content": "hi"}]
    made = client.chat.completions.create(model="tuned", messages=messages, max_tokens=2, stream=True)
    assert {chunk.model for chunk in made} == {"tuned"}


INPUTS: list[Any] = ["abc", [97, 98, 99], ["abc"], [[97, 98, 99]], ["a longer text", "abc"]]


@pytest.mark.parametrize("kind", ["float", "base64"])
def test_embeddings(client: Any, kind: str) -> None:
    want = new_engine().embed([list(b"abc")], normalize=True)[0]
    for given in INPUTS:
        made = client.embeddings.create(model=NAME, input=given, encoding_format=kind, dimensions=32)
        last = made.data[-1]
        vector = base64.b64decode(last.embedding) if kind == "base64" else last.embedding
        found = torch.frombuffer(bytearray(vector), dtype=torch.float32) if kind == "base64" else torch.tensor(vector)
        assert torch.equal(found, want)  # with the bits of the input alone
        num = 3 + 13 * (len(made.data) - 1)
        assert made.usage.to_dict() == {"prompt_tokens": num, "total_tokens": num}
        assert [row.index for row in made.data] == list(range(len(made.data))) and last.object == "embedding"


@pytest.mark.nightly
def test_embeddings_beside_completions_and_adapters(server: Running, client: Any) -> None:
    stream = client.completions.create(model=NAME, prompt="ab", max_tokens=60, stream=True)
    next(stream)
    made = client.embeddings.create(model="tuned", input=["abc", "x" * 40])  # the client's own choice is base64
    stream.close()
    want = new_engine().embed([list(b"abc"), list(b"x" * 40)], normalize=True, adapter="tuned")
    assert torch.equal(torch.tensor([row.embedding for row in made.data]), want) and made.model == "tuned"
    server.wait_idle()
    assert not server.engine.embeddings._pooled


def test_the_mean_of_states(start: Any) -> None:
    server = start(pooling="mean")
    with openai.OpenAI(base_url=server.url, api_key="none", max_retries=0, timeout=LIMIT) as one:
        made = one.embeddings.create(model=NAME, input="abcdef")
    want = new_engine().embed([list(b"abcdef")], "mean", normalize=True)[0]
    assert torch.equal(torch.tensor(made.data[0].embedding), want)
    assert metric(server, "vllm:generation_tokens_total") == 0


def test_many_at_once_are_not_mixed(server: Running) -> None:
    import asyncio

    async def all_of_them() -> list[Any]:
        async with openai.AsyncOpenAI(base_url=server.url, api_key="none", max_retries=0, timeout=LIMIT) as one:

            async def ask(i: int) -> str:
                given: Any = {"model": NAME, "prompt": f"number {i}", "max_tokens": 12, "temperature": 0}
                if i % 2:
                    return (await one.completions.create(**given)).choices[0].text
                return "".join([c.choices[0].text async for c in await one.completions.create(**given, stream=True)])

            return await asyncio.gather(*(ask(i) for i in range(24)))

    want = new_engine().generate(
        [list(f"number {i}".encode()) for i in range(24)], Sampling(max_tokens=12, temperature=0.0, stop_tokens=(0,))
    )
    assert asyncio.run(all_of_them()) == [one.text for one in want]


def test_metrics_count(server: Running, client: Any) -> None:
    parts = ("queue", "prefill", "decode", "inference")
    names = ("vllm:prompt_tokens_total", "vllm:generation_tokens_total", "vllm:e2e_request_latency_seconds_count")
    names += tuple(f"vllm:request_{part}_time_seconds_count" for part in parts)
    before = [metric(server, name) for name in names]
    made = client.completions.create(model=NAME, prompt="abcd", max_tokens=7, temperature=0)
    after = [metric(server, name) for name in names]
    assert [b - a for a, b in zip(before, after, strict=True)] == [4, made.usage.completion_tokens, 1, 1, 1, 1, 1]
