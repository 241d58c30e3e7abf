"""Model types of transformers as settings of `gpt.Config`: one row of a table for each.

D model, H heads, G key and value heads, K head dim, F ffn, V vocabulary.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

Told = Mapping[str, Any]


def _no_layer_slides(told: Told, i: int) -> bool:
    del told, i
    return False


def _every_layer_slides(told: Told, i: int) -> bool:
    del told, i
    return True


def _all_but_each(period: int, key: str = "") -> Callable[[Told, int], bool]:
    """Returns a rule of windows: each `period`-th layer attends to all tokens. The key may have another period."""
    return lambda told, i: (i + 1) % (told.get(key) or period) != 0


def _slides_after_first(told: Told, i: int) -> bool:
    return bool(told.get("use_sliding_window")) and i >= told.get("max_window_layers", 28)


def _slides_without_rope(told: Told, i: int) -> bool:
    return bool(told.get("use_sliding_window")) and not has_rope(told, i)


def has_rope(told: Told, i: int) -> bool:
    """Returns whether a layer of a SmolLM3 has rotary positions."""
    listed = told.get("no_rope_layers")
    return bool(listed[i]) if listed is not None else (i + 1) % told.get("no_rope_layer_interval", 4) != 0


class Family(NamedTuple):
    """Model type of transformers.

    Attributes:
        architecture: class of transformers.
        keys: names in `config.json` of the sizes and numbers of `Config`. The first name of several is written.
        defaults: values of names that a `config.json` lacks.
        settings: fields of `Config` of all models of the type.
        must: the only values of names with the same computation.
        names: names of the tensors of leaves, of a block's leaves after the block's name.
        acts: names of activations, and `mlp` of `Config` for each.
        block: name of a block in the file, with "{}" for its number.
        fused: leaves of a block that share a tensor, see `_layouts`.
        slides: function `slides(told, i)`: whether layer i has the window, where `layer_types` is missing.
        layered: whether `rope_parameters` has an entry for each type of layer.
    """

    architecture: str
    keys: Mapping[str, tuple[str, ...]]
    defaults: Mapping[str, Any]
    settings: Mapping[str, Any]
    must: Mapping[str, tuple[Any, ...]]
    names: Mapping[str, str]
    acts: Mapping[str, str]
    block: str = "model.layers.{}."
    fused: Mapping[str, tuple[str, str]] = {}
    slides: Callable[[Told, int], bool] = _no_layer_slides
    layered: bool = False


_GATED = {"silu": "swiglu", "gelu_pytorch_tanh": "geglu", "gelu_new": "geglu"}
_PLAIN = {"gelu_new": "gelu", "gelu_pytorch_tanh": "gelu", "gelu": "gelu_erf"}
_KEYS = {
    "vocab_size": ("vocab_size",),
    "num_layers": ("num_hidden_layers",),
    "d_model": ("hidden_size",),
    "num_heads": ("num_attention_heads",),
    "num_kv_heads": ("num_key_value_heads",),
    "d_ff": ("intermediate_size",),
    "max_len": ("max_position_embeddings",),
    "norm_eps": ("rms_norm_eps",),
    "tie_embeddings": ("tie_word_embeddings",),
    "d_head": ("head_dim",),
    "bias": ("attention_bias",),
    "mlp": ("hidden_act",),
}
_DEFAULTS = {"vocab_size": 32000, "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32}
_DEFAULTS |= {"rms_norm_eps": 1e-6, "intermediate_size": 11008, "max_position_embeddings": 2048}
_DEFAULTS |= {"hidden_act": "silu", "rope_theta": 10000.0, "tie_word_embeddings": False, "attention_bias": False}
_SETTINGS = {"norm": "rms", "position": "rope"}
_MUST = {"mlp_bias": (False,)}
_NAMES = {
    "embed": "model.embed_tokens.weight",
    "norm_w": "model.norm.weight",
    "head": "lm_head.weight",
    "s_norm_w": "model.norm_swiftkv.weight",
    "norm1_w": "input_layernorm.weight",
    "norm2_w": "post_attention_layernorm.weight",
    **{f"w{x}": f"self_attn.{x}_proj.weight" for x in "qkvo"},
    **{f"b{x}": f"self_attn.{x}_proj.bias" for x in "qkvo"},
    **{f"s_w{x}": f"self_attn.{x}_proj_swiftkv.weight" for x in "qkv"},
    **{f"s_b{x}": f"self_attn.{x}_proj_swiftkv.bias" for x in "qkv"},
    **{f"{x}_norm_w": f"self_attn.{x}_norm.weight" for x in "qk"},
    **{f"w_{x}": f"mlp.{x}_proj.weight" for x in ("gate", "up", "down")},
}
_AFTER = {"post1_w": "post_attention_layernorm.weight", "post2_w": "post_feedforward_layernorm.weight"}


_NONE: Mapping[str, Any] = MappingProxyType({})


def _llama_like(
    architecture: str,
    defaults: Told = _NONE,
    settings: Told = _NONE,
    names: Mapping[str, str] = _NONE,
    keys: Mapping[str, tuple[str, ...]] = _NONE,
    must: Mapping[str, tuple[Any, ...]] = _NONE,
    acts: Mapping[str, str] = _GATED,
    **more: Any,
) -> Family:
    """Returns a family by its differences from Llama."""
    return Family(
        architecture,
        {name: found for name, found in {**_KEYS, **keys}.items() if found},
        {**_DEFAULTS, **defaults},
        {**_SETTINGS, **settings},
        {**_MUST, **must},
        {**_NAMES, **names},
        acts,
        **more,
    )


_MISTRAL = {"intermediate_size": 14336, "num_key_value_heads": 8, "max_position_embeddings": 131072}
_MISTRAL |= {"sliding_window": 4096}
_QWEN2 = {"vocab_size": 151936, "intermediate_size": 22016, "num_key_value_heads": 32, "max_position_embeddings": 32768}
_QWEN2 |= {"sliding_window": 4096}
_OLMO2 = {"vocab_size": 50304, "rms_norm_eps": 1e-5}
_OLMO2_STYLE = {"norm_place": "after", "qk_norm": "joint"}
_SMOLLM3 = {"vocab_size": 128256, "hidden_size": 2048, "num_hidden_layers": 36, "num_attention_heads": 16}
_SMOLLM3 |= {"num_key_value_heads": 4, "max_position_embeddings": 32768, "rope_theta": 2e6, "tie_word_embeddings": True}
_PHI3 = {"vocab_size": 32064, "hidden_size": 3072, "intermediate_size": 8192, "max_position_embeddings": 4096}
_PHI3 |= {"rms_norm_eps": 1e-5}
_GEMMA = {
    "vocab_size": 256000,
    "hidden_size": 3072,
    "intermediate_size": 24576,
    "num_hidden_layers": 28,
    "head_dim": 256,
}
_GEMMA |= {"num_attention_heads": 16, "num_key_value_heads": 16, "max_position_embeddings": 8192}
_GEMMA |= {"hidden_act": "gelu_pytorch_tanh", "tie_word_embeddings": True}
_GEMMA_STYLE = {"norm_plus_one": True, "embedding_scale": "sqrt(d_model)"}
_GEMMA2 = {**_GEMMA, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26, "num_attention_heads": 8}
_GEMMA2 |= {
    "hidden_activation": "gelu_pytorch_tanh",
    "num_key_value_heads": 4,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}
_GEMMA2 |= {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
_GEMMA3 = {**_GEMMA2, "vocab_size": 262208, "max_position_embeddings": 131072, "rope_theta": 1e6}
_GEMMA3 |= {"attn_logit_softcapping": None, "final_logit_softcapping": None, "rope_local_base_freq": 10000.0}
_GEMMA2_KEYS = {"softcap": ("attn_logit_softcapping",), "logits_softcap": ("final_logit_softcapping",)}
_GEMMA2_KEYS |= {"attention_scale": ("query_pre_attn_scalar",), "mlp": ("hidden_activation",)}
_BOTH = {"norm2_w": "pre_feedforward_layernorm.weight", **_AFTER}
_ONE_WAY = {"use_bidirectional_attention": (False, None)}
_PHI = {"vocab_size": 51200, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 24}
_PHI |= {"hidden_act": "gelu_new", "layer_norm_eps": 1e-5, "partial_rotary_factor": 0.5}
_PHI_NAMES = {"norm1_b": "input_layernorm.bias", "wo": "self_attn.dense.weight", "bo": "self_attn.dense.bias"}
_PHI_NAMES |= {"norm_w": "model.final_layernorm.weight", "norm_b": "model.final_layernorm.bias"}
_PHI_NAMES |= {"w_up": "mlp.fc1.weight", "b_up": "mlp.fc1.bias", "head_b": "lm_head.bias"}
_PHI_NAMES |= {"w_down": "mlp.fc2.weight", "b_down": "mlp.fc2.bias"}
_LAYER_NORM = {"norm_eps": ("layer_norm_eps",)}
_NEOX = {"vocab_size": 50432, "hidden_size": 6144, "num_hidden_layers": 44, "num_attention_heads": 64}
_NEOX |= {"intermediate_size": 24576, "hidden_act": "gelu", "layer_norm_eps": 1e-5, "attention_bias": True}
_NEOX |= {"partial_rotary_factor": 0.25, "use_parallel_residual": True}
_WB = (("w", "weight"), ("b", "bias"))
_NEOX_NAMES = {"embed": "gpt_neox.embed_in.weight", "head": "embed_out.weight"}
_NEOX_NAMES |= {f"norm_{x}": f"gpt_neox.final_layer_norm.{y}" for x, y in _WB}
_NEOX_NAMES |= {f"norm1_{x}": f"input_layernorm.{y}" for x, y in _WB}
_NEOX_NAMES |= {f"norm2_{x}": f"post_attention_layernorm.{y}" for x, y in _WB}
_NEOX_NAMES |= {"wo": "attention.dense.weight", "bo": "attention.dense.bias"}
_NEOX_NAMES |= {"w_up": "mlp.dense_h_to_4h.weight", "b_up": "mlp.dense_h_to_4h.bias"}
_NEOX_NAMES |= {"w_down": "mlp.dense_4h_to_h.weight", "b_down": "mlp.dense_4h_to_h.bias"}
_BLOOM_NAMES = {"embed": "transformer.word_embeddings.weight", "head": "lm_head.weight"}
_BLOOM_NAMES |= {f"embed_norm_{x}": f"transformer.word_embeddings_layernorm.{y}" for x, y in _WB}
_BLOOM_NAMES |= {f"norm_{x}": f"transformer.ln_f.{y}" for x, y in _WB}
_BLOOM_NAMES |= {n: _NEOX_NAMES[n] for n in ("norm1_w", "norm1_b", "norm2_w", "norm2_b")}
_BLOOM_NAMES |= {n: _NEOX_NAMES[n] for n in ("w_up", "b_up", "w_down", "b_down")}
_BLOOM_NAMES |= {"wo": "self_attention.dense.weight", "bo": "self_attention.dense.bias"}
_GPT2_NAMES = {"embed": "transformer.wte.weight", "position": "transformer.wpe.weight", "head": "lm_head.weight"}
_GPT2_NAMES |= {f"norm_{x}": f"transformer.ln_f.{y}" for x, y in _WB}
_GPT2_NAMES |= {f"norm{i}_{x}": f"ln_{i}.{y}" for i in (1, 2) for x, y in _WB}
_GPT2_NAMES |= {"bo": "attn.c_proj.bias", "b_up": "mlp.c_fc.bias", "b_down": "mlp.c_proj.bias"}
_GPT2_KEYS = {"vocab_size": ("vocab_size",), "num_layers": ("n_layer",), "d_model": ("n_embd",)}
_GPT2_KEYS |= {"num_heads": ("n_head",), "max_len": ("n_positions",), "d_ff": ("n_inner",)}
_GPT2_KEYS |= {
    "mlp": ("activation_function",),
    "norm_eps": ("layer_norm_epsilon",),
    "tie_embeddings": ("tie_word_embeddings",),
}
_BLOOM_KEYS = {"vocab_size": ("vocab_size",), "num_layers": ("n_layer", "num_hidden_layers")}
_BLOOM_KEYS |= {"d_model": ("hidden_size", "n_embed"), "num_heads": ("n_head", "num_attention_heads")}
_BLOOM_KEYS |= {"max_len": ("seq_length",), "norm_eps": ("layer_norm_epsilon",)}
_BLOOM_KEYS |= {"tie_embeddings": ("tie_word_embeddings",)}

_DEEPSEEK_NAMES = {
    **{"wq_a": "self_attn.q_a_proj.weight", "q_a_norm_w": "self_attn.q_a_layernorm.weight"},
    **{"wq_b": "self_attn.q_b_proj.weight", "wkv_a": "self_attn.kv_a_proj_with_mqa.weight"},
    **{"kv_a_norm_w": "self_attn.kv_a_layernorm.weight", "wkv_b": "self_attn.kv_b_proj.weight"},
    **{"router": "mlp.gate.weight", "expert_bias": "mlp.gate.e_score_correction_bias"},
    **{"experts": "mlp.experts.", "shared": "mlp.shared_experts."},
}
_LATENT: dict[str, Any] = {
    "settings": {"bias": False},
    "names": _DEEPSEEK_NAMES,
    "keys": {"num_kv_heads": (), "d_head": (), "bias": ()},
}
_DEEPSEEK_V3 = {"vocab_size": 129280, "hidden_size": 7168, "intermediate_size": 18432, "num_hidden_layers": 61}
_DEEPSEEK_V3 |= {"num_attention_heads": 128, "max_position_embeddings": 4096, "moe_intermediate_size": 2048}
_DEEPSEEK_V3 |= {"n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8, "first_k_dense_replace": 3}
_DEEPSEEK_V3 |= {"n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5, "norm_topk_prob": True}
_DEEPSEEK_V3 |= {"kv_lora_rank": 512, "q_lora_rank": 1536, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128}
_DEEPSEEK_V3 |= {"v_head_dim": 128}
_DEEPSEEK_V2 = {"vocab_size": 102400, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32}
_DEEPSEEK_V2 |= {"num_attention_heads": 32, "max_position_embeddings": 2048, "moe_intermediate_size": 1407}
_DEEPSEEK_V2 |= {"n_routed_experts": 64, "n_shared_experts": 2, "first_k_dense_replace": 0, "topk_method": "greedy"}
_DEEPSEEK_V2 |= {"routed_scaling_factor": 1.0, "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_rope_head_dim": 64}
_DEEPSEEK_V2 |= {"qk_nope_head_dim": 128, "v_head_dim": 128}
# Values of older files among them.
_ROUTERS: dict[str, Mapping[str, tuple[Any, ...]]] = {
    "deepseek_v3": {"scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",)},
    "deepseek_v2": {"scoring_func": ("softmax",), "topk_method": ("greedy", "group_limited_greedy")},
}
_ROUTERS = {name: {**x, "attention_bias": (False,), "moe_layer_freq": (1,)} for name, x in _ROUTERS.items()}

_GPT_OSS: dict[str, Any] = {"vocab_size": 201088, "hidden_size": 2880, "intermediate_size": 2880, "head_dim": 64}
_GPT_OSS |= {"num_hidden_layers": 36, "num_attention_heads": 64, "num_key_value_heads": 8, "sliding_window": 128}
_GPT_OSS |= {"max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "attention_bias": True, "rope_theta": 150000.0}
_GPT_OSS |= {"num_local_experts": 128, "num_experts_per_tok": 4, "swiglu_alpha": 1.702, "swiglu_limit": 7.0}
_GPT_OSS["rope_parameters"] = {
    **{"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False},
    **{"original_max_position_embeddings": 4096, "rope_theta": 150000.0},
}
_GPT_OSS_NAMES = {"sinks": "self_attn.sinks", "experts": "mlp.experts"}
_GPT_OSS_NAMES |= {"router": "mlp.router.weight", "router_b": "mlp.router.bias"}


# Where several types fit a `Config`, the first is written.
FAMILIES: Mapping[str, Family] = {
    "gpt2": Family(
        "GPT2LMHeadModel",
        _GPT2_KEYS,
        {
            **{"vocab_size": 50257, "n_layer": 12, "n_embd": 768, "n_head": 12, "n_positions": 1024},
            **{"layer_norm_epsilon": 1e-5, "tie_word_embeddings": True, "activation_function": "gelu_new"},
        },
        {},
        {
            "scale_attn_weights": (True,),
            "scale_attn_by_inverse_layer_idx": (False,),
            "add_cross_attention": (False,),
        },
        _GPT2_NAMES,
        _PLAIN,
        block="transformer.h.{}.",
        fused={"qkv": ("gpt2", "attn.c_attn"), "in_first": ("wo w_up w_down", "attn.c_proj mlp.c_fc mlp.c_proj")},
    ),
    "llama": _llama_like("LlamaForCausalLM"),
    "mistral": _llama_like("MistralForCausalLM", _MISTRAL, slides=_every_layer_slides),
    "qwen2": _llama_like("Qwen2ForCausalLM", _QWEN2, {"bias": "qkv"}, slides=_slides_after_first),
    "bloom": Family(
        "BloomForCausalLM",
        _BLOOM_KEYS,
        {
            **{"vocab_size": 250880, "n_layer": 2, "hidden_size": 64, "n_head": 8, "seq_length": 2048},
            **{"layer_norm_epsilon": 1e-5, "tie_word_embeddings": True},
        },
        {"position": "alibi", "embedding_norm": True},
        {"apply_residual_connection_post_layernorm": (False,)},
        _BLOOM_NAMES,
        _PLAIN,
        block="transformer.h.{}.",
        fused={"qkv": ("by_head", "self_attention.query_key_value")},
    ),
    "qwen3": _llama_like(
        "Qwen3ForCausalLM", {**_QWEN2, "head_dim": 128}, {"qk_norm": "head"}, slides=_slides_after_first
    ),
    "olmo2": _llama_like("Olmo2ForCausalLM", _OLMO2, _OLMO2_STYLE, _AFTER),
    "olmo3": _llama_like(
        "Olmo3ForCausalLM",
        {**_OLMO2, "sliding_window": 4096, "rope_theta": 500000.0},
        _OLMO2_STYLE,
        _AFTER,
        slides=_all_but_each(4),
        layered=True,
    ),
    "smollm3": _llama_like("SmolLM3ForCausalLM", _SMOLLM3, slides=_slides_without_rope),
    "phi3": _llama_like(
        "Phi3ForCausalLM",
        _PHI3,
        must={"attention_bias": (False,)},
        fused={"qkv": ("one_by_one", "self_attn.qkv_proj"), "gate_up": ("", "mlp.gate_up_proj")},
        slides=_every_layer_slides,
    ),
    "gemma": _llama_like("GemmaForCausalLM", _GEMMA, _GEMMA_STYLE, must=_ONE_WAY, acts={**_GATED, "gelu": "geglu"}),
    "gemma2": _llama_like(
        "Gemma2ForCausalLM",
        _GEMMA2,
        {**_GEMMA_STYLE, "norm_place": "both"},
        _BOTH,
        _GEMMA2_KEYS,
        _ONE_WAY,
        slides=_all_but_each(2),
    ),
    "gemma3_text": _llama_like(
        "Gemma3ForCausalLM",
        _GEMMA3,
        {**_GEMMA_STYLE, "norm_place": "both", "qk_norm": "head"},
        _BOTH,
        _GEMMA2_KEYS,
        _ONE_WAY,
        slides=_all_but_each(6, "sliding_window_pattern"),
        layered=True,
    ),
    "phi": _llama_like(
        "PhiForCausalLM",
        _PHI,
        {"norm": "layer", "bias": True, "parallel": "one_norm", "head_bias": True},
        _PHI_NAMES,
        _LAYER_NORM,
        {"qk_layernorm": (False,)},
        _PLAIN,
    ),
    "gpt_neox": _llama_like(
        "GPTNeoXForCausalLM",
        _NEOX,
        {"norm": "layer", "bias": True},
        _NEOX_NAMES,
        {**_LAYER_NORM, "d_head": (), "num_kv_heads": ()},
        {"attention_bias": (True,)},
        _PLAIN,
        block="gpt_neox.layers.{}.",
        fused={"qkv": ("by_head", "attention.query_key_value")},
    ),
    "gpt_oss": _llama_like("GptOssForCausalLM", _GPT_OSS, {"sinks": True}, _GPT_OSS_NAMES, slides=_all_but_each(2)),
    "deepseek_v3": _llama_like("DeepseekV3ForCausalLM", _DEEPSEEK_V3, **_LATENT, must=_ROUTERS["deepseek_v3"]),
    "deepseek_v2": _llama_like("DeepseekV2ForCausalLM", _DEEPSEEK_V2, **_LATENT, must=_ROUTERS["deepseek_v2"]),
}
