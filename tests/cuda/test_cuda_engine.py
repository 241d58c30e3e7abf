"""Covers the engine on one GPU: its law under Triton, against one forward of each sequence alone. Never run so far."""

from typing import Any

import pytest
import torch

from shardfn import core
from shardfn.core import make_mesh, tree_map
from shardfn.inference import Decoder, Engine, Ngram, Sampling, decoder, hf_decoder, limits_of, logprobs
from shardfn.models import gpt

DEVICE = "cuda"
KINDS: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "llama": {"norm": "rms", "mlp": "swiglu", "position": "rope", "num_kv_heads": 2},
}
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9], [3, 1, 4, 1, 5, 9, 2, 6, 5, 11], [7], [2] * 33]


def _config(**kind: Any) -> gpt.Config:
    return gpt.Config(vocab_size=77, num_layers=2, d_model=48, num_heads=4, max_len=64, batch_invariant=True, **kind)


def _hows(max_tokens: int) -> list[Sampling]:
    return [Sampling(max_tokens=max_tokens, temperature=0.0 if i % 2 else 0.9, seed=i) for i in range(len(PROMPTS))]


def _engine(model: Decoder, params: Any) -> Engine:
    limits = limits_of(model, context=64, running=3, buckets=(1, 4, 16), block=4, cache_bytes=1 << 20)
    return Engine(model, params, mesh=make_mesh({}, device=DEVICE, alone=True), limits=limits)


def _check_company(engine: Engine) -> None:
    """Tokens and their log probabilities are those that each request has alone."""
    together = engine.generate(PROMPTS, _hows(9))
    assert [engine.generate([p], how)[0] for p, how in zip(PROMPTS, _hows(9), strict=True)] == together


@pytest.mark.parametrize("kind", KINDS)
def test_log_probabilities_are_those_of_one_forward(kind: str) -> None:
    config = _config(**KINDS[kind])
    params = gpt.init(config, core.key(0))
    made = _engine(decoder(config), params).generate(PROMPTS, _hows(9))
    held = tree_map(lambda x: x.to(DEVICE), params)
    for prompt, one in zip(PROMPTS, made, strict=True):
        tokens = torch.tensor([*prompt, *one.tokens], device=DEVICE)
        logits = gpt.apply(config, held, tokens[None, :-1])[0, len(prompt) - 1 :]
        assert torch.equal(logprobs(logits, tokens[len(prompt) :]).cpu(), torch.tensor(one.logprobs))


@pytest.mark.parametrize("codes", ["int8", "int4"])
def test_weights_in_codes(codes: Any) -> None:
    config = _config()
    _check_company(_engine(decoder(config, quantization=codes), gpt.init(config, core.key(0))))


def test_drafts_change_no_token() -> None:
    config = _config(**KINDS["llama"])
    model, params = decoder(config), gpt.init(config, core.key(0))
    mesh = make_mesh({}, device=DEVICE, alone=True)

    def run(drafts: int) -> list[Any]:
        limits = limits_of(model, context=64, running=3, buckets=(4, 16), drafts=drafts, cache_bytes=1 << 20)
        engine = Engine(model, params, mesh=mesh, limits=limits, drafter=Ngram() if drafts else None)
        return engine.generate(PROMPTS, _hows(20))

    assert run(3) == run(0)


def test_a_model_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=77, hidden_size=48, intermediate_size=80, num_hidden_layers=2, num_attention_heads=4
    )
    model, params = hf_decoder(transformers.LlamaForCausalLM(config).eval().to(DEVICE), batch_invariant=True)
    _check_company(_engine(model, params))
