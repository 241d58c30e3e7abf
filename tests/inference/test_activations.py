"""Covers rounded activations in the engine: log probabilities of a request alone, in any batch, on any ranks."""

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

import shardfn as sf
from shardfn import kernels, nn
from shardfn.core import tree_map
from shardfn.inference import Engine, Runner, Sampling, decoder, hf_decoder, logprobs
from shardfn.models import gpt
from shardfn.testing import distributed
from tests.inference.stories import VERSIONS, check, run
from tests.inference.test_codes import CODES, SIZES, Model, as_blocks
from tests.inference.test_stories import KINDS, LLAMA, drawn_stories

GREEDY = Sampling(max_tokens=6, temperature=0.0)
PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 10, 11, 12, 1, 2, 3]]


def _compute_whole(config: gpt.Config, packed: Any, tokens: tuple[int, ...]) -> Tensor:
    """Logits of a whole sequence, with no engine and no cache."""
    at = torch.arange(len(tokens))
    bodies = [nn.BatchInvariant()] * config.num_layers
    with torch.no_grad():
        return gpt.decode(config, packed, torch.tensor(tokens), at, at, bodies, activations="int8").logits


def _make_params(config: gpt.Config, version: int = 0) -> Any:
    return tree_map(lambda x: x * 8, gpt.init(config, sf.key(version)))


@functools.cache
def _make_model(codes: kernels.Quantization, **changes: Any) -> Model:
    config = gpt.Config(**{**SIZES, **changes})
    params = [_make_params(config, i) for i in range(VERSIONS)]
    one = Model(config, decoder(config, quantization=codes, activations="int8"), params)
    packed = [gpt.pack(config, p, quantization=codes) for p in params]
    one.full = functools.lru_cache(maxsize=4096)(
        lambda version, tokens: _compute_whole(config, packed[version], tokens)
    )
    return one


@pytest.mark.nightly
@pytest.mark.parametrize("codes", CODES)
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_stories_are_those_of_whole_sequences(kind: str, codes: kernels.Quantization) -> None:
    one, limits = _make_model(codes, **KINDS[kind][0]), KINDS[kind][1]
    runner = Runner(one.decoder, limits)
    for story in drawn_stories(limits, 5):
        told, _ = run(story, one, runner, limits)
        check(story, told, one)


def test_rows_do_not_depend_on_later_ones_and_differ_from_exact_activations() -> None:
    config, tokens = gpt.Config(**{**SIZES, **LLAMA}), (1, 2, 3, 4, 5, 6, 7)
    packed = gpt.pack(config, _make_params(config), quantization="int4")
    whole, at = _compute_whole(config, packed, tokens), torch.arange(7)
    assert torch.equal(_compute_whole(config, packed, tokens[:3]), whole[:3])
    with torch.no_grad():
        exact = gpt.decode(
            config, packed, torch.tensor(tokens), at, at, [nn.BatchInvariant()] * config.num_layers
        ).logits
    assert not torch.equal(exact, whole)


@pytest.mark.nightly
def test_requests_in_a_batch_are_those_alone_and_differ_from_exact_activations() -> None:
    config = gpt.Config(**{**SIZES, **LLAMA})
    params = _make_params(config)
    engine = Engine(decoder(config, quantization="int4", activations="int8"), params)
    together = [(c.tokens, c.logprobs) for c in engine.generate(PROMPTS, GREEDY)]
    assert together == [(c.tokens, c.logprobs) for p in PROMPTS for c in engine.generate([p], GREEDY)]
    exact = Engine(decoder(config, quantization="int4"), params).generate(PROMPTS, GREEDY)
    assert [c.logprobs for c in exact] != [b for _, b in together]


@pytest.mark.nightly
@pytest.mark.parametrize("codes", CODES)
@distributed(world=2)
def test_two_ranks_have_the_bits_of_one(codes: kernels.Quantization) -> None:
    config = gpt.Config(**{**SIZES, **LLAMA})
    params, mesh = _make_params(config), sf.make_mesh({"tp": 2})
    packed = gpt.pack(config, params, quantization=codes)
    for given in (params, as_blocks(config, params, codes)):
        cut = decoder(config, tp="tp", quantization=codes, activations="int8")
        got = Engine(cut, given, mesh=mesh).generate(PROMPTS, GREEDY)
        for prompt, one in zip(PROMPTS, got, strict=True):
            whole = (*prompt, *one.tokens)
            logits = _compute_whole(config, packed, whole)[len(prompt) - 1 : -1]
            assert logprobs(logits, torch.tensor(one.tokens)).tolist() == one.logprobs


@pytest.mark.nightly
def test_a_model_of_transformers_is_served_with_rounded_activations() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2}
    torch.manual_seed(0)
    config = transformers.LlamaConfig(vocab_size=80, max_position_embeddings=64, num_key_value_heads=1, **sizes)
    engine = Engine(*hf_decoder(transformers.LlamaForCausalLM(config).eval(), quantization="int8", activations="int8"))
    together = [(c.tokens, c.logprobs) for c in engine.generate(PROMPTS, GREEDY)]
    assert together == [(c.tokens, c.logprobs) for p in PROMPTS for c in engine.generate([p], GREEDY)]


def test_settings_without_an_effect_are_refused() -> None:
    config = gpt.Config(**SIZES)
    with pytest.raises(ValueError, match="activations='int8' must have weights in codes, got only floats"):
        Engine(decoder(config, activations="int8"), gpt.init(config, sf.key(0)))
    with pytest.raises(ValueError, match="activations must be 'int8' or None, got 'int4'"):
        decoder(config, quantization="int8", activations="int4")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="activations='int8' needs batch-invariant layers"):
        decoder(gpt.Config(vocab_size=13, num_layers=1, d_model=32, num_heads=4), activations="int8")
