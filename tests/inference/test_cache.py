"""Covers a cache in codes: tokens and logits are those of one forward alone over such a cache, bit for bit."""

import functools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import shardfn as sf
from shardfn.inference import (
    CacheLayout,
    Engine,
    Limits,
    Ngram,
    Runner,
    Sampling,
    decoder,
    hf_decoder,
    limits_of,
)
from shardfn.inference._cache import make_single_bodies
from shardfn.models import gpt
from shardfn.testing import distributed
from tests.inference.stories import VERSIONS, Model, check, run
from tests.inference.stories import model as make_model
from tests.inference.test_stories import KINDS, LLAMA, drawn_stories

SIZES: dict[str, Any] = {
    "vocab_size": 13,
    "num_layers": 2,
    "d_model": 24,
    "num_heads": 4,
    "max_len": 28,
    "batch_invariant": True,
}


@functools.cache
def model(dtype: str, tp: str | None = None, **changes: Any) -> Model:
    """A model whose whole sequences are one call each over a cache in codes, in one block."""
    config = gpt.Config(**{**SIZES, **changes})
    params = [sf.core.tree_map(lambda x: x * 8, gpt.init(config, sf.key(i))) for i in range(VERSIONS)]
    one = Model(config, decoder(config, tp=tp), params)
    packed = [gpt.pack(config, p) for p in params]

    @functools.lru_cache(maxsize=4096)
    def full(version: int, tokens: tuple[int, ...]) -> Tensor:
        T = len(tokens)
        at_T = torch.arange(T, dtype=torch.int32)
        bodies = make_single_bodies(CacheLayout(config.num_layers, config.kv_heads, config.head_dim), T, dtype=dtype)
        with torch.no_grad():
            return gpt.decode(config, packed[version], torch.tensor(tokens), at_T, at_T, bodies).logits

    one.full = full
    return one


def limits_in(kind: str, dtype: str) -> Limits:
    return replace(KINDS[kind][1], cache_dtype=dtype)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "dtype, kind, number",
    [
        ("int8", "llama", 12),
        pytest.param("fp8", "gpt2", 8, marks=pytest.mark.nightly),
        *[pytest.param(d, k, 150, marks=pytest.mark.nightly) for d in ("int8", "fp8") for k in ("gpt2", "mistral")],
    ],
)
def test_stories(dtype: str, kind: str, number: int) -> None:
    limits, one = limits_in(kind, dtype), model(dtype, **KINDS[kind][0])
    runner, checked = Runner(one.decoder, limits), 0
    for story in drawn_stories(limits, number):
        told, _ = run(story, one, runner, limits)
        checked += check(story, told, one)
    assert checked > 5 * number


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", ["int8", "fp8"])
def test_stories_with_guesses(dtype: str) -> None:
    limits, one = replace(limits_in("llama", dtype), drafts=3), model(dtype, **LLAMA)
    runner = Runner(one.decoder, limits)
    for story in drawn_stories(limits, 60):
        told, _ = run(story, one, runner, limits, Ngram())
        check(story, told, one)


@pytest.mark.nightly
@distributed(world=[2, 3])
@pytest.mark.parametrize("dtype", ["int8", "fp8"])
def test_ranks_that_cut_the_heads(world: int, dtype: str) -> None:
    sizes = {"d_model": 48, "num_heads": 6, "num_kv_heads": 6, "d_ff": 96}
    changes = LLAMA | sizes | {"chunks": 24 if world == 3 else 8}
    limits, one = limits_in("llama", dtype), model(dtype, "tp", **changes)
    runner = Runner(one.decoder, limits, mesh=sf.make_mesh({"tp": world}))
    for story in drawn_stories(limits, 4):
        told, engine = run(story, one, runner, limits)
        assert engine.memory().cache == one.decoder.cache.num_bytes(limits) // world
        check(story, told, one)


def test_bytes_are_as_planned() -> None:
    limits = Limits(vocab=9, context=64, blocks=9)
    layout = CacheLayout(layers=3, heads=2, head_dim=77)
    num = 3 * 9 * 16 * 2 * 2
    for dtype, row in (("float32", 77 * 4), ("bfloat16", 77 * 2), ("int8", 84), ("fp8", 84)):
        sizes = replace(limits, cache_dtype=dtype)
        assert layout.num_bytes(sizes) == num * row
        assert sum(x.local.nbytes for x in layout.init(sizes, sf.make_mesh({}))) == num * row
    made = decoder(gpt.Config(**{**SIZES, "d_model": 256}))  # heads of 64
    blocks = {d: limits_of(made, running=99, cache_bytes=1_000_000, cache_dtype=d).blocks for d in ("float32", "int8")}
    assert 3.5 < blocks["int8"] / blocks["float32"] < 4


def test_codes_change_logits_little_and_are_no_float_cache() -> None:
    one, prompt = model("int8", **LLAMA), tuple(torch.arange(25).remainder(13).tolist())
    float_cache = gpt.apply(one.config, one.params[0], torch.tensor(prompt)[None])[0]
    near = {dtype: model(dtype, **LLAMA).full(0, prompt) for dtype in ("int8", "fp8")}
    for dtype, most in (("int8", 0.1), ("fp8", 0.5)):
        error = float((near[dtype] - float_cache).norm() / float_cache.norm())
        assert 0 < error < most, (dtype, error)


@pytest.mark.nightly
def test_a_model_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.LlamaConfig(vocab_size=13, max_position_embeddings=32, **sizes)
    made, params = hf_decoder(transformers.LlamaForCausalLM(config).eval())
    limits = limits_of(made, running=3, buckets=(1, 4, 12), block=3, cache_dtype="int8")
    prompts = [[5, 6, 7], [1, 2, 3, 4, 5, 6, 7, 8, 9], [5, 6, 8]]
    how = Sampling(max_tokens=8, seed=1)
    runner = Runner(made, limits)
    together = Engine(made, params, limits=limits, runner=runner).generate(prompts, how)
    alone = [Engine(made, params, limits=limits, runner=runner).generate([p], how)[0] for p in prompts]
    assert [(c.tokens, c.logprobs) for c in together] == [(c.tokens, c.logprobs) for c in alone]
    assert all(math.isfinite(x) for c in alone for x in c.logprobs)


def test_another_dtype_is_refused() -> None:
    config = gpt.Config(**SIZES)
    with pytest.raises(ValueError, match="cache_dtype is 'int4'; it must be one of float32, bfloat16, int8, fp8"):
        limits_of(decoder(config), cache_dtype="int4")


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "fp8"])
def test_latent_rows_in_each_dtype_and_memory(dtype: str) -> None:
    """Tokens of requests together, on the host, and again from the prefix cache are those of each alone."""
    changes, limits = KINDS["latent"]
    one, own = make_model(**changes), replace(limits, cache_dtype=dtype)
    prompts, how = [[5, 6, 7, 8, 9, 10], [11], [5, 6, 7, 8]], Sampling(max_tokens=8, temperature=1.5, seed=1)

    def draw(memory: Any, *given: list[int]) -> list[Any]:
        engine = Engine(one.decoder, one.params[0], limits=own, cache=memory)
        assert engine.core.cache[0].shape[1:3] == (1, 1)
        return [(x.tokens, x.logprobs) for _ in range(2) for x in engine.generate(list(given), how)]

    alone = [draw("device", prompt)[0] for prompt in prompts]
    assert draw("device", *prompts) == draw("host", *prompts) == alone * 2
