"""One block of the transformer, on this rank's part of the block: x += attn(norm(x)), x += mlp(norm(x)), and dropout.

B batch, T tokens, D model, H heads.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shardfn import nn
from shardfn.core import fold_in, split

from ._gpt_config import Config
from ._gpt_experts import Along as Along
from ._gpt_experts import Seen as Seen
from ._gpt_experts import by_layer as by_layer
from ._gpt_experts import mix_residual, mixture
from ._gpt_leaves import Params
from ._gpt_leaves import weight as weight

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
    the router's. With `rows_R` only these tokens go on, and the rest give only their keys and values. With `load` the
    facts have metrics.
    """
    k1, k2 = (None, None) if key is None else split(key).unbind()
    table = _add_dropout(config, table, key, index_B)
    y_BTD = _attend_tokens(config, along, p, norm(config, along, x_BTD, p["norm1_w"], p.get("norm1_b")), table, rows_R)
    x_BTD = x_BTD if rows_R is None else x_BTD[:, rows_R]
    x_BTD = x_BTD + dropout(config, along, k1, y_BTD, index_B)
    seen = None
    if "router" in p:
        h_BTD = norm(config, along, x_BTD, p["norm2_w"], p.get("norm2_b"))
        y_BTD, seen = mixture(config, along, p, h_BTD, bias_E, name, mask_BT, chosen_BTk, load=load)
        if "w_down" in p:
            mlp_BTD = _apply_mlp(config, along, p, h_BTD)
            y_BTD = mix_residual(config, along, p, y_BTD, mlp_BTD, h_BTD) if "mix" in p else y_BTD + mlp_BTD
    else:
        feed = functools.partial(_feed_forward, config, along)
        # Only leaves of the MLP: a tiled function has all of its parameters gathered at once.
        y_BTD = (feed if tile is None else tile(feed))({name: p[name] for name in _FEED if name in p}, x_BTD)
    return x_BTD + dropout(config, along, k2, y_BTD, index_B), seen


_FEED = ("norm2_w", "norm2_b", "w_gate", "w_up", "w_down", "b_up", "b_down")


def _feed_forward(config: Config, along: Along, p: Params, x_BTD: Tensor) -> Tensor:
    return _apply_mlp(config, along, p, norm(config, along, x_BTD, p["norm2_w"], p.get("norm2_b")))


def _attend_tokens(
    config: Config, along: Along, p: Params, x_BTD: Tensor, table: dict[str, Any], rows_R: Tensor | None
) -> Tensor:
    biases = (p.get(name) for name in ("bq", "bk", "bv", "bo"))
    weights = nn.AttentionWeights(*(weight(config, p[name]) for name in ("wq", "wk", "wv", "wo")), *biases)
    heads = nn.Heads(config.num_heads, config.kv_heads, config.head_dim)
    return nn.self_attention(x_BTD, weights, heads, rows_R=rows_R, **table, **along._asdict())


def _apply_mlp(config: Config, along: Along, p: Params, x_BTD: Tensor) -> Tensor:
    up_FD, down_DF = weight(config, p["w_up"]), weight(config, p["w_down"])
    if config.mlp == "swiglu":
        gate_FD = weight(config, p["w_gate"])
        return nn.swiglu(x_BTD, gate_FD, up_FD, down_DF, d_ff=config.ff_dim, **along._asdict())
    biases = p.get("b_up"), p.get("b_down")
    return nn.mlp(x_BTD, up_FD, down_DF, *biases, d_ff=config.ff_dim, **along._asdict())


def norm(config: Config, along: Along, x_BTD: Tensor, w_D: Tensor, b_D: Tensor | None) -> Tensor:
    """Returns the config's norm, applied to activations between blocks."""
    w_D, b_D = nn.between(w_D, *along), None if b_D is None else nn.between(b_D, *along)
    if config.norm == "rms":
        return (nn.batch_invariant_rms_norm if config.batch_invariant else nn.rms_norm)(x_BTD, w_D, eps=config.norm_eps)
    return (nn.batch_invariant_layer_norm if config.batch_invariant else nn.layer_norm)(
        x_BTD, w_D, b_D, eps=config.norm_eps
    )


def position_tables(config: Config, positions_T: Tensor, dtype: torch.dtype) -> dict[str, Any]:
    """Returns attention's arguments for the positions of tokens, of all heads."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    if config.position == "rope" and config.batch_invariant:
        return {"table": nn.batch_invariant_rope_table(positions_T, config.head_dim, base=config.rope_base, dtype=wide)}
    if config.position == "rope":
        return {"table": nn.rope_table(positions_T, config.head_dim, base=config.rope_base, dtype=dtype)}
    if config.position == "alibi":
        return {"slopes_H": torch.tensor(nn.alibi_slopes(config.num_heads), dtype=wide, device=positions_T.device)}
    return {}


def _add_dropout(config: Config, table: dict[str, Any], key: Tensor | None, index_B: Tensor | None) -> dict[str, Any]:
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
            " 'index'), int64 [B]; on one device torch.arange(B) will do."
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
