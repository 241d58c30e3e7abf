"""Covers each kind of decoder of transformers that is served: the engine's logits are those of its full forward."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from shardfn.inference import hf_decoder
from tests.inference.hf_models import CONTEXT, EAGER, LLAMA, VOCAB, config_of, made, transformers
from tests.inference.test_hf import LIMITS, PROMPTS, TOL, Model, check_alone, check_tokens, complete
from tests.zoo.architectures import ZOO
from tests.zoo.tiny_configs import tiny

_EXPERTS = {
    **EAGER,
    "num_experts": 6,
    "num_local_experts": 6,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 19,
    "shared_expert_intermediate_size": 23,
}
_DECODER = {"is_decoder": True, "num_key_value_heads": 4}
_GPT = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_inner": 37, "n_positions": CONTEXT, "rotary_dim": 4}
_WINDOW = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}
# By the prefix of their config's name; those of `hf_models.MODELS` are in test_hf.py.
KINDS: dict[str, dict[str, Any]] = {
    "Apertus": {},
    "Arcee": {},
    "Bert": _DECODER,
    "BertGeneration": _DECODER,
    "BioGpt": {"pad_token_id": 1},
    "BitNet": {},
    "CodeGen": _GPT,
    "Cohere": {},
    "Cohere2": _WINDOW,
    "CTRL": {"n_embd": 32, "n_layer": 2, "n_head": 4, "dff": 37, "n_positions": CONTEXT},
    "Cwm": {"bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 1, "head_dim": 8} | _WINDOW,
    "Electra": _DECODER | {"embedding_size": 16},
    "Ernie": _DECODER,
    "Ernie4_5": {},
    "Exaone4": _WINDOW,
    "GPTBigCode": _GPT,
    "GPTJ": _GPT,
    "Glm": {"head_dim": 8},
    "Glm4": {"head_dim": 8},
    "Granite": {},
    "Helium": {"head_dim": 8},
    "HunYuanDenseV1": {"head_dim": 8},
    "Jais2": {},
    "Ministral": {"head_dim": 8} | _WINDOW,
    "Ministral3": {"head_dim": 8},
    "ModernBertDecoder": {"bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 1, "local_attention": 5},
    "NanoChat": {},
    "Nemotron": {},
    "Olmo": {},
    "Olmo2": {},
    "Persimmon": {"num_key_value_heads": 4},
    "Phi3": {"sliding_window": 5, "pad_token_id": 1},
    "SeedOss": {"head_dim": 8},
    "StableLm": {},
    "Starcoder2": {"sliding_window": 5},
    "VaultGemma": {"head_dim": 8} | _WINDOW,
    "Afmoe": _EXPERTS | {"head_dim": 8, "num_dense_layers": 1} | _WINDOW,
    "Dots1": _EXPERTS | {"head_dim": 8},
    "Ernie4_5_Moe": _EXPERTS,
    "FlexOlmo": _EXPERTS,
    "Glm4Moe": _EXPERTS | {"head_dim": 8},
    "GptOss": _EXPERTS | {"head_dim": 8} | _WINDOW,
    "GraniteMoe": _EXPERTS,
    "GraniteMoeShared": _EXPERTS,
    "HunYuanMoEV1": _EXPERTS | {"head_dim": 8, "moe_topk": 2},
    "MiniMaxM2": _EXPERTS | {"head_dim": 8},
    "Phimoe": _EXPERTS | {"sliding_window": 5},
    "Qwen2Moe": _EXPERTS
    | {"decoder_sparse_step": 1, "sliding_window": 5, "use_sliding_window": True, "max_window_layers": 1},
}


def model_of(kind: str) -> Any:
    """A small model of a kind, with random weights."""
    model = made(kind, **(LLAMA | {"hidden_size": 32} | KINDS[kind]))
    model.generation_config.eos_token_id = None  # each completion has all its tokens
    return model


@pytest.mark.nightly
@pytest.mark.parametrize("kind", list(KINDS))
def test_logits_are_those_of_the_full_forward(kind: str) -> None:
    model = model_of(kind)
    decoder, params = hf_decoder(model, batch_invariant=True)
    assert (decoder.vocab, decoder.context) == (VOCAB, CONTEXT)
    with torch.no_grad():
        want = model(torch.tensor([PROMPTS[2]])).logits[0]
    got = Model(decoder, [params]).full(0, tuple(PROMPTS[2]))
    torch.testing.assert_close(got.log_softmax(-1), want.log_softmax(-1), rtol=0, atol=TOL)


@pytest.mark.nightly
@pytest.mark.parametrize("kind", list(KINDS))
def test_tokens_are_those_of_generate(kind: str) -> None:
    model = model_of(kind)
    decoder, params = hf_decoder(model, batch_invariant=True)
    completions = complete(decoder, params, replace(LIMITS, buckets=(12,)))
    check_tokens(model, completions)
    check_alone(Model(decoder, [params]), completions)


@pytest.mark.nightly
@pytest.mark.parametrize("name", [x for x in ZOO if x.endswith(("ForCausalLM", "LMHeadModel", "Decoder"))])
def test_a_decoder_of_the_zoo_is_exact_or_refused(name: str) -> None:
    kind = getattr(transformers, name, None)
    if kind is None:
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    config = tiny(kind.config_class, ZOO[name].config)
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    model = kind(config).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p), alpha=0.1 if p.ndim == 1 else 0.3)
    try:
        decoder, params = hf_decoder(model, batch_invariant=True)
    except ValueError as error:
        assert "cannot be served:" in str(error)
        return
    reference = Model(decoder, [params])
    with torch.no_grad():
        want = model(torch.tensor([PROMPTS[2]])).logits[0]
    got = reference.full(0, tuple(PROMPTS[2]))
    torch.testing.assert_close(got.log_softmax(-1), want.log_softmax(-1), rtol=0, atol=TOL)
    limits = replace(LIMITS, vocab=decoder.vocab, context=min(CONTEXT, decoder.context))
    check_alone(reference, complete(decoder, params, limits))


@pytest.mark.parametrize("kind", ["Roberta", "Camembert", "XLMRoberta", "XLMRobertaXL", "Data2VecText"])
def test_a_model_that_numbers_tokens_by_their_ids_is_refused(kind: str) -> None:
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "pad_token_id": 1,
    }
    config = config_of(kind, **sizes, is_decoder=True, intermediate_size=16)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with pytest.raises(ValueError, match="numbers tokens by all ids of a sequence, those of padding apart"):
        hf_decoder(model)
