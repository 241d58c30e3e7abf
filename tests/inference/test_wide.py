"""An engine in float64: however requests are batched, the log probabilities are those of one full forward."""

import functools
from typing import Any

import pytest
import torch

import shardfn as sf
from shardfn.inference import Drafter, Engine, Ngram, Sampling, decoder, limits_of, logprobs
from shardfn.lora import LoRA
from shardfn.models import gpt
from shardfn.models.moe import Experts

NIGHTLY = pytest.mark.nightly
F64 = torch.float64
BASE: dict[str, Any] = {
    "vocab_size": 23,
    "num_layers": 2,
    "d_model": 16,
    "num_heads": 4,
    "max_len": 32,
    "batch_invariant": True,
}
LLAMA: dict[str, Any] = {"norm": "rms", "mlp": "swiglu", "position": "rope", "bias": False, "num_kv_heads": 2}
KINDS: dict[str, dict[str, Any]] = {
    "gpt2": {"tie_embeddings": True},
    "mistral": LLAMA | {"window": 5, "d_ff": 24},
    "bloom": {"position": "alibi", "embedding_norm": True},
    "mixtral": LLAMA | {"experts": Experts(num=4, d_ff=12)},
}
PROMPTS = [[1, 2, 0], [5], [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9], [1, 2, 0, 7, 7, 7]]


@functools.cache
def params_of(kind: str) -> tuple[gpt.Config, Any]:
    config = gpt.Config(**BASE, **KINDS[kind])
    return config, sf.tree_map(lambda x: 8 * x.double() * (1 + 1e-9), gpt.init(config, sf.key(0)))


def engine_of(kind: str, drafter: Drafter | None = None, **sizes: Any) -> Engine:
    config, params = params_of(kind)
    made = decoder(config)
    drafts = 0 if drafter is None else 4
    how: dict[str, Any] = {"running": 3, "buckets": (2, 7), "block": 4, "cache_dtype": "float64", "drafts": drafts}
    return Engine(made, params, mesh=sf.make_mesh(alone=True), limits=limits_of(made, **how, **sizes), drafter=drafter)


def of_one_forward(kind: str, ids: list[int]) -> list[float]:
    """The log probabilities of all tokens but the first, in a forward of these alone."""
    config, params = params_of(kind)
    with torch.no_grad():
        logits = gpt.apply(config, params, torch.tensor([ids]))[0, :-1]
    return logprobs(logits, torch.tensor(ids[1:])).tolist()


@pytest.mark.parametrize("kind", [pytest.param(x, marks=() if x == "mistral" else NIGHTLY) for x in KINDS])
def test_log_probabilities_are_those_of_one_forward_to_the_last_bit(kind: str) -> None:
    engine = engine_of(kind, cache_bytes=9 * 512 * params_of(kind)[0].kv_heads)  # 9 blocks: sequences lose theirs
    assert engine.dtype == F64
    hows = [Sampling(max_tokens=9, temperature=t, seed=i, prompt_logprobs=True) for i, t in enumerate((0.0, 1.0, 0.7))]
    hows.append(Sampling(max_tokens=9, temperature=1.0, seed=8, repetition_penalty=1.2, logit_bias=((3, 0.5),)))
    found = engine.generate(PROMPTS, hows)
    for prompt, one in zip(PROMPTS, found, strict=True):
        wanted = of_one_forward(kind, [*prompt, *one.tokens])
        assert one.logprobs == wanted[len(prompt) - 1 :]
        assert one.prompt_logprobs == (wanted[: len(prompt) - 1] if prompt is not PROMPTS[3] else [])
    assert any(x != float(torch.tensor(x)) for x in found[0].logprobs)  # no float32 has them
    assert engine.stats.cache.preemptions > 0


@NIGHTLY
def test_drafts_that_are_accepted_change_nothing() -> None:
    how = Sampling(max_tokens=14, temperature=0.0)
    plain, guessing = engine_of("mistral"), engine_of("mistral", Ngram())
    assert plain.generate(PROMPTS, how) == guessing.generate(PROMPTS, how)


def test_adapters_are_refused() -> None:
    config, params = params_of("gpt2")
    narrow = sf.tree_map(lambda x: x.float(), params)
    lora = LoRA.of(narrow, [r"\.wq$"], rank=2)
    with pytest.raises(ValueError, match="adapter 'a': adapters are added in float32, and this engine is in float64"):
        engine_of("gpt2").adapters.add("a", (lora, lora.init(sf.key(0))))
    assert config.batch_invariant
