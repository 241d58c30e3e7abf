"""Small models of transformers with random weights, whose logits are far apart."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

VOCAB, CONTEXT = 13, 28
_SIZES = {"vocab_size": VOCAB, "max_position_embeddings": CONTEXT, "use_cache": True}
_LLAMA = {
    **_SIZES,
    "hidden_size": 24,
    "intermediate_size": 37,  # no multiple of a vector
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_KINDS = {"layer_types": ["sliding_attention", "full_attention"]}


def made(kind: str, **config: Any) -> Any:
    """A model of a kind, in eval mode."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config_of(kind, **config))
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.3)
    return model.eval()


def config_of(kind: str, **config: Any) -> Any:
    """The configuration of a kind."""
    name = f"{kind}TextConfig" if kind == "Gemma3" else f"{kind}Config"
    return getattr(transformers, name)(**config)


def _gpt2() -> Any:
    sizes = {"n_embd": 24, "n_layer": 2, "n_head": 4, "n_inner": 37}
    return made("GPT2", vocab_size=VOCAB, n_positions=CONTEXT, bos_token_id=None, eos_token_id=None, **sizes)


def _opt() -> Any:
    sizes = {"hidden_size": 24, "word_embed_proj_dim": 16, "ffn_dim": 37, "num_hidden_layers": 2}
    none = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    return made("OPT", **_SIZES, num_attention_heads=4, **sizes, **none)


def _llama_like(kind: str, **more: Any) -> Callable[[], Any]:
    return lambda: made(kind, **(_LLAMA | more))


MODELS: dict[str, Callable[[], Any]] = {
    "gpt2": _gpt2,
    "llama": _llama_like("Llama"),
    "qwen2": _llama_like("Qwen2"),
    "qwen3": _llama_like("Qwen3", head_dim=8),
    "mistral": _llama_like("Mistral", sliding_window=5),
    "phi": _llama_like("Phi"),
    "gpt_neox": _llama_like("GPTNeoX"),
    "opt": _opt,
    "gemma3": _llama_like("Gemma3", head_dim=8, sliding_window=5, **_KINDS),
    "smollm3": _llama_like("SmolLM3", no_rope_layers=[1, 0]),
    "olmo3": _llama_like("Olmo3", sliding_window=5, **_KINDS),
}
