"""Covers prompts given by their embeddings: they have the bits of the same tokens, in any chunks and company."""

from typing import Any

import pytest
import torch

from shardfn.core import key
from shardfn.inference import Engine, Sampling, decoder, hf_decoder, limits_of
from shardfn.models import gpt

CONFIG = gpt.Config.llama_like(
    vocab_size=64, num_layers=2, d_model=32, num_heads=2, d_ff=None, max_len=48, batch_invariant=True
)
GREEDY, PROMPT = Sampling(max_tokens=6, temperature=0.0), [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]


def make_engine(config: gpt.Config = CONFIG, **more: Any) -> Engine:
    made = decoder(config)
    limits = limits_of(made, running=3, block=4, buckets=(4, 8), cache_bytes=1 << 20)
    return Engine(made, gpt.init(config, key(0)), limits=limits, eager_steps=10_000, **more)


def embed(prompt: list[int], config: gpt.Config = CONFIG) -> torch.Tensor:
    return gpt.init(config, key(0))["embed"][prompt]


@pytest.mark.parametrize("config", [CONFIG, gpt.Config(64, 1, 32, 2, max_len=48, batch_invariant=True)])
def test_embeddings_have_the_bits_of_their_tokens(config: gpt.Config) -> None:
    engine = make_engine(config)
    want = engine.generate([PROMPT, [7, 8], PROMPT], GREEDY)
    found = make_engine(config).generate([embed(PROMPT, config), [7, 8], PROMPT], GREEDY)
    assert found == want  # tokens and log probabilities, in chunks of 8 rows, beside tokens
    assert engine.generate([embed([7, 8], config)], GREEDY) == want[1:2]


def test_equal_embeddings_share_blocks() -> None:
    engine, other = make_engine(), torch.randn(11, 32)
    hits = list[int]()
    want = make_engine().generate([other], GREEDY)
    for x in (embed(PROMPT), PROMPT, embed(PROMPT), other, embed([*PROMPT[:9], 1])):
        found = engine.generate([x], GREEDY)
        hits.append(engine.stats.cache.hits)
        assert x is not other or found == want
    assert hits == [0, 0, 8, 8, 16]


def test_a_stream_and_an_embedding_of_embeddings() -> None:
    engine = make_engine()
    want = engine.generate([PROMPT], GREEDY)[0].tokens
    assert [x.token for x in engine.stream(embed(PROMPT), GREEDY)] == want
    assert torch.equal(engine.embed([embed(PROMPT)]), engine.embed([PROMPT]))


@pytest.mark.parametrize("kind", ["llama", "gpt2", pytest.param("opt", marks=pytest.mark.nightly), "gemma2"])
def test_embeddings_of_models_of_transformers(kind: str) -> None:
    pytest.importorskip("transformers")
    from tests.inference.hf_models import MODELS

    model = MODELS[kind]()
    made, params = hf_decoder(model)
    limits = limits_of(made, running=3, block=4, buckets=(4, 8), cache_bytes=1 << 20)
    engine, prompt = Engine(made, params, limits=limits, eager_steps=10_000), [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]
    table = model.get_input_embeddings()
    with torch.no_grad():
        given = table(torch.tensor(prompt))
        [want] = engine.generate([prompt], GREEDY)
        [found] = engine.generate([given], GREEDY)
        logits = model(inputs_embeds=given[None]).logits[0, -1].log_softmax(-1)
    assert found == want
    assert found.logprobs[0] == pytest.approx(float(logits[found.tokens[0]]), abs=1e-4)


def test_mistakes() -> None:
    engine = make_engine()
    for given, words in (
        (torch.zeros(3, 8), r"prompt_embeds must have shape \[P, 32\], a row for each token, got \[3, 8\]"),
        (torch.zeros(0, 32), r"got \[0, 32\]"),
        (torch.zeros(32), r"got \[32\]"),
        (torch.full((2, 32), torch.nan), "must be finite numbers"),
        (torch.zeros(49, 32), "prompt must have from 1 to 47 tokens, got 49"),
    ):
        with pytest.raises(ValueError, match=words):
            engine.add(given)
    with pytest.raises(ValueError, match=r"repetition_penalty must be 1\.0 for a prompt of embeddings, got 2\.0"):
        engine.add(embed(PROMPT), Sampling(repetition_penalty=2.0))
    with pytest.raises(ValueError, match="prompt_logprobs must be False for a prompt of embeddings"):
        engine.add(embed(PROMPT), Sampling(prompt_logprobs=True))
