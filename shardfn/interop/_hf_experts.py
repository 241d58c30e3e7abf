"""Latent attention and experts in configs of transformers: settings of `gpt.Config` from `config.json`, and back."""

import functools
import inspect
from collections.abc import Mapping
from typing import Any

from shardfn.models import gpt
from shardfn.models.moe import Experts
from shardfn.nn import moe

Told = Mapping[str, Any]
DEEPSEEK = ("deepseek_v2", "deepseek_v3")
# The step of biases of the choice in DeepSeek-V3.
_BIAS_RATE = 1e-3


def read_parts(kind: str, told: Told, refused: list[str]) -> dict[str, Any]:
    """Returns fields of `Config` for latent attention and experts, and adds missing parts of the model to `refused`.

    Args:
        kind: model type.
        told: contents of `config.json`, with defaults.
        refused: list for parts without a setting.
    """
    if kind in DEEPSEEK:
        return _read_deepseek(kind, told, refused)
    return _read_gpt_oss(told) if kind == "gpt_oss" else {}


def write_parts(c: gpt.Config, kind: str) -> dict[str, Any]:
    """Returns the entries of `config.json` for latent attention and experts."""
    if kind == "gpt_oss":
        return _write_gpt_oss(c)
    return _write_deepseek(c, kind) if kind in DEEPSEEK else {}


def describe_experts(c: gpt.Config) -> Any:
    """Returns the settings of a computation of experts, without losses and places. Equal settings compute alike."""
    e = c.experts
    if e is None or not c.expert_layers:
        return None
    route, options = _read_route(e)
    sizes = tuple(c.num_experts), tuple(c.expert_layers), e.top_k, e.d_ff or c.ff_dim
    shared = c.shared_ff_dim if e.shared or e.residual else None
    return (
        *sizes,
        shared,
        e.residual,
        e.capacity,
        e.bias_rate > 0,
        e.gate,
        e.biases,
        route,
        tuple(sorted(options.items())),
    )


def _read_route(e: Experts) -> tuple[Any, dict[str, Any]]:
    """Returns the function of a choice of experts, and its settings with their defaults."""
    route, given = e.route, dict[str, Any]()
    while isinstance(route, functools.partial):
        route, given = route.func, {**route.keywords, **given}
    known = (p for p in inspect.signature(route).parameters.values() if p.default is not p.empty)
    passed = ("bias", "mask", "chosen", "batch_invariant", "name")
    return route, {p.name: given.get(p.name, p.default) for p in known if p.name not in passed} | given


def _read_deepseek(kind: str, told: Told, refused: list[str]) -> dict[str, Any]:
    v3, rope = kind == "deepseek_v3", {**(told.get("rope_parameters") or {}), **(told.get("rope_scaling") or {})}
    scaled = rope.get("rope_type", rope.get("type", "default")) != "default"
    heads = told.get("num_key_value_heads")
    if heads not in (None, told["num_attention_heads"]):
        refused.append(f"num_key_value_heads={heads}; it must be {told['num_attention_heads']}, the number of heads")
    fields: dict[str, Any] = {
        "latent": gpt.Latent(
            *(told[n] for n in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")),
            q_rank=told.get("q_lora_rank"),
            interleaved=bool(told.get("rope_interleave", True)) or not v3,
            mscale=float(rope.get("mscale_all_dim") or 0.0) if scaled else 0.0,
        )
    }
    if told["first_k_dense_replace"] >= told["num_hidden_layers"]:
        return fields
    groups = {"groups": told.get("n_group") or 1, "groups_kept": told.get("topk_group") or 1}
    scale = float(told["routed_scaling_factor"])
    if v3:
        renormalise = bool(told["norm_topk_prob"])
        route = functools.partial(moe.sigmoid_groups, **groups, scale=scale, renormalise=renormalise)
    else:
        groups = groups if told["topk_method"] == "group_limited_greedy" else {}
        route = functools.partial(moe.top_k, **groups, scale=scale, renormalise=False)
    if not told.get("n_shared_experts"):
        refused.append(f"n_shared_experts={told.get('n_shared_experts')!r}; it must be 1 or more")
        return fields
    experts = Experts(
        num=told["n_routed_experts"],
        top_k=told["num_experts_per_tok"],
        d_ff=told["moe_intermediate_size"],
        first=told["first_k_dense_replace"],
        route=route,
        balance=0.0,
        shared=True,
        shared_d_ff=told["n_shared_experts"] * told["moe_intermediate_size"],
        bias_rate=_BIAS_RATE if v3 else 0.0,
    )
    return {**fields, "experts": experts}


def _write_deepseek(c: gpt.Config, kind: str) -> dict[str, Any]:
    latent, e = c.latent or gpt.Latent(1, 1, 2, 1), c.experts
    told: dict[str, Any] = {
        **{"kv_lora_rank": latent.kv_rank, "qk_nope_head_dim": latent.nope_dim, "qk_rope_head_dim": latent.rope_dim},
        **{"v_head_dim": latent.v_dim, "q_lora_rank": latent.q_rank, "num_key_value_heads": c.num_heads},
        **({"rope_interleave": latent.interleaved} if kind == "deepseek_v3" else {}),
        **{"first_k_dense_replace": c.expert_layers[0] if e and c.expert_layers else c.num_layers},
    }
    if e is None:
        return told
    _, route = _read_route(e)
    d_ff = e.d_ff or c.ff_dim
    told |= {"n_routed_experts": e.num, "num_experts_per_tok": e.top_k, "moe_intermediate_size": d_ff}
    told |= {"n_shared_experts": c.shared_ff_dim // d_ff, "routed_scaling_factor": route.get("scale", 1.0)}
    told |= {"norm_topk_prob": route.get("renormalise", True)}
    told |= {"n_group": route.get("groups", 1), "topk_group": route.get("groups_kept", 1)}
    grouped = told["n_group"] != told["topk_group"]
    return told | ({} if kind == "deepseek_v3" else {"topk_method": "group_limited_greedy" if grouped else "greedy"})


def _read_gpt_oss(told: Told) -> dict[str, Any]:
    gate = moe.ClampedGate(float(told["swiglu_alpha"]), float(told["swiglu_limit"]))
    route = functools.partial(moe.top_k, softmax="after")
    num, k = told["num_local_experts"], told.get("experts_per_token", told["num_experts_per_tok"])
    return {"experts": Experts(num=num, top_k=k, route=route, balance=0.0, gate=gate, biases=True)}


def _write_gpt_oss(c: gpt.Config) -> dict[str, Any]:
    e = c.experts
    gate = (e and e.gate) or moe.ClampedGate()
    told = {"swiglu_alpha": gate.alpha, "swiglu_limit": gate.limit}
    return told | ({} if e is None else {"num_local_experts": e.num, "num_experts_per_tok": e.top_k})
