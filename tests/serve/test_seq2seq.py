"""Covers encoder-decoder models over HTTP: a prompt is the source, and tokens are those of the model alone."""

import concurrent.futures
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

import shardfn as sf
from shardfn.core import tree_map
from shardfn.data import ByteTokenizer
from shardfn.inference import Engine, limits_of, seq2seq_decoder
from shardfn.models import seq2seq
from tests.serve.server import NAME, Running, metric

SIZES: dict[str, Any] = {"vocab_size": 256, "d_model": 16, "num_heads": 4, "num_layers": 2, "d_ff": 20, "max_len": 64}
CONFIG = seq2seq.Config.t5_like(**SIZES, d_head=5, buckets=6, max_distance=5, start=3)
SOURCE = 40  # most tokens of a prompt


@functools.cache
def draw_params() -> Any:
    made = seq2seq.init(CONFIG, sf.key(0))
    return tree_map(lambda x: x * 6 if x.ndim > 1 and x.std() < 0.1 else x, made)


def new_engine() -> Engine:
    decoder = seq2seq_decoder(CONFIG)
    limits = limits_of(decoder, block=4, buckets=(3, 12), running=3, context=20, source=SOURCE)
    return Engine(decoder, draw_params(), limits=limits, eager_steps=10**6, tokenizer=ByteTokenizer())


@pytest.fixture
def server(start: Callable[..., Running]) -> Running:
    return start(engine=new_engine, adapters=())


def ask(server: Running, prompt: Any, **more: Any) -> Any:
    body = {"model": NAME, "prompt": prompt, "max_tokens": 6, "temperature": 0, "ignore_eos": True, "logprobs": 0}
    return server.send("/v1/completions", body | more)


def test_completions_are_those_of_the_model(server: Running) -> None:
    """Prompts beside one another, longer than the decoder's context, twice."""
    prompts = ["a", "summarize: " + "b" * 20, "c d e f", "a" * SOURCE, "xyz"] * 2
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda prompt: ask(server, prompt), prompts))
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.status == 200, answer.data
        source = torch.tensor([list(prompt.encode())])
        want = seq2seq.generate(CONFIG, draw_params(), source, 6, sf.key(0), 0.0)[0].tolist()
        choice = answer.json["choices"][0]
        assert choice["text"] == bytes(want).decode(errors="replace")
        inputs = seq2seq.shift_right(CONFIG, torch.tensor([want]))
        rows = seq2seq.apply(CONFIG, draw_params(), source, inputs)[0].log_softmax(-1)[range(6), want]
        found = torch.tensor(choice["logprobs"]["token_logprobs"])
        torch.testing.assert_close(found, rows, rtol=1e-5, atol=1e-5)
        usage = {"prompt_tokens": len(prompt), "completion_tokens": 6, "total_tokens": len(prompt) + 6}
        assert answer.json["usage"] == usage
    server.wait_idle()
    assert metric(server, "vllm:prompt_tokens_total") == sum(map(len, prompts))


def test_chats_have_the_whole_context(server: Running) -> None:
    chat = {"model": NAME, "messages": [{"role": "user", "content": "hello"}], "temperature": 0, "ignore_eos": True}
    answer = server.send("/v1/chat/completions", chat)
    assert answer.status == 200, answer.data
    assert answer.json["usage"]["completion_tokens"] == 19  # all but the first token
    assert ask(server, [[5, 6], [7]], n=2, stream=True).status == 200


def test_mistakes(server: Running) -> None:
    for prompt, more, param, text in (
        ([97] * (SOURCE + 1), {}, "prompt", f"must have from 1 to {SOURCE} tokens, got {SOURCE + 1}"),
        ("", {}, "prompt", f"must have from 1 to {SOURCE} tokens, got 0"),
        ("a", {"echo": True}, "echo", "is an encoder-decoder model, whose prompt is no part of its text"),
        ("a", {"max_tokens": 20}, "prompt", "together in the context of 20 tokens"),
    ):
        answer = ask(server, prompt, **more)
        assert (answer.status, answer.error["param"]) == (400, param), answer.data
        assert text in answer.error["message"]
    answer = server.send("/v1/score", {"model": NAME, "text_1": "a", "choices": ["b", "c"]})
    assert (answer.status, answer.error["param"]) == (400, "choices"), answer.data
    assert ask(server, "a").status == 200
