"""One block of the transformer, on this rank's part of the block: x += attn(norm(x)), x += mlp(norm(x)), and dropout.

B batch, T tokens, D model, H heads.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shardfn import nn
from shardfn.collectives import pvary
from shardfn.core import fold_in, split

from ._gpt_config import Config, LayerSettings
from ._gpt_experts import Along as Along
from ._gpt_experts import Seen as Seen
from ._gpt_experts import by_layer as by_layer
from ._gpt_experts import mix_residual, mixture
from ._gpt_leaves import Params
from ._gpt_leaves import weight as weight
from ._latent import LatentWeights, latent_attention

Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]


def block(
    config: Config,
    along: Along,
    tile: Wrap | None,
    p: Params,
    x_BTD: Tensor,
    table: Any,
    key: Tensor | None,
    index_B: Tensor | None,
    bias_E: Tensor | None = None,
    name: str = "blocks",
    mask_BT: Tensor | None = None,
    chosen_BTk: Tensor | None = None,
    *,
    rows_R: Tensor | None = None,
    load: bool = False,
) -> tuple[Tensor, Seen | None]:
    """Returns the stream after one layer, and the facts of its router if the layer has experts.

    `p` has the layer's leaves. `table` has attention's arguments for positions and documents. `bias_E` counts only in
    the choice. `mask_BT` is False for padding, which gets no expert. `chosen_BTk` is a choice of experts in place of
    the router's. With `rows_R` only these tokens continue, and the rest give only their keys and values. With `load`
    the facts have metrics.
    """
    k1, k2 = (None, None) if key is None else split(key).unbind()
    table = add_dropout(config, table, key, index_B)
    h_BTD, y_BTD = attend_part(config, along, p, x_BTD, table, rows_R)
    x_BTD = x_BTD if rows_R is None else x_BTD[:, rows_R]
    sum_BTD = x_BTD + dropout(config, along, k1, y_BTD, index_B)
    if config.parallel is None:
        x_BTD = sum_BTD
    elif config.parallel == "one_norm":
        x_BTD = h_BTD if rows_R is None else h_BTD[:, rows_R]
    y_BTD, seen = feed_part(config, along, tile, p, x_BTD, bias_E, name, mask_BT, chosen_BTk, load=load)
    return sum_BTD + dropout(config, along, k2, y_BTD, index_B), seen


def attend_part(
    config: Config, along: Along, p: Params, x_BTD: Tensor, table: dict[str, Any], rows_R: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Returns the input of attention after its norm, and the result, which the caller adds to the stream."""
    h_BTD = _norm_part(config, along, p, _NORM1, x_BTD)
    return h_BTD, _norm_part(config, along, p, _POST1, _attend_tokens(config, along, p, h_BTD, table, rows_R))


def feed_part(
    config: Config,
    along: Along,
    tile: Wrap | None,
    p: Params,
    x_BTD: Tensor,
    bias_E: Tensor | None = None,
    name: str = "blocks",
    mask_BT: Tensor | None = None,
    chosen_BTk: Tensor | None = None,
    *,
    load: bool = False,
) -> tuple[Tensor, Seen | None]:
    """Returns the result of MLP or experts, which the caller adds to the stream, and the facts of the router."""
    seen = None
    if "router" in p:
        h_BTD = _norm_part(config, along, p, _NORM2, x_BTD)
        y_BTD, seen = mixture(config, along, p, h_BTD, bias_E, name, mask_BT, chosen_BTk, load=load)
        if "w_down" in p:
            mlp_BTD = _apply_mlp(config, along, p, h_BTD, config.shared_ff_dim)
            y_BTD = mix_residual(config, along, p, y_BTD, mlp_BTD, h_BTD) if "mix" in p else y_BTD + mlp_BTD
        y_BTD = _norm_part(config, along, p, _POST2, y_BTD)
    else:
        feed = functools.partial(_feed_forward, config, along)
        # Only leaves of the MLP: a tiled function has all of its parameters gathered at once.
        y_BTD = (feed if tile is None else tile(feed))({name: p[name] for name in _FEED if name in p}, x_BTD)
    return y_BTD, seen


_NORM1, _NORM2, _POST1, _POST2 = ((f"{name}_w", f"{name}_b") for name in ("norm1", "norm2", "post1", "post2"))
_FEED = (*_NORM2, *_POST2, "w_gate", "w_up", "w_down", "b_up", "b_down")


def _feed_forward(config: Config, along: Along, p: Params, x_BTD: Tensor) -> Tensor:
    y_BTD = _apply_mlp(config, along, p, _norm_part(config, along, p, _NORM2, x_BTD), config.ff_dim)
    return _norm_part(config, along, p, _POST2, y_BTD)


def _norm_part(config: Config, along: Along, p: Params, names: tuple[str, str], x_BTD: Tensor) -> Tensor:
    """Returns the input or the result of a part of the block after a norm. Without the norm, it is unchanged."""
    w, b = names
    return norm(config, along, x_BTD, p[w], p.get(b)) if w in p else x_BTD


def _attend_tokens(
    config: Config, along: Along, p: Params, x_BTD: Tensor, table: dict[str, Any], rows_R: Tensor | None
) -> Tensor:
    if config.latent is not None:
        w = _make_latent_weights(config, along, p)
        how: Any = {"rows_R": rows_R, **table, **along._asdict()}
        return latent_attention(config.latent, config.num_heads, x_BTD, w, **how)
    weights, heads = attention_weights(config, p, swift="keys" in table and "s_wq" in p)
    norms = None if config.qk_norm is None else _make_head_norms(config, along, p)
    return nn.self_attention(x_BTD, weights, heads, norms=norms, rows_R=rows_R, **table, **along._asdict())


def attention_weights(config: Config, p: Params, *, swift: bool = False) -> tuple[nn.AttentionWeights, nn.Heads]:
    """Returns the weights of a layer's attention, with the queries of SwiftKV where asked for, and its heads."""
    query, bias = ("s_wq", "s_bq") if swift else ("wq", "bq")
    biases = (p.get(name) for name in (bias, "bk", "bv", "bo", "sinks"))
    weights = nn.AttentionWeights(*(weight(config, p[name]) for name in (query, "wk", "wv", "wo")), *biases)
    return weights, nn.Heads(config.num_heads, config.kv_heads, config.head_dim)


def _make_latent_weights(config: Config, along: Along, p: Params) -> LatentWeights:
    """Returns the weights of a layer's latent attention. Whole leaves are applied to this rank's tokens."""
    eps = config.latent.norm_eps if config.latent is not None else 0.0

    def whole(name: str) -> Any:
        w = p[name]
        return weight(config, w if isinstance(w, nn.BatchInvariantWeight) else nn.between(w, *along))

    def make_norm(name: str) -> Callable[[Tensor], Tensor]:
        run = nn.batch_invariant_rms_norm if config.batch_invariant else nn.rms_norm
        return functools.partial(run, w_D=nn.between(p[name], *along), eps=eps)

    of_queries: Any = (whole("wq_a"), make_norm("q_a_norm_w")) if "wq_a" in p else ()
    wq, wo = weight(config, p["wq"]), weight(config, p["wo"])
    return LatentWeights(wq, whole("wkv_a"), p["wk_b"], p["wv_b"], wo, make_norm("kv_a_norm_w"), *of_queries)


def _make_head_norms(config: Config, along: Along, p: Params) -> nn.HeadNorms:
    """Returns the norms of queries and keys (QK-norm) for the rank's heads. The norms' weights are replicated."""
    inside = Along()
    of_queries, of_keys = (
        functools.partial(norm, config, inside, w_D=pvary(p[name], along.axis), b_D=None)
        for name in ("q_norm_w", "k_norm_w")
    )
    return nn.HeadNorms(of_queries, of_keys, config.qk_norm == "joint")


def _apply_mlp(config: Config, along: Along, p: Params, x_BTD: Tensor, d_ff: int) -> Tensor:
    up_FD, down_DF = weight(config, p["w_up"]), weight(config, p["w_down"])
    if config.is_gated:
        gate: Any = {"gate": nn.gated_gelu} if config.mlp == "geglu" else {}
        gate_FD = weight(config, p["w_gate"])
        return nn.swiglu(x_BTD, gate_FD, up_FD, down_DF, d_ff=d_ff, **gate, **along._asdict())
    how: Any = {"act": config.mlp, "d_ff": d_ff}
    return nn.mlp(x_BTD, up_FD, down_DF, p.get("b_up"), p.get("b_down"), **how, **along._asdict())


def norm(config: Config, along: Along, x_BTD: Tensor, w_D: Tensor, b_D: Tensor | None) -> Tensor:
    """Returns the config's norm, applied to activations between blocks."""
    w_D, b_D = nn.between(w_D, *along), None if b_D is None else nn.between(b_D, *along)
    w_D = 1 + w_D if config.norm_plus_one else w_D
    if config.norm == "rms":
        return (nn.batch_invariant_rms_norm if config.batch_invariant else nn.rms_norm)(x_BTD, w_D, eps=config.norm_eps)
    return (nn.batch_invariant_layer_norm if config.batch_invariant else nn.layer_norm)(
        x_BTD, w_D, b_D, eps=config.norm_eps
    )


def score_arguments(config: Config, positions_T: Tensor, dtype: torch.dtype) -> dict[str, Any]:
    """Returns attention's arguments of all layers and heads: slopes of positions, scale and bound of scores."""
    out: dict[str, Any] = {} if config.attention_scale is None else {"scale": config.attention_scale}
    if config.latent is not None:
        # Bits of an engine, whose cache has latent rows.
        out |= {
            "scale": config.latent.find_scale(config.layer_settings[0].rope),
            "absorbed": config.batch_invariant,
        } | out
    out |= {} if config.softcap is None else {"softcap": config.softcap}
    if config.position != "alibi":
        return out
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    slopes_H = torch.tensor(nn.alibi_slopes(config.num_heads), dtype=wide, device=positions_T.device)
    return out | {"slopes_H": slopes_H}


def rope_table(config: Config, rope: nn.Rope, positions_T: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Returns the rotation of queries and keys by the positions of tokens."""
    if config.batch_invariant:
        dtype = torch.float64 if dtype == torch.float64 else torch.float32
    return rope.find_table(positions_T, config.rotary_dim, dtype=dtype, batch_invariant=config.batch_invariant)


def causal_mask(kind: LayerSettings) -> nn.Mask:
    """Returns the mask of a layer's tokens. Tokens look back."""
    return nn.Causal() if kind.window is None else nn.Window(kind.window - 1)


def add_dropout(config: Config, table: dict[str, Any], key: Tensor | None, index_B: Tensor | None) -> dict[str, Any]:
    """Returns the arguments of attention, with the dropout of a single block added."""
    if key is None or config.attention_dropout == 0:
        return table
    how, index_B = table["how"], _check_numbers(f"attention_dropout {config.attention_dropout}", index_B)
    # 0 and 1 are the keys of the residual branches.
    return table | {
        "how": how._replace(mask=how.mask & nn.PairDropout(fold_in(key, 2), config.attention_dropout, index_B))
    }


def _check_numbers(what: str, index_B: Tensor | None) -> Tensor:
    """Returns the samples' global numbers.

    Raises:
        ValueError: numbers are missing.
    """
    if index_B is None:
        raise ValueError(
            f"{what} needs the samples' global numbers, or ranks would share masks: pass index_B (in the batch:"
            " 'index'), int64 [B]. On one device torch.arange(B) will do."
        )
    return index_B


def dropout(config: Config, along: Along, key: Tensor | None, x_BTD: Tensor, index_B: Tensor | None) -> Tensor:
    """Returns `x_BTD` after dropout by global position, or unchanged without a key."""
    if key is None or config.dropout == 0:
        return x_BTD
    index_B = _check_numbers(f"dropout {config.dropout}", index_B)
    body, T = config.attention, x_BTD.shape[1] if along.sequence is None else along.sequence
    own = nn.shard_rows(body, T)
    own = own if along.sequence is None else nn.part_of(own, *nn.rank_range(T, along.axis))
    return nn.dropout_of_rows(key, x_BTD, config.dropout, index_B, own, nn.whole_length(body, T))
