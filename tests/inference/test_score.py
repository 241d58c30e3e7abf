"""Covers scores of given continuations, with the bits of each by itself, and requests without draws."""

import random
from typing import Any

import pytest
import torch

from shardfn import core
from shardfn.inference import Engine, Sampling, decoder, limits_of
from shardfn.models import gpt

CONFIG = gpt.Config.llama_like(
    vocab_size=64, num_layers=1, d_model=32, num_heads=2, d_ff=None, max_len=64, batch_invariant=True
)


@pytest.fixture(scope="module")
def engine() -> Engine:
    made = decoder(CONFIG)
    limits = limits_of(made, running=3, buckets=(1, 8), cache_bytes=1 << 20)
    return Engine(made, gpt.init(CONFIG, core.key(0)), limits=limits)


def test_scores_are_those_of_each_alone(engine: Engine) -> None:
    draw = random.Random(0)
    prompts = [[draw.randrange(64) for _ in range(n)] for n in (1, 5, 40)]
    choices = [[[draw.randrange(64) for _ in range(n)] for n in (1, 9, 17)] for _ in prompts]
    hits = engine.stats.cache.hits
    found = engine.score(prompts, choices)
    assert engine.stats.cache.hits > hits  # the long prompt is computed once
    params = gpt.init(CONFIG, core.key(0))
    for prompt, several, scores in zip(prompts, choices, found, strict=True):
        for choice, score in zip(several, scores, strict=True):
            how = Sampling(max_tokens=1, prompt_logprobs=True)
            [whole] = engine.generate([prompt + choice], how)
            alone = torch.tensor(whole.prompt_logprobs[len(prompt) - 1 :], dtype=torch.float64)
            assert torch.equal(torch.tensor(score.logprobs, dtype=torch.float64), alone)
            assert engine.score([prompt], [[choice]]) == [[score]]
            logits = gpt.apply(CONFIG, params, torch.tensor([prompt + choice]))[0, len(prompt) - 1 : -1]
            assert score.is_greedy == (logits.argmax(-1).tolist() == choice)
            plain = logits.double().log_softmax(-1)[torch.arange(len(choice)), torch.tensor(choice)].sum().item()
            assert score.logprob == pytest.approx(plain, rel=1e-5)


def test_the_greedy_continuation_is_greedy(engine: Engine) -> None:
    prompt = [3, 1, 4, 1, 5]
    [made] = engine.generate([prompt], Sampling(max_tokens=6, temperature=0.0))
    other = [*made.tokens[:-1], (made.tokens[-1] + 1) % 64]
    [[same, changed]] = engine.score([prompt], [[made.tokens, other]])
    assert same.is_greedy and not changed.is_greedy
    assert list(same.logprobs) == made.logprobs and same.logprobs[:-1] == changed.logprobs[:-1]


def test_a_request_without_draws(engine: Engine) -> None:
    [made] = engine.generate([[1, 2, 3]], Sampling(max_tokens=0, prompt_logprobs=True))
    assert (made.tokens, made.finish_reason, len(made.prompt_logprobs)) == ([], "length", 2)
    [both] = engine.generate([[1, 2, 3]], Sampling(max_tokens=0, n=2))
    assert [one.finish_reason for one in both] == ["length"] * 2
    [made] = engine.generate([[1] * 64], Sampling(max_tokens=0))  # the whole context
    assert made.finish_reason == "length"
    [made] = engine.generate([[1, 2, 3]], Sampling(max_tokens=0, prompt_logprobs=True, prompt_logprobs_start=2))
    assert len(made.prompt_logprobs) == 1


@pytest.mark.parametrize(
    ("prompts", "choices", "words"),
    [
        ([[1]], [], "got 1 prompts and 0 lists of choices"),
        ([[]], [[[1]]], "prompt 0 has no tokens"),
        ([[1], [2]], [[[1]], [[1], []]], "at least one token, but choice 1 of prompt 1 is empty"),
        ([[1]], [[[64]]], "must be an integer from 0 to 63, got 64"),
        ([[1]], [[[1] * 65]], "prompt must have from 1 to 65 tokens, got 66"),
    ],
    ids=lambda x: str(x)[:20],
)
def test_wrong_choices(engine: Engine, prompts: Any, choices: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        engine.score(prompts, choices)
    assert engine.idle
