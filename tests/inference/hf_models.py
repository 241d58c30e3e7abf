"""Small models of transformers with random weights, whose logits are far apart."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

VOCAB, CONTEXT = 13, 28
_SIZES = {"vocab_size": VOCAB, "max_position_embeddings": CONTEXT, "use_cache": True}
LLAMA = {
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
_EXPERTS = {"moe_intermediate_size": 19, "num_experts_per_tok": 3, "norm_topk_prob": True, "mlp_only_layers": [0]}
# The products of torch that transformers takes by default have no rows of 37.
EAGER = {"experts_implementation": "eager"}
_KINDS = {"layer_types": ["sliding_attention", "full_attention"]}


def made(kind: str, **config: Any) -> Any:
    """A model of a kind, in eval mode, whose attention is the plain one."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config_of(kind, **config), attn_implementation="eager")
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p), alpha=0.1 if p.ndim == 1 else 0.4)
    return model.eval()


def config_of(kind: str, **config: Any) -> Any:
    """The configuration of a kind."""
    name = f"{kind}TextConfig" if kind == "Gemma3" else f"{kind}Config"
    return getattr(transformers, name)(**config)


def _gpt2(n_head: int = 4) -> Any:
    sizes = {"n_embd": 24, "n_layer": 2, "n_head": n_head, "n_inner": 37}
    return made("GPT2", vocab_size=VOCAB, n_positions=CONTEXT, bos_token_id=None, eos_token_id=None, **sizes)


def _opt(num_attention_heads: int = 4) -> Any:
    sizes = {"hidden_size": 24, "word_embed_proj_dim": 16, "ffn_dim": 37, "num_hidden_layers": 2}
    none = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    return made("OPT", **_SIZES, num_attention_heads=num_attention_heads, **sizes, **none)


def _llama_like(kind: str, **more: Any) -> Callable[..., Any]:
    return lambda **changes: made(kind, **(LLAMA | more | changes))


MODELS: dict[str, Callable[..., Any]] = {
    "gpt2": _gpt2,
    "llama": _llama_like("Llama"),
    "qwen2": _llama_like("Qwen2"),
    "qwen3": _llama_like("Qwen3", head_dim=8),
    "mistral": _llama_like("Mistral", sliding_window=5),
    "phi": _llama_like("Phi", hidden_size=32),
    "gpt_neox": _llama_like("GPTNeoX"),
    "opt": _opt,
    "gemma": _llama_like("Gemma", head_dim=8),
    "gemma2": _llama_like("Gemma2", head_dim=8, sliding_window=5, attn_logit_softcapping=1.5, **_KINDS),
    "gemma3": _llama_like("Gemma3", head_dim=8, sliding_window=5, **_KINDS),
    "smollm3": _llama_like("SmolLM3", no_rope_layers=[1, 0]),
    "mixtral": _llama_like("Mixtral", **EAGER, num_local_experts=5, num_experts_per_tok=2, sliding_window=5),
    "qwen3_moe": _llama_like("Qwen3Moe", **EAGER, **_EXPERTS, head_dim=8, num_experts=6, decoder_sparse_step=1),
    "olmoe": _llama_like("Olmoe", **EAGER, num_experts=4, num_experts_per_tok=3),
    "olmo3": _llama_like("Olmo3", sliding_window=5, **_KINDS),
}
