"""Converts `config.json` of transformers to a `gpt.Config`, and back. Other computations are refused."""

import json
import os
import pathlib
from collections.abc import Mapping
from typing import Any

from shardfn.core import did_you_mean, raise_all
from shardfn.models import gpt

from ._hf_sizes import check_sizes

MODEL_TYPES = ("gpt2", "llama", "mistral", "qwen2", "bloom")
_CLASSES = {"gpt2": "GPT2LMHeadModel", "bloom": "BloomForCausalLM"}


def read_config(directory: str | os.PathLike[str]) -> dict[str, Any]:
    """Returns the contents of `config.json`.

    Raises:
        FileNotFoundError: the file is missing.
    """
    return json.loads((pathlib.Path(directory) / "config.json").read_text())


def gpt_config(told: Mapping[str, Any], **changes: Any) -> gpt.Config:
    """Returns a `Config` with the computation of the model of this `config.json`.

    Args:
        told: contents of `config.json`. Missing values are the defaults of transformers.
        **changes: other fields of the result, such as `stacked=True`.

    Raises:
        ValueError: the model is of another type, has sizes that `check_sizes` refuses, or computes something else. The
            message lists every setting.

    Example:
        >>> told = {"model_type": "gpt2", "n_embd": 32, "n_head": 4, "n_layer": 2, "vocab_size": 64}
        >>> gpt_config(told, stacked=True).max_len
        1024
    """
    kind = told.get("model_type")
    if kind not in MODEL_TYPES:
        raise ValueError(
            f"config.json: model_type must be one of {MODEL_TYPES}, got"
            f" {kind!r}.{did_you_mean(str(kind), MODEL_TYPES)} To train another model of torch, use from_module, and"
            " module_from_hf for its weights."
        )
    check_sizes(told)
    fields, refused = {"gpt2": _read_gpt2, "bloom": _read_bloom}.get(kind, _read_llama)(told)
    raise_all(ValueError, f"config.json: this {kind} has parts that models.gpt lacks:", refused)
    return gpt.Config(**{**fields, **changes})


def hf_config(config: gpt.Config, model_type: str | None = None) -> dict[str, Any]:
    """Returns the contents of `config.json` for this model, for transformers.

    Args:
        config: config of the model.
        model_type: "gpt2", "llama", "mistral", "qwen2" or "bloom". Default: the type that fits.

    Raises:
        ValueError: transformers has no such model, or not of that type. The message has the fields that differ.

    Example:
        >>> hf_config(gpt.Config.gpt2_like())["architectures"]
        ['GPT2LMHeadModel']
    """
    kind = model_type or _model_type(config)
    if kind not in MODEL_TYPES:
        raise ValueError(f"model_type={kind!r} is not one of {MODEL_TYPES}.{did_you_mean(kind, MODEL_TYPES)}")
    common = {"model_type": kind, "architectures": [_CLASSES.get(kind, f"{kind.capitalize()}ForCausalLM")]}
    told = common | {"gpt2": _write_gpt2, "bloom": _write_bloom}.get(kind, _write_llama)(config)
    # Reading back must give the written config: no list of exceptions to keep up to date.
    back = gpt_config(told, **{name: getattr(config, name) for name in _OURS})
    wrong = [
        f"{name}={getattr(config, name)!r}, but a {kind} has {getattr(back, name)!r}"
        for name in (*_OF_THE_MODEL, "kv_heads", "ff_dim", "max_len")
        if getattr(config, name) != getattr(back, name)
    ]
    raise_all(ValueError, f"this Config is no {kind} of transformers:", wrong)
    return told


# Fields that determine the computed values, and fields that choose only the way to compute.
_OF_THE_MODEL = ("norm", "mlp", "position", "bias", "embedding_norm", "window", "layout", "causal")
_OURS = ("stacked", "per_head", "attention", "loss_tile", "dropout")
_Fields = tuple[dict[str, Any], list[str]]


def _read_gpt2(t: Mapping[str, Any]) -> _Fields:
    D = t.get("n_embd", 768)
    fields = {"vocab_size": t.get("vocab_size", 50257), "num_layers": t.get("n_layer", 12), "d_model": D}
    fields |= {"num_heads": t.get("n_head", 12), "max_len": t.get("n_positions", 1024)}
    fields |= {"d_ff": t.get("n_inner") or 4 * D, "norm_eps": t.get("layer_norm_epsilon", 1e-5)}
    fields |= {"tie_embeddings": t.get("tie_word_embeddings", True)}
    must = {"activation_function": ("gelu_new", "gelu_pytorch_tanh"), "scale_attn_weights": (True,)}
    must |= {"scale_attn_by_inverse_layer_idx": (False,), "add_cross_attention": (False,)}
    return fields, _find_differences(t, must)


def _read_bloom(t: Mapping[str, Any]) -> _Fields:
    D = t.get("hidden_size", t.get("n_embed", 64))
    fields = {"vocab_size": t.get("vocab_size", 250880), "num_layers": t.get("n_layer", t.get("num_hidden_layers", 2))}
    fields |= {"d_model": D, "num_heads": t.get("n_head", t.get("num_attention_heads", 8)), "d_ff": 4 * D}
    fields |= {"norm_eps": t.get("layer_norm_epsilon", 1e-5), "tie_embeddings": t.get("tie_word_embeddings", True)}
    fields |= {"max_len": t.get("seq_length", 2048), "position": "alibi", "embedding_norm": True}
    return fields, _find_differences(t, {"apply_residual_connection_post_layernorm": (False,)})


def _read_llama(t: Mapping[str, Any]) -> _Fields:
    kind = t["model_type"]
    base: dict[str, Any] = {"vocab_size": 32000, "hidden_size": 4096, "num_hidden_layers": 32}
    base |= {"num_attention_heads": 32, "rms_norm_eps": 1e-6, "intermediate_size": 11008}
    base |= {"llama": {"max_position_embeddings": 2048}, "mistral": _MISTRAL, "qwen2": _QWEN2}[kind]
    t = {**base, **t}
    H, D = t["num_attention_heads"], t["hidden_size"]
    fields = {"vocab_size": t["vocab_size"], "num_layers": t["num_hidden_layers"], "d_model": D, "num_heads": H}
    fields |= {"num_kv_heads": t.get("num_key_value_heads") or H, "d_ff": t["intermediate_size"]}
    fields |= {"max_len": t["max_position_embeddings"], "norm_eps": t["rms_norm_eps"], "norm": "rms", "mlp": "swiglu"}
    rope = t.get("rope_parameters") or t.get("rope_scaling") or {}
    fields |= {"position": "rope", "rope_base": float(rope.get("rope_theta", t.get("rope_theta", 10000.0)))}
    fields |= {"tie_embeddings": t.get("tie_word_embeddings", False)}
    fields["bias"] = "qkv" if kind == "qwen2" else bool(t.get("attention_bias", False))
    sliding = t.get("sliding_window") if kind == "mistral" or t.get("use_sliding_window") else None
    fields["window"] = sliding
    must: dict[str, tuple[Any, ...]] = {"hidden_act": ("silu",), "mlp_bias": (False,)}
    if D % H == 0:  # else `Config` refuses the heads
        must["head_dim"] = None, D // H
    refused = _find_differences(t, must)
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    refused += [f"rope_type={rope_type!r}. Only 'default' is known"] if rope_type != "default" else []
    if sliding is not None and kind == "qwen2":
        refused.append(f"use_sliding_window=True with sliding_window={sliding}: layers differ in their windows")
    return fields, refused


_MISTRAL = {"intermediate_size": 14336, "num_key_value_heads": 8, "max_position_embeddings": 131072}
_MISTRAL |= {"sliding_window": 4096}
_QWEN2 = {"vocab_size": 151936, "intermediate_size": 22016, "num_key_value_heads": 32, "max_position_embeddings": 32768}


def _find_differences(told: Mapping[str, Any], must: Mapping[str, tuple[Any, ...]]) -> list[str]:
    return [
        f"{name}={told[name]!r}; it must be {' or '.join(map(repr, values))}"
        for name, values in must.items()
        if name in told and told[name] not in values
    ]


def _model_type(c: gpt.Config) -> str:
    if c.position != "rope":
        return "bloom" if c.position == "alibi" else "gpt2"
    return "qwen2" if c.bias == "qkv" else "mistral" if c.window else "llama"


def _write_gpt2(c: gpt.Config) -> dict[str, Any]:
    told = {"vocab_size": c.vocab_size, "n_layer": c.num_layers, "n_embd": c.d_model, "n_head": c.num_heads}
    told |= {"n_positions": c.max_len, "n_inner": c.ff_dim, "layer_norm_epsilon": c.norm_eps}
    told |= {"activation_function": "gelu_new", "tie_word_embeddings": c.tie_embeddings}
    return told | {"attn_pdrop": 0.0, "embd_pdrop": c.dropout, "resid_pdrop": c.dropout}


def _write_bloom(c: gpt.Config) -> dict[str, Any]:
    told = {"vocab_size": c.vocab_size, "n_layer": c.num_layers, "hidden_size": c.d_model, "n_head": c.num_heads}
    told |= {"layer_norm_epsilon": c.norm_eps, "tie_word_embeddings": c.tie_embeddings, "seq_length": c.max_len}
    return told | {"hidden_dropout": c.dropout, "attention_dropout": 0.0}


def _write_llama(c: gpt.Config) -> dict[str, Any]:
    told = {"vocab_size": c.vocab_size, "num_hidden_layers": c.num_layers, "hidden_size": c.d_model}
    told |= {"num_attention_heads": c.num_heads, "num_key_value_heads": c.kv_heads, "intermediate_size": c.ff_dim}
    told |= {"max_position_embeddings": c.max_len, "rms_norm_eps": c.norm_eps, "hidden_act": "silu"}
    told |= {"rope_theta": c.rope_base, "tie_word_embeddings": c.tie_embeddings, "head_dim": c.head_dim}
    told |= {"rope_parameters": {"rope_type": "default", "rope_theta": c.rope_base}}
    told |= {"attention_bias": True} if c.bias is True else {}
    return told | {"sliding_window": c.window}
