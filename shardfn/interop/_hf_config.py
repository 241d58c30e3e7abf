"""Configs of transformers and of `models.gpt`, in both directions, with checks of their sizes."""

import dataclasses
import json
import math
import os
import pathlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from shardfn import core, nn
from shardfn.models import gpt

from ._hf_experts import DEEPSEEK, describe_experts, read_parts, write_parts
from ._hf_families import FAMILIES, Family, has_rope
from ._hf_swift import join_swift, split_swift

# Under the names of all families. A missing field, or null, has a default. Layers are made one by one.
_MOST = 2**31 - 1
_SIZES = dict.fromkeys(("num_hidden_layers", "n_layer"), 10_000)
_SIZES |= dict.fromkeys(("vocab_size", "hidden_size", "n_embd", "n_embed", "intermediate_size", "n_inner"), _MOST)
_SIZES |= dict.fromkeys(("num_attention_heads", "n_head", "num_key_value_heads", "head_dim"), _MOST)
_SIZES |= dict.fromkeys(("max_position_embeddings", "n_positions", "seq_length", "sliding_window"), _MOST)
_SIZES |= dict.fromkeys(("n_routed_experts", "num_local_experts", "num_experts_per_tok"), 10_000)
_SIZES |= dict.fromkeys(("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), _MOST)
_SIZES |= dict.fromkeys(("moe_intermediate_size", "n_group", "topk_group"), _MOST)
_NUMBERS = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "rope_theta")


def check_sizes(told: Mapping[str, Any], where: object = "config.json") -> None:
    """Refuses sizes and other numbers that no model has.

    Args:
        told: contents of `config.json`.
        where: place of the contents, for the message.

    Raises:
        ValueError: sizes are not integers from 1 to 2**31 - 1 (layers: to 10,000), or numbers are not above 0, or not
            finite. Lists all.

    Example:
        >>> check_sizes({"hidden_size": 64, "num_hidden_layers": 2})
        >>> check_sizes({"hidden_size": 6.4})
        Traceback (most recent call last):
        ValueError: config.json has numbers that no model has. Copy the file from the model again:
          - hidden_size is 6.4; it must be an integer of 1 or more, and at most 2147483647
    """
    inside = [x for name in ("rope_scaling", "rope_parameters") if isinstance(x := told.get(name), Mapping)]
    given = {name: x for part in (told, *inside) for name, x in part.items()}
    wrong = [
        f"{name} is {x!r:.60}; it must be an integer of 1 or more, and at most {most}"
        for name, most in _SIZES.items()
        if (x := given.get(name)) is not None and (type(x) is not int or not 1 <= x <= most)
    ]
    wrong += [
        f"{name} is {x!r:.60}; it must be a finite number above 0"
        for name in _NUMBERS
        if (x := given.get(name)) is not None and (type(x) not in (int, float) or not 0 < x <= sys.float_info.max)
    ]
    core.raise_all(ValueError, f"{where} has numbers that no model has. Copy the file from the model again:", wrong)


MODEL_TYPES = tuple(FAMILIES)


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
    told, images = split_llava(told)
    told, swift = split_swift(told)
    kind = told.get("model_type")
    if kind not in MODEL_TYPES:
        raise ValueError(
            f"config.json: model_type must be one of {MODEL_TYPES}, got"
            f" {kind!r}.{core.did_you_mean(str(kind), MODEL_TYPES)} To train another model of torch, use from_module,"
            " and module_from_hf for its weights."
        )
    check_sizes(told)
    family = FAMILIES[kind]
    told = {**family.defaults, **{name: x for name, x in told.items() if x is not None or name in _MAY_BE_NONE}}
    refused = [
        f"{name}={told[name]!r}; it must be {' or '.join(map(repr, values))}"
        for name, values in family.must.items()
        if name in told and told[name] not in values
    ]
    fields = _read_fields(told, family, refused)
    layers = range(fields["num_layers"])
    types = told.get("layer_types") or [
        "sliding_attention" if family.slides(told, i) else "full_attention" for i in layers
    ]
    refused += [f"layer_types has {t!r}" for t in sorted(set(types) - {"sliding_attention", "full_attention"})]
    refused += [] if len(types) == len(layers) else [f"layer_types has {len(types)} entries for {len(layers)} layers"]
    window = told.get("sliding_window")
    fields["window"] = _unify([window if t == "sliding_attention" else None for t in types])
    if fields.get("position") == "rope":
        ropes = _read_rope(told, types, refused, layered=family.layered)
        fields |= read_parts(kind, told, refused)
        fields |= _rope_fields([r if kind != "smollm3" or has_rope(told, i) else None for i, r in enumerate(ropes)])
    core.raise_all(ValueError, f"config.json: this {kind} has parts that models.gpt lacks:", refused)
    return gpt.Config(**{**fields, **swift, **images, **changes})


LLAVA, IMAGES_RULE = "llava", "shardfn_images"
_RULES = ("separate", "code", "causal")


def split_llava(told: Mapping[str, Any]) -> tuple[Mapping[str, Any], dict[str, Any]]:
    """Returns the contents of a language model's `config.json`, and further fields of its `Config`.

    Args:
        told: contents of `config.json`, of any model.

    Raises:
        ValueError: the rule of images is unknown.
    """
    if told.get("model_type") != LLAVA:
        return told, {}
    rule = told.get(IMAGES_RULE, "causal")
    if rule not in _RULES:
        raise ValueError(f"config.json: {IMAGES_RULE} must be one of {', '.join(map(repr, _RULES))}, got {rule!r}.")
    token = told.get("image_token_index", told.get("image_token_id"))
    return told["text_config"], {"images": gpt.Images(token, rule)}


def hf_config(config: gpt.Config, model_type: str | None = None) -> dict[str, Any]:
    """Returns the contents of `config.json` for this model, for transformers.

    Args:
        config: config of the model.
        model_type: model type of transformers, such as "qwen3". Default: the first that fits.

    Raises:
        ValueError: transformers has no such model, or not of that type. The message has the fields that differ.

    Example:
        >>> hf_config(gpt.Config.gpt2_like())["architectures"]
        ['GPT2LMHeadModel']
    """
    if model_type is not None and model_type not in MODEL_TYPES:
        raise ValueError(
            f"model_type={model_type!r} is not one of {MODEL_TYPES}.{core.did_you_mean(model_type, MODEL_TYPES)}"
        )
    kinds = MODEL_TYPES if model_type is None else (model_type,)
    # Reading back must give the written config: no list of exceptions to keep up to date.
    found = {kind: _find_differences(config, kind) for kind in kinds}
    kind = min(kinds, key=lambda kind: len(found[kind]))
    core.raise_all(ValueError, f"this Config is no {kind} of transformers:", found[kind])
    return _write_config(config, kind)


# Names whose null is a value, and no missing entry.
_MAY_BE_NONE = (
    "sliding_window",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "num_key_value_heads",
    "head_dim",
    "q_lora_rank",
)
# Fields that do not change the computed values, and are no part of a file.
_OURS = ("stacked", "per_head", "attention", "loss_tile", "dropout", "attention_dropout", "batch_invariant", "chunks")
# Settings of experts that each rank computes in part.
_DESCRIBED = ("experts",)
# Fields with several values for one model, compared by what they mean.
_MEANT = ("num_kv_heads", "d_ff", "d_head", "window", "rope", "rope_base")


def _read_fields(told: Mapping[str, Any], family: Family, refused: list[str]) -> dict[str, Any]:
    """Returns the fields of sizes and numbers, and adds missing parts of the model to `refused`."""
    fields = dict(family.settings)
    for name, keys in family.keys.items():
        fields[name] = next((told[key] for key in keys if key in told and told[key] is not None), None)
    act = fields.get("mlp", "gelu_new")
    fields["mlp"] = family.acts.get(act, act)
    if fields["mlp"] not in family.acts.values():
        refused.append(f"{family.keys['mlp'][0]}={act!r}; it must be {' or '.join(map(repr, family.acts))}")
    if "bias" in fields and "bias" in family.settings:
        fields["bias"] = family.settings["bias"]
    if fields.get("embedding_scale") is not None:
        fields["embedding_scale"] = fields["d_model"] ** 0.5
    if (divisor := fields.get("attention_scale")) is not None:
        K = fields["d_head"] or fields["d_model"] // fields["num_heads"]
        fields["attention_scale"] = None if divisor == K else divisor**-0.5
    if "use_parallel_residual" in told:
        fields["parallel"] = "two_norms" if told["use_parallel_residual"] else None
    return fields


def _unify(values: list[Any]) -> Any:
    """Returns the value of all layers, or a tuple where layers differ."""
    return values[0] if len(set(values)) == 1 else tuple(values)


def _rope_fields(ropes: list[Any]) -> dict[str, Any]:
    rope = _unify(ropes)
    if isinstance(rope, tuple) or rope is None or rope != nn.Rope(rope.base):
        return {"rope": tuple(ropes) if rope is None else rope}
    return {"rope_base": rope.base}


def _find_differences(config: gpt.Config, kind: str) -> list[str]:
    """Returns the fields of a config that differ after writing and reading."""
    ours = {name: getattr(config, name) for name in _OURS}
    try:
        back = gpt_config(_write_config(config, kind), **ours)
    except ValueError as error:
        return str(error).splitlines()
    names = [f.name for f in dataclasses.fields(gpt.Config) if f.name not in (*_OURS, *_MEANT, *_DESCRIBED)]
    out = [
        f"{name}={getattr(config, name)!r}, but a {kind} has {getattr(back, name)!r}"
        for name in (*names, "kv_heads", "ff_dim", "head_dim")
        if getattr(config, name) != getattr(back, name)
    ]
    experts, theirs = describe_experts(config), describe_experts(back)
    out += [] if experts == theirs else [f"experts {experts}, but a {kind} has {theirs}"]
    for name in ("window", "rope"):
        wanted, had = (_unify([getattr(kind, name) for kind in c.layer_settings]) for c in (config, back))
        out += [] if wanted == had else [f"{name}={wanted!r}, but a {kind} has {had!r}"]
    return out


def _write_config(c: gpt.Config, kind: str) -> dict[str, Any]:
    """Returns the contents of `config.json` of a config, for a model type that may not fit."""
    return join_swift(_write_family(c, kind), c.swift)


def _write_family(c: gpt.Config, kind: str) -> dict[str, Any]:
    family = FAMILIES[kind]
    values: dict[str, Any] = {name: getattr(c, name) for name in family.keys}
    values |= {"num_kv_heads": c.kv_heads, "d_ff": c.ff_dim, "d_head": c.head_dim}
    act = next((act for act, mlp in family.acts.items() if mlp == c.mlp), None)
    values |= {"mlp": act, "bias": c.bias is True}
    values["attention_scale"] = round((c.attention_scale or c.head_dim**-0.5) ** -2)
    # The default id of padding may be outside of the vocabulary.
    told: dict[str, Any] = {"model_type": kind, "architectures": [family.architecture], "pad_token_id": None}
    told |= {keys[0]: values[name] for name, keys in family.keys.items() if name != "mlp" or act is not None}
    if kind in ("gpt2", "bloom"):
        names = (
            ("attn_pdrop", "embd_pdrop", "resid_pdrop") if kind == "gpt2" else ("attention_dropout", "hidden_dropout")
        )
        return told | {names[0]: 0.0} | dict.fromkeys(names[1:], c.dropout)
    told |= {"use_parallel_residual": c.parallel is not None} if kind == "gpt_neox" else {}
    windows, ropes = ([getattr(k, name) for k in c.layer_settings] for name in ("window", "rope"))
    types = ["full_attention" if w is None else "sliding_attention" for w in windows]
    told["sliding_window"] = next((w for w in windows if w is not None), None)
    if kind not in ("llama", "mistral", "phi3", "gemma", "olmo2", "phi", "gpt_neox", *DEEPSEEK):
        told |= {"layer_types": types, "use_sliding_window": told["sliding_window"] is not None}
    told |= {"no_rope_layers": [int(r is not None) for r in ropes]} if kind == "smollm3" else {}
    told |= write_parts(c, kind)
    told |= _write_rope(ropes, types, layered=family.layered, whole=family.defaults.get("partial_rotary_factor", 1.0))
    if c.latent is not None and c.latent.mscale and "rope_parameters" in told:
        told["rope_parameters"] |= {"mscale_all_dim": c.latent.mscale}
    return told


Told = Mapping[str, Any]
_LAYERS = {"full_attention": "rope_theta", "sliding_attention": "rope_local_base_freq"}


def _read_rope(told: Told, types: Sequence[str], refused: list[str], *, layered: bool) -> list[nn.Rope]:
    """Returns the rotary positions of each layer.

    Args:
        told: contents of `config.json`, with defaults.
        types: type of each layer.
        refused: list for unknown kinds of positions.
        layered: whether the types of layers have separate positions.
    """
    given = told.get("rope_parameters") or {}
    nested = any(isinstance(given.get(name), Mapping) for name in _LAYERS)
    scaling = told.get("rope_scaling") or {}
    made = {}
    for name in dict.fromkeys(types):
        own: Told = (given.get(name) or {}) if nested else given
        if scaling and not (layered and name == "sliding_attention"):
            own = {**own, **scaling}
        base = told.get(_LAYERS[name]) if layered else None
        made[name] = _make_rope(
            {"rope_theta": base or told.get("rotary_emb_base", told["rope_theta"]), **own}, told, refused
        )
    return [made[name] for name in types]


def _make_rope(own: Told, told: Told, refused: list[str]) -> nn.Rope:
    base, kind = float(own["rope_theta"]), own.get("rope_type", own.get("type", "default"))
    part = own.get("partial_rotary_factor", told.get("rotary_pct", told.get("partial_rotary_factor", 1.0)))
    names = {"default": (), "linear": ("factor",), "llama3": ("factor", "low_freq_factor", "high_freq_factor")}
    names |= {"yarn": ("factor",)}
    known = kind in names and not (kind == "yarn" and told.get("model_type") == "phi3")
    problems = [] if known else [f"rope_type={kind!r}. Known are {', '.join(map(repr, names))}"]
    problems += [f"rope_type={kind!r} without {name}" for name in names.get(kind, ()) if own.get(name) is None]
    refused += problems
    if problems or kind == "default":
        return nn.Rope(base, part)
    factor = float(own["factor"])
    if kind == "linear":
        return nn.Rope(base, part, nn.LinearScaling(factor))
    length = own.get("original_max_position_embeddings", told.get("original_max_position_embeddings"))
    length = length or told["max_position_embeddings"]
    if kind == "llama3":
        low, high = float(own["low_freq_factor"]), float(own["high_freq_factor"])
        return nn.Rope(base, part, nn.Llama3Scaling(factor, length, low, high))
    turns = float(own.get("beta_fast") or 32), float(own.get("beta_slow") or 1)
    how = bool(own.get("truncate", True)), _read_attention_factor(own, factor)
    return nn.Rope(base, part, nn.YarnScaling(factor, length, *turns, *how))


def _read_attention_factor(own: Told, factor: float) -> float | None:
    if own.get("attention_factor") is not None:
        return float(own["attention_factor"])
    if not (own.get("mscale") and own.get("mscale_all_dim")) or factor <= 1:
        return None
    above, below = (0.1 * own[name] * math.log(factor) + 1.0 for name in ("mscale", "mscale_all_dim"))
    return above / below


def _write_rope(
    ropes: Sequence[nn.Rope | None], types: Sequence[str], *, layered: bool, whole: float = 1.0
) -> dict[str, Any]:
    """Returns the entries of `config.json` for the rotary positions of the layers.

    Args:
        ropes: rotary positions of each layer, or None.
        types: type of each layer.
        layered: whether the types of layers have separate positions.
        whole: part of a head that is rotated where nothing is written.
    """
    by_type = {name: r for name, r in zip(types, ropes, strict=True) if r is not None}
    if not by_type:
        return {}
    first = by_type.get("full_attention") or next(iter(by_type.values()))
    out: dict[str, Any] = {"rope_theta": first.base}
    if not layered:
        return out | {"rope_parameters": _write_one(first, whole)}
    out |= {"rope_local_base_freq": by_type["sliding_attention"].base} if "sliding_attention" in by_type else {}
    return out | {"rope_parameters": {name: _write_one(by_type.get(name, first), whole) for name in _LAYERS}}


def _write_one(rope: nn.Rope, whole: float) -> dict[str, Any]:
    out: dict[str, Any] = {"rope_theta": rope.base}
    out |= {"partial_rotary_factor": rope.fraction} if rope.fraction != whole else {}
    match rope.scaling:
        case None:
            return {"rope_type": "default", **out}
        case nn.LinearScaling(factor):
            return {"rope_type": "linear", "factor": factor, **out}
        case nn.Llama3Scaling(factor, length, low, high):
            more = {"low_freq_factor": low, "high_freq_factor": high, "original_max_position_embeddings": length}
            return {"rope_type": "llama3", "factor": factor, **more, **out}
        case nn.YarnScaling(factor, length, fast, slow, truncate, attention_factor):
            more = {"beta_fast": fast, "beta_slow": slow, "truncate": truncate}
            more |= {"original_max_position_embeddings": length}
            more |= {} if attention_factor is None else {"attention_factor": attention_factor}
            return {"rope_type": "yarn", "factor": factor, **more, **out}
