"""Covers beam search: the continuations and scores of transformers' `generate(num_beams=)`, with shared blocks."""

from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

from shardfn.core import key  # noqa: E402
from shardfn.inference import BeamSearch, Engine, decoder, hf_decoder, limits_of  # noqa: E402
from shardfn.models import gpt  # noqa: E402
from tests.inference.hf_models import MODELS, VOCAB  # noqa: E402

PROMPTS = [[3, 1, 4], [1, 5, 9, 2, 6, 5, 3, 5]]


def _beams_of_transformers(model: Any, prompt: list[int], rule: BeamSearch) -> list[tuple[list[int], float]]:
    out = model.generate(
        torch.tensor([prompt]),
        num_beams=rule.num_beams,
        num_return_sequences=rule.num_beams,
        max_new_tokens=rule.max_tokens,
        length_penalty=rule.length_penalty,
        early_stopping=rule.early_stopping,
        eos_token_id=list(rule.stop_tokens) or None,
        pad_token_id=0,
        do_sample=False,
        return_dict_in_generate=True,
        output_scores=True,
    )
    made = list[tuple[list[int], float]]()
    for row, score in zip(out.sequences.tolist(), out.sequences_scores.tolist(), strict=True):
        tokens = row[len(prompt) :]
        stop = next((i + 1 for i, token in enumerate(tokens) if token in rule.stop_tokens), len(tokens))
        made.append((tokens[:stop], score))
    return made


@pytest.fixture(scope="module", params=["llama", "gpt2"])
def pair(request: pytest.FixtureRequest) -> tuple[Any, Engine]:
    """A model of transformers, and its engine."""
    model = MODELS[request.param]()
    made, params = hf_decoder(model)
    limits = limits_of(made, running=4, block=4, buckets=(8,), cache_bytes=1 << 20)
    return model, Engine(made, params, limits=limits, eager_steps=10_000)


@pytest.mark.day(4)
@pytest.mark.parametrize("stop_tokens", [(), (7,), (7, 2)])
@pytest.mark.parametrize("early_stopping", [False, True, "never"])
@pytest.mark.parametrize("length_penalty", [1.0, 0.0, -0.7, 2.0])
def test_beams_are_those_of_transformers(
    pair: tuple[Any, Engine], length_penalty: float, early_stopping: Any, stop_tokens: tuple[int, ...]
) -> None:
    model, engine = pair
    rule = BeamSearch(3, 9, length_penalty, early_stopping, stop_tokens)
    for prompt, beams in zip(PROMPTS, engine.beam_search(PROMPTS, rule), strict=True):
        want = _beams_of_transformers(model, prompt, rule)
        assert [list(beam.tokens) for beam in beams] == [tokens for tokens, _ in want]
        for beam, (_, score) in zip(beams, want, strict=True):
            assert beam.score == pytest.approx(score, abs=1e-5)
            assert beam.finish_reason == ("stop" if beam.tokens[-1] in stop_tokens else "length")


def test_one_beam_is_the_greedy_text(pair: tuple[Any, Engine]) -> None:
    _, engine = pair
    from shardfn.inference import Sampling

    [[beam]] = engine.beam_search(PROMPTS[:1], BeamSearch(1, 6))
    [made] = engine.generate(PROMPTS[:1], Sampling(max_tokens=6, temperature=0.0))
    assert list(beam.tokens) == made.tokens and beam.logprob == pytest.approx(sum(made.logprobs), abs=1e-6)


def test_beams_share_the_blocks_of_their_prefix() -> None:
    config = gpt.Config(VOCAB, 1, 16, 2, max_len=64, batch_invariant=True)
    made = decoder(config)
    limits = limits_of(made, running=4, block=4, buckets=(8,), cache_bytes=1 << 20)
    engine = Engine(made, gpt.init(config, key(0)), limits=limits, eager_steps=10_000)
    prompt = [i % VOCAB for i in range(33)]
    engine.beam_search([prompt], BeamSearch(3, 8))
    stats = engine.stats.cache
    begun = 1 + 3 * 7  # requests
    assert stats.queries == 33 + 3 * sum(range(34, 41))
    assert stats.queries - stats.hits <= 33 + 5 * begun  # of each request at most the last block, and a token


def test_wrong_rules() -> None:
    with pytest.raises(ValueError, match="num_beams must be at most 10 for 1 stop tokens, since a step has 20"):
        BeamSearch(11, stop_tokens=(2,))
    with pytest.raises(ValueError, match="num_beams must be at least 1, got 0"):
        BeamSearch(0)
    with pytest.raises(ValueError, match="early_stopping must be True, False or 'never', got 'always'"):
        BeamSearch(early_stopping="always")  # type: ignore[arg-type]
    config = gpt.Config(VOCAB, 1, 16, 2, max_len=12)
    engine = Engine(decoder(config), gpt.init(config, key(0)), eager_steps=10_000)
    with pytest.raises(ValueError, match=r"prompt and max_tokens must fit together in the context of 12 tokens, got 3"):
        engine.beam_search([[1, 2, 3]], BeamSearch(2, 10))
