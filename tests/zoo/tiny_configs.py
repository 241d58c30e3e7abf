"""Tiny configs of Hugging Face's architectures, made from their defaults by the names of the fields."""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

VOCAB = 64
# The first pattern found in a field's name gives its value, if the default is a number of that kind.
NUMBERS: dict[str, Any] = {
    r"(^|_)vocab_size|^vocabulary_size|n_embeds$|^num_embeddings$|max_entity": VOCAB,
    r"type_vocab_size": 2,
    r"max_(text_)?seq_len|(max|n)_(2d_)?(source_|target_|text_)?(position|ctx)s?|context_length|max_sequence": 64,
    r"num_experts_per_tok|moe_k$|experts_per_token|num_activated|moe_topk|top_k$|n_activated": 2,
    r"num_(local_|routed_)?experts$|n_routed_experts|moe_num_experts|num_moe_experts": 4,
    r"^n_group|topk_group|n_shared_experts|num_shared_experts": 1,
    r"num_key_value_heads|num_kv_heads|num_global_key_value": 2,
    r"(^|_)heads?$|num_attention_heads|n_heads?$|num_heads": 4,
    r"qk_rope_head_dim|qk_nope_head_dim|v_head_dim|(^|_)head_dim|d_kv$|attention_head_size|key_head_dim": 8,
    r"partial_rotary_dim|rotary_dim$": 4,
    r"lora_rank$|rank$": 8,
    r"num_hidden_layers|(^|_)layers$|n_layers?$|^depth$|_depth$|num_(\w+_)?layers$|num_blocks$": 2,
    r"expert.*size|intermediate_size|ffn_(hidden_|embed_)?(dim|size)|d_ff$|mlp_dim$|ffn_dim|n_inner|(^|_)d_ffn": 48,
    r"hidden_size|d_model|n_embd$|embed_dim$|hidden_dim$|projection_dim|embedding_size|embed(ding)?_dim$|emb_dim$": 32,
    r"(^|_)dim$|feature_size|hidden_channels|d_embed|attention_channels": 32,
    r"image_size|img_size": 32,
    r"patch_size": 8,
    r"num_queries|num_(object_)?query": 5,
    r"num_mel_bins|mel_bins|feature_dim|input_feat": 16,
    r"sliding_window|window_size|attention_window": 4,
    r"state_size|d_state|mamba_d_state|ssm_state": 8,
    r"codebook_size": 32,
    r"num_codebooks|num_quantizers": 2,
    r"chunk_(size|length)": 4,
    r"num_conv_pos_embeddings$": 8,
    r"num_conv_pos_embedding_groups|num_groups": 2,
    r"conv_dim": 32,
    r"^stem|channels$|filters$|width$": 16,
}
# The same for tuples and lists of numbers, one a stage.
STAGES: dict[str, Any] = {
    r"depths|num_blocks|layers_per|num_layers": lambda n: 1,
    r"heads$": lambda n: 2,
    r"hidden_sizes|embed_dims?$|neck_hidden_sizes|dims$|out_channels": lambda n: 16 * (n + 1),
    r"conv_dim|tdnn_dim": lambda n: 16,
    r"image_size|img_size": lambda n: 32,
}
OFF = re.compile(
    r"drop(?!out_mode)|pdrop|layerdrop|jitter_noise|mask_(time|feature)_prob|label_noise|box_noise|noise_scale"
)


def tiny(kind: Any, given: Mapping[str, Any] | None = None) -> Any:
    """A small config of this class; `given` has the values that do not follow from the fields' names."""
    given = dict(given or {})
    made = {f.name: _value(f) for f in dataclasses.fields(kind) if f.init and f.name not in given}
    made = {k: v for k, v in made.items() if v is not None}
    default = kind() if kind.sub_configs else None
    for name in kind.sub_configs:
        inner = type(getattr(default, name, None))
        if dataclasses.is_dataclass(inner):
            made[name] = tiny(inner, given.pop(name, None))
    return kind(**(made | given))


def _value(field: dataclasses.Field) -> Any:
    default = field.default
    if default is dataclasses.MISSING and field.default_factory is not dataclasses.MISSING:
        default = field.default_factory()
    name = field.name
    if OFF.search(name) and isinstance(default, float | int) and not isinstance(default, bool):
        return 0.0 if isinstance(default, float) else 0
    if name == "use_cache":
        return False
    if re.search(r"token_(id|index)$|token_type_id|_start_id|_end_id", name):
        return _token(name, default)
    if name == "ctc_loss_reduction":
        return "mean"
    if isinstance(default, list | tuple) and default and all(type(x) is int for x in default):
        size = next((f for pattern, f in STAGES.items() if re.search(pattern, name)), None)
        return None if size is None else type(default)(size(n) for n in range(len(default)))
    if isinstance(default, bool) or not isinstance(default, int):
        return None
    for pattern, value in NUMBERS.items():
        if re.search(pattern, name):
            return min(value, default) if default > 0 else None
    return None


def _token(name: str, default: Any) -> int | None:
    if not isinstance(default, int) or isinstance(default, bool) or default < 0:
        return None
    for k, word in enumerate(("pad", "bos", "eos", "decoder_start", "sep", "cls", "mask")):
        if name.startswith(word):
            return k
    return 40 + sum(map(ord, name)) % 23
