"""Rotary positions in a `config.json` of transformers as `nn.Rope`, and back."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from shardfn import nn

Told = Mapping[str, Any]
_LAYERS = {"full_attention": "rope_theta", "sliding_attention": "rope_local_base_freq"}


def read_rope(told: Told, types: Sequence[str], refused: list[str], *, layered: bool) -> list[nn.Rope]:
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


def write_rope(
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
