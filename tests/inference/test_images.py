"""Covers images in an engine: equal tokens on every path of the cache, prefixes of images, and wrong features."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from shardfn import core
from shardfn.inference import Engine, Limits, Ngram, Sampling, decoder, limits_of
from shardfn.models import gpt

IMAGE, D = 2, 24
CONFIG = gpt.Config(
    vocab_size=13,
    num_layers=2,
    d_model=D,
    num_heads=4,
    num_kv_heads=2,
    max_len=40,
    norm="rms",
    position="rope",
    bias=False,
    batch_invariant=True,
    images=gpt.Images(IMAGE),
)
LIMITS = Limits(vocab=13, context=40, blocks=40, block=4, buckets=(3, 12), running=4)
PROMPTS = [[1, 2, 2, 2, 3, 4, 2, 2, 5], [1, 3, 4], [2, 2, 7], [1, 2, 2, 2, 3, 4, 2, 2, 5, 6, 6]]
GREEDY = Sampling(max_tokens=8, temperature=0.0)


def make_params(config: gpt.Config = CONFIG) -> Any:
    return core.tree_map(lambda x: x * 8, gpt.init(config, core.key(0)))


def draw_features() -> list[Tensor | None]:
    draw = torch.Generator().manual_seed(0)
    return [torch.randn(p.count(IMAGE), D, generator=draw) if IMAGE in p else None for p in PROMPTS]


def make_engine(config: gpt.Config = CONFIG, **how: Any) -> Engine:
    return Engine(decoder(config), make_params(config), **{"limits": LIMITS, "eager_steps": 100, **how})


@pytest.mark.parametrize("rule", ["separate", "code", "causal"])
def test_an_engine_continues_as_whole_forwards_do(rule: Any) -> None:
    """Chunks, a cache and company change no token, also of a plain model."""
    for exact in (True, False):
        config = dataclasses.replace(CONFIG, images=gpt.Images(IMAGE, rule), batch_invariant=exact)
        params, features = make_params(config), draw_features()
        for prompt, seen, found in zip(
            PROMPTS, features, make_engine(config).generate(PROMPTS, GREEDY, image_features=features), strict=True
        ):
            tokens = torch.tensor([[*prompt, *found.tokens]])
            logits = gpt.apply(config, params, tokens, image_features=seen)[0, len(prompt) - 1 : -1]
            assert logits.argmax(-1).tolist() == found.tokens
            want = logits.log_softmax(-1).gather(1, tokens[0, len(prompt) :, None])[:, 0]
            torch.testing.assert_close(torch.tensor(found.logprobs), want, rtol=1e-5, atol=1e-5)
            assert IMAGE not in found.tokens


def test_drafts_and_a_cache_on_the_host_change_nothing() -> None:
    features = draw_features()
    want = make_engine().generate(PROMPTS, GREEDY, image_features=features)
    assert make_engine(cache="host").generate(PROMPTS, GREEDY, image_features=features) == want
    limits = dataclasses.replace(LIMITS, drafts=4, buckets=(12,))
    drafting = make_engine(limits=limits, drafter=Ngram())
    for _ in range(2):
        found = drafting.generate(PROMPTS, GREEDY, image_features=features)
        assert [x.tokens for x in found] == [x.tokens for x in want]
        assert [x.logprobs for x in found] == [x.logprobs for x in want]


def test_requests_share_a_prefix_only_with_the_same_images() -> None:
    engine, prompt = make_engine(), PROMPTS[3]
    one, other = torch.randn(5, D), torch.randn(5, D)
    alone = [make_engine().generate([prompt], GREEDY, image_features=[x]) for x in (one, other)]
    assert alone[0] != alone[1]
    hits = []
    for seen, want in ((one, alone[0]), (other, alone[1]), (one, alone[0])):
        assert engine.generate([prompt], GREEDY, image_features=[seen]) == want
        hits.append(engine.stats.cache.hits)
    assert hits == [0, 0, 8]  # two full blocks of the prompt's 11 tokens


def test_a_stream_of_a_request_with_images() -> None:
    engine, features = make_engine(), draw_features()
    want = engine.generate(PROMPTS[:1], GREEDY, image_features=features[:1])[0].tokens
    found = [x.token for x in engine.stream(PROMPTS[0], GREEDY, image_features=features[0])]
    assert found == want


def test_mistakes() -> None:
    engine = make_engine()
    with pytest.raises(ValueError, match=r"shape \(5, 24\), a row for each of 5 image tokens .* got \(0, 24\)"):
        engine.add(PROMPTS[0])
    with pytest.raises(ValueError, match=r"a row for each of 0 image tokens .* got \(3, 24\)"):
        engine.add([1, 3], image_features=torch.zeros(3, D))
    with pytest.raises(ValueError, match=r"must have shape \(2, 24\).* got \(2, 8\)"):
        engine.add([2, 2], image_features=torch.zeros(2, 8))
    with pytest.raises(ValueError, match="must be finite"):
        engine.add([2, 2], image_features=torch.full((2, D), torch.inf))
    with pytest.raises(TypeError, match="must be a tensor, got a list"):
        engine.add([2, 2], image_features=[[0.0] * D] * 2)
    with pytest.raises(ValueError, match="an entry for each of 2 prompts, got 1"):
        engine.generate([[1], [3]], image_features=[None])
    plain = make_engine(dataclasses.replace(CONFIG, images=None))
    with pytest.raises(ValueError, match="need a model with images"):
        plain.add([2, 2], image_features=torch.zeros(2, D))
    assert limits_of(decoder(CONFIG)).context == 40
