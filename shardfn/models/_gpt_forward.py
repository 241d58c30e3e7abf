"""The forward pass of the GPT: from tokens to the residual stream after the last norm, and to logits.

B batch, T tokens, D model, V vocabulary.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from shardfn import nn
from shardfn.collectives import axis_size
from shardfn.core import split, uniform

from ._gpt_block import (
    Along,
    Seen,
    Wrap,
    block,
    by_layer,
    causal_mask,
    dropout,
    norm,
    rope_table,
    score_arguments,
    weight,
)
from ._gpt_config import Config, LayerSettings
from ._gpt_experts import check_bias, join_seen
from ._gpt_images import find_images, hide_logits, place_features, separate_images
from ._gpt_leaves import Params, check_blocks, layers_of
from ._gpt_swift import SwiftKeys

_WHOLE = Along()


def compute_hidden(
    config: Config,
    params: Params,
    batch: dict[str, Any],
    key: Tensor | None = None,
    wrap: Wrap = lambda inner: inner,
    along: Along = _WHOLE,
    tile: Wrap | None = None,
    bias: Tensor | Sequence[Tensor] | None = None,
    *,
    load: bool = False,
    chosen: Tensor | None = None,
) -> tuple[Tensor, Seen | None]:
    chosen = None if chosen is None else by_layer(config, chosen, batch["tokens"])
    check_bias(config, bias)
    if tile is not None and along.sequence is not None:
        raise ValueError("loss(tile=, sequence=True): layers along `axis` take a rank's tokens together. Drop one.")
    tokens_BT, index_B, mask_BT = batch["tokens"], batch.get("index"), batch.get("mask")
    positions_T = get_positions(config, tokens_BT) if batch.get("positions") is None else batch["positions"]
    if axis_size(along.axis) > 1:
        check_blocks(config, params, along.axis)
    anywhere = batch.get("positions") is not None
    x_BTD = embed_tokens(config, params, tokens_BT, positions_T, along, batch.get("image_features"), anywhere=anywhere)
    images_BT = find_images(config, tokens_BT)
    tables = make_tables(config, positions_T, x_BTD.dtype, batch.get("segment_ids"), images_BT)
    keys = [None] * (config.num_layers + 1) if key is None else split(key, config.num_layers + 1).unbind()
    x_BTD = dropout(config, along, keys[-1], x_BTD, index_B)
    run = wrap(functools.partial(block, config, along, tile, load=load))
    if config.stacked:
        x_BTD, seen = _scan_blocks(
            config, run, params["blocks"], x_BTD, tables, keys[:-1], index_B, bias, mask_BT, chosen
        )
    else:
        found, swift = list[Seen](), SwiftKeys(config, along, params)
        for i, (p, k) in enumerate(zip(params["blocks"], keys[:-1], strict=True)):
            own = (None if x is None or "router" not in p else x[len(found)] for x in (bias, chosen))
            bias_E, chosen_BTk = own
            table = swift.add_to(tables[i], i, x_BTD)
            x_BTD, one = run(p, x_BTD, table, k, index_B, bias_E, f"blocks.{i}", mask_BT, chosen_BTk)
            found += [] if one is None else [one]
        seen = join_seen(config, found)
    return norm(config, along, x_BTD, params["norm_w"], params.get("norm_b")), seen


def _scan_blocks(
    config: Config,
    block: Callable[..., Any],
    blocks: Params,
    x_BTD: Tensor,
    tables: Sequence[Any],
    keys: Sequence[Tensor | None],
    index_B: Tensor | None,
    bias: Any,
    mask_BT: Tensor | None,
    chosen: Tensor | None,
) -> tuple[Tensor, Seen | None]:
    num = config.layers_a_block
    keyed = None if keys[0] is None else torch.stack([k for k in keys if k is not None]).unflatten(0, (-1, num))

    def run_block(x_BTD: Tensor, x: Any) -> tuple[Tensor, Seen | None]:
        leaves, own_keys, take_bias, own_chosen = x
        seen, more = None, ("blocks", mask_BT, own_chosen)
        for i, p in enumerate(layers_of(config, leaves)):
            key = None if own_keys is None else own_keys[i]
            x_BTD, seen = block(p, x_BTD, tables[i], key, index_B, take_bias, *more)
        return x_BTD, seen

    return nn.scan(run_block, x_BTD, (blocks, keyed, bias, chosen))


def get_positions(config: Config, tokens_BT: Tensor) -> Tensor:
    """Returns the global positions of this rank's tokens.

    Raises:
        ValueError: the sequence is longer than the model's longest, or the tokens are not this rank's part.
    """
    T = tokens_BT.shape[1]
    length = nn.whole_length(config.attention, T)
    if length > config.max_len:
        raise ValueError(
            f"a sequence of {length} tokens for Config(max_len={config.max_len}). Cut it or raise max_len."
        )
    return nn.rank_positions(config.attention, T, tokens_BT.device)


def look_up_tokens(config: Config, params: Params, tokens_T: Tensor, along: Along) -> Tensor:
    """Returns the embeddings of tokens. With a leaf "spec", the embedding of the id V is the leaf."""
    table, how = params["embed"], {"vocab_size": config.vocab_size, **along._asdict()}
    if "spec" not in params:
        return scale_embeddings(config, nn.embedding(tokens_T, table, **how))
    is_spec_T = tokens_T == config.vocab_size
    x_TD = scale_embeddings(config, nn.embedding(tokens_T.masked_fill(is_spec_T, 0), table, **how))
    return torch.where(is_spec_T[..., None], params["spec"].to(x_TD.dtype), x_TD)


def embed_tokens(
    config: Config,
    params: Params,
    tokens_BT: Tensor,
    positions_T: Tensor,
    along: Along,
    features_ND: Tensor | None = None,
    *,
    anywhere: bool = False,
) -> Tensor:
    x_BTD = look_up_tokens(config, params, tokens_BT, along)
    x_BTD = place_features(config, x_BTD, tokens_BT, features_ND, along)
    if config.position == "learned":
        whole = not config.attention.axes and not anywhere
        table_TD = params["position"]
        x_BTD = x_BTD + nn.rank_tokens(table_TD[: positions_T.shape[0]] if whole else table_TD[positions_T], *along)
    if config.embedding_norm:
        x_BTD = norm(config, along, x_BTD, params["embed_norm_w"], params.get("embed_norm_b"))
    return x_BTD


def name_head(config: Config) -> str:
    """Returns the name of the leaf of the output layer."""
    return "embed" if config.tie_embeddings else "head"


def scale_embeddings(config: Config, x_D: Tensor) -> Tensor:
    """Returns the embeddings after their factor."""
    return x_D if config.embedding_scale is None else x_D * config.embedding_scale


def compute_logits(config: Config, params: Params, x_D: Tensor, along: Along) -> Tensor:
    """Returns the rank's logits of states after the last norm."""
    w_VD, b_V = weight(config, params[name_head(config)]), params.get("head_b")
    with nn.rounding_products(None):
        logits_V = nn.column_linear(x_D, w_VD, b_V, features=config.vocab_size, **along._asdict())
    logits_V = hide_logits(config, logits_V, along)
    if config.logits_softcap is None:
        return logits_V
    return nn.softcap(logits_V, config.logits_softcap, batch_invariant=config.batch_invariant)


def take_rows(config: Config, along: Along, x_BTD: Tensor, at_BS: Tensor) -> Tensor:
    if along.sequence is not None or config.attention.axes:
        cause = f"{config.attention}" if config.attention.axes else "sequence=True"
        raise ValueError(
            f"apply(at=) takes positions of whole rows, but with {cause} a rank has only some tokens of each row. Drop"
            f" one of the two. Got at of shape {tuple(at_BS.shape)}."
        )
    return x_BTD.gather(1, at_BS[..., None].expand(-1, -1, x_BTD.shape[-1]))


def make_tables(
    config: Config,
    positions_T: Tensor,
    dtype: torch.dtype,
    ids_BT: Tensor | None = None,
    images_BT: Tensor | None = None,
) -> list[dict[str, Any]]:
    """Returns attention's arguments of each layer, for positions and documents: of this rank's tokens and all heads."""
    more: nn.Mask = nn.Full()
    if config.layout is not None:
        more = more & config.layout(nn.whole_length(config.attention, len(positions_T)))
    if ids_BT is not None:
        more = more & nn.Segments(nn.whole_sequence(ids_BT, config.attention))
    impl = nn.BatchInvariant() if config.batch_invariant else config.attention
    impl = separate_images(config, impl, images_BT)
    shared = score_arguments(config, positions_T, dtype)
    ropes = dict.fromkeys(kind.rope for kind in config.layer_settings if kind.rope is not None)
    rotations = {rope: rope_table(config, rope, positions_T, dtype) for rope in ropes}

    def make_table(kind: LayerSettings) -> dict[str, Any]:
        mask = causal_mask(kind) & more if config.causal else more
        own: dict[str, Any] = {} if kind.rope is None else {"table": rotations[kind.rope]}
        return {"how": nn.Attending(mask, impl), **shared, **own}

    made = {kind: make_table(kind) for kind in dict.fromkeys(config.layer_settings)}
    return [made[kind] for kind in config.layer_settings]


def sample_tokens(logits_BV: Tensor, key: Tensor, temperature: float) -> Tensor:
    """Returns argmax(logits / temperature + Gumbel noise), or the likeliest tokens at temperature 0."""
    if temperature == 0:
        return logits_BV.argmax(-1)
    tiny = torch.finfo(torch.float32).tiny
    u_BV = uniform(key, logits_BV.shape, minval=tiny, device=logits_BV.device)
    return (logits_BV / temperature - (-u_BV.log()).log()).argmax(-1)
