"""The forward pass of an encoder-decoder model: layers of both halves, and the decoder over the cache of its layers.

B batch, F frames of features, M numbers of a frame, S source tokens, T target tokens, D model, G key heads, K head dim.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from shardfn import nn
from shardfn.collectives import axis_size, pvary
from shardfn.core import Axes, split

from ._gpt_block import Along, Seen, Wrap, add_dropout, attend_part, attention_weights, dropout, feed_part, norm
from ._gpt_config import Config as Half
from ._gpt_forward import compute_logits, embed_tokens, make_tables
from ._gpt_leaves import layers_of, unstack_blocks
from ._seq2seq_config import CROSS, Config, Params, check_leaves, relative_index

Table = dict[str, Any]


class EncodedSource(NamedTuple):
    """Result of the encoder, which the decoder's cross attention reads.

    Attributes:
        states: states of the source's tokens after the last norm.
        mask: False for padding, or None without padding.
    """

    states: Float[Tensor, "b s d"]
    mask: Bool[Tensor, "b s"] | None = None


class SourceKeys(NamedTuple):
    """Keys and values of one layer's cross attention, computed once for a source, and the body that reads them.

    Attributes:
        keys: keys and values of the rank. A body that holds its keys itself ignores them.
        how: mask of padding, and the body.
    """

    keys: nn.KeyValues
    how: nn.Attending


class ForwardSettings(NamedTuple):
    """Settings of one forward.

    Attributes:
        key: key of dropout, or None.
        samples: global numbers of the samples, or None.
        wrap: function applied to the function of a layer.
        along: axes that cut the layers.
        load: whether the facts of routers have metrics.
    """

    key: Tensor | None = None
    samples: Tensor | None = None
    wrap: Wrap = lambda inner: inner
    along: Along = Along()
    load: bool = False


def run_encoder(
    config: Config,
    params: Params,
    source_BS: Tensor,
    mask_BS: Tensor | None,
    settings: ForwardSettings,
    *,
    checked: bool = False,
) -> tuple[EncodedSource, list[Seen]]:
    """Returns the states of the source, and the facts of the encoder's routers. Packed leaves are `checked` before."""
    if not checked and axis_size(settings.along.axis) > 1:
        check_leaves(config, params, settings.along.axis)
    positions_S = _find_positions(config, "encoder", source_BS)
    x_BSD, found = _run_half(config, "encoder", params, source_BS, positions_S, mask_BS, settings)
    return EncodedSource(x_BSD, mask_BS), found


def run_decoder(
    config: Config,
    params: Params,
    tokens_BT: Tensor,
    mask_BT: Tensor | None,
    source: EncodedSource,
    settings: ForwardSettings,
) -> tuple[Tensor, list[Seen]]:
    """Returns the states that the output layer multiplies, and the facts of the decoder's routers."""
    if len(source.states) != len(tokens_BT):
        raise ValueError(
            f"seq2seq: {len(tokens_BT)} rows of decoder inputs for the states of {len(source.states)} sources. Give"
            " one source for each row."
        )
    if config.decoder.batch_invariant:
        raise ValueError(
            "seq2seq: decoder.batch_invariant=True is only for an engine, which asks for it itself. Take False."
        )
    positions_T = _find_positions(config, "decoder", tokens_BT)
    x_BTD, found = _run_half(config, "decoder", params, tokens_BT, positions_T, mask_BT, settings, source)
    return scale_states(config, x_BTD), found


def project_source(config: Config, params: Params, source: EncodedSource, *, axis: Axes = None) -> list[SourceKeys]:
    """Returns the keys and values of the source for each layer of the decoder: a cache that no token changes.

    Args:
        config: shape.
        params: parameters.
        source: states of `encode`.
        axis: mesh axes along which the leaves are cut.
    """
    how = _cross_mask(source.mask)
    return [
        SourceKeys(_project_keys(config.decoder, Along(axis), p, source.states), how)
        for p in unstack_blocks(config.decoder, params["decoder"])["blocks"]
    ]


def decode_hidden(
    config: Config,
    params: Params,
    tokens_BT: Int[Tensor, "b t"],
    positions_T: Int[Tensor, " t"],
    bodies: Sequence[nn.AttentionBackend],
    sources: Sequence[SourceKeys],
    *,
    axis: Axes = None,
) -> Float[Tensor, "b t d"]:
    """Returns the states that the output layer multiplies, of tokens whose earlier tokens are in a cache.

    Args:
        config: shape.
        params: parameters.
        tokens_BT: ids of the decoder's inputs.
        positions_T: their positions.
        bodies: bodies of self-attention, which keep keys and values of each layer of the decoder from call to call.
        sources: keys of the source for each layer, as from `project_source`.
        axis: mesh axes along which the leaves are cut.

    Raises:
        ValueError: bodies or keys are not one for each layer.
    """
    half, settings = config.decoder, ForwardSettings(along=Along(axis))
    for name, given in (("bodies", bodies), ("sources", sources)):
        if len(given) != half.num_layers:
            raise ValueError(f"decode: {len(given)} {name} for {half.num_layers} layers of the decoder. Pass one each.")
    p = params["decoder"]
    if half.position == "learned":
        params = params | {"decoder": p | {"position": p["position"][positions_T]}}
    p, x_BTD, tables, bias_HD = _begin_half(config, "decoder", params, tokens_BT, positions_T, settings)
    layers = unstack_blocks(half, p)["blocks"]
    for block, table, body, source in zip(layers, tables, bodies, sources, strict=True):
        own = table | {"how": table["how"]._replace(impl=body)}
        x_BTD, _ = run_layer(config, half, settings.along, block, x_BTD, own, bias_HD, source)
    return scale_states(config, _end_half(half, p, x_BTD, settings.along))


def logits_of(config: Config, params: Params, x_BTD: Tensor, along: Along) -> Tensor:
    """Returns the rank's logits of states."""
    return compute_logits(config.decoder, params, x_BTD, along)


def run_layer(
    config: Config,
    half: Half,
    along: Along,
    p: Params,
    x_BTD: Tensor,
    table: Table,
    bias_HD: Tensor | None = None,
    source: EncodedSource | SourceKeys | None = None,
    key: Tensor | None = None,
    index_B: Tensor | None = None,
    name: str = "blocks",
    mask_BT: Tensor | None = None,
    *,
    load: bool = False,
) -> tuple[Tensor, Seen | None]:
    """Returns the stream after one layer, and the facts of its router.

    With a source the layer is the decoder's. `bias_HD` has the numbers that self-attention adds to scores by distance.
    It is an argument, and no part of `table`, so that a recomputation has its gradient.
    """
    # Of residual branches, and of the probabilities of attention.
    k1, k2, k3, a1, a2 = (None,) * 5 if key is None else split(key, 5).unbind()
    add = functools.partial(_add_to_stream, config, half, along, index_B)
    how = table["how"]
    if bias_HD is not None:
        table = table | {"how": how._replace(mask=how.mask & nn.Relative(bias_HD))}
    own = {n: x for n, x in p.items() if not n.startswith(CROSS)}
    _, y_BTD = attend_part(half, along, _inner(config, own), x_BTD, add_dropout(half, table, a1, index_B))
    x_BTD = add(own, "norm1", k1, x_BTD, y_BTD)
    if source is not None:
        cross = _cross_leaves(p)
        if isinstance(source, EncodedSource):
            source = SourceKeys(_project_keys(half, along, p, source.states), _cross_mask(source.mask))
        table = {n: table[n] for n in ("scale", "softcap") if n in table} | {"how": source.how, "keys": source.keys}
        _, y_BTD = attend_part(half, along, _inner(config, cross), x_BTD, add_dropout(half, table, a2, index_B))
        x_BTD = add(cross, "norm1", k2, x_BTD, y_BTD)
    y_BTD, seen = feed_part(half, along, None, _inner(config, own), x_BTD, None, name, mask_BT, load=load)
    return add(own, "norm2", k3, x_BTD, y_BTD), seen


def _run_half(
    config: Config,
    name: str,
    params: Params,
    tokens_BT: Tensor,
    positions_T: Tensor,
    mask_BT: Tensor | None,
    settings: ForwardSettings,
    source: EncodedSource | None = None,
) -> tuple[Tensor, list[Seen]]:
    """Returns the states of one half after its last norm, and the facts of its routers."""
    half, found = config.halves[name], list[Seen]()
    p, x_BTD, tables, bias_HD = _begin_half(config, name, params, tokens_BT, positions_T, settings)
    keys = [None] * (half.num_layers + 1) if settings.key is None else split(settings.key, half.num_layers + 1).unbind()
    x_BTD = dropout(half, settings.along, keys[-1], x_BTD, settings.samples)
    run = settings.wrap(functools.partial(run_layer, config, half, settings.along, load=settings.load))
    tables = [_hide_padding(name, table, mask_BT) for table in tables]

    def run_one(i: int, block: Params, x_BTD: Tensor, key: Tensor | None, place: str) -> tuple[Tensor, Seen | None]:
        return run(block, x_BTD, tables[i], bias_HD, source, key, settings.samples, place, mask_BT)

    if half.stacked:
        x_BTD, seen = _scan_layers(half, p["blocks"], x_BTD, keys[:-1], functools.partial(run_one, place=name))
        return _end_half(half, p, x_BTD, settings.along), [] if seen is None else [seen]
    for i, (block, key) in enumerate(zip(p["blocks"], keys[:-1], strict=True)):
        x_BTD, seen = run_one(i, block, x_BTD, key, f"{name}.blocks.{i}")
        found += [] if seen is None else [seen]
    return _end_half(half, p, x_BTD, settings.along), found


def _scan_layers(
    half: Half, blocks: Params, x_BTD: Tensor, keys: Sequence[Tensor | None], run: Callable[..., Any]
) -> tuple[Tensor, Seen | None]:
    """Returns the states after all stacked layers of a half, and the facts of all routers, stacked."""
    num = half.layers_a_block
    keyed = None if keys[0] is None else torch.stack([k for k in keys if k is not None]).unflatten(0, (-1, num))

    def run_block(x_BTD: Tensor, x: Any) -> tuple[Tensor, Seen | None]:
        block, own_keys = x
        seen = None
        for i, p in enumerate(layers_of(half, block)):
            x_BTD, seen = run(i, p, x_BTD, None if own_keys is None else own_keys[i])
        return x_BTD, seen

    return nn.scan(run_block, x_BTD, (blocks, keyed))


def _begin_half(
    config: Config, name: str, params: Params, tokens_BT: Tensor, positions_T: Tensor, settings: ForwardSettings
) -> tuple[Params, Tensor, list[Table], Tensor | None]:
    """Returns a half's leaves, the embedded tokens, arguments of attention by layer, and relative positions."""
    half, p = config.halves[name], params[name]
    if name == "encoder" and config.features is not None:
        x_BTD = _embed_features(p, tokens_BT)
    else:
        x_BTD = embed_tokens(half, p | {"embed": params["embed"]}, tokens_BT, positions_T, settings.along)
    bias_HD = _look_up_distances(config, name, p, settings.along)
    return p, x_BTD, make_tables(half, positions_T, x_BTD.dtype), bias_HD


def _embed_features(p: Params, features_BFM: Tensor) -> Tensor:
    """Returns the states of a source's frames: two convolutions. The second takes every second frame."""
    x_BFD = F.gelu(_convolve(features_BFM, p["conv1_w"], p["conv1_b"]))
    x_BSD = F.gelu(_convolve(x_BFD, p["conv2_w"], p["conv2_b"], stride=2))
    return x_BSD + p["position"][: x_BSD.shape[1]]


def _convolve(x_BFM: Tensor, w_DM3: Tensor, b_D: Tensor, *, stride: int = 1) -> Tensor:
    """Returns a convolution over frames by three weights a number, with a frame of zeros at both ends."""
    num, padded = x_BFM.shape[1], F.pad(x_BFM, (0, 0, 1, 1))
    windows = torch.cat([padded[:, i : i + num : stride] for i in range(3)], -1)
    return F.linear(windows, w_DM3.transpose(1, 2).flatten(1), b_D)


def _look_up_distances(config: Config, name: str, p: Params, along: Along) -> Tensor | None:
    """Returns the numbers that self-attention adds to scores by distance, [H, 2 max_distance + 1]."""
    if config.buckets is None:
        return None
    table_NH = pvary(p["relative"], along.axis)  # ranks read the numbers of their heads
    return table_NH[relative_index(config, name, table_NH.device)].T.contiguous()


def _hide_padding(name: str, table: Table, mask_BT: Tensor | None) -> Table:
    """Returns the arguments of self-attention that reads no padding. Padding of targets comes after all tokens."""
    if mask_BT is None or name == "decoder":
        return table
    how = table["how"]
    return table | {"how": how._replace(mask=how.mask & nn.Keys(mask_BT))}


def embed_pair(config: Config, params: Params, batch: Table, key: Tensor | None, along: Along) -> Table:
    """Returns what the first stage of a pipeline sends: both streams, the masks, and the sum of balance losses."""
    h: Table = {name: batch[name] for name in ("source_mask", "mask") if batch.get(name) is not None}
    h |= {} if key is None or batch.get("index") is None else {"index": batch["index"]}
    keys = [None, None] if key is None else split(key, 2).unbind()
    streams = {"source": ("encoder", batch["source"]), "target": ("decoder", batch["tokens"])}
    for own, (stream, (name, tokens_BT)) in zip(keys, streams.items(), strict=True):
        half, positions_T = config.halves[name], _find_positions(config, name, tokens_BT)
        leaves = params[name] | {"embed": params["embed"]}
        x_BTD = embed_tokens(half, leaves, tokens_BT, positions_T, along)
        h[stream] = dropout(half, along, own, x_BTD, batch.get("index"))
    if any(half.experts is not None for half in config.halves.values()):
        # A sum of no tokens is 0, and varies along the axes of the tokens, as the balance of layers does.
        h["balance"] = batch["tokens"].flatten()[:0].sum().to(h["target"].dtype)
    return h


def list_stage_leaves(config: Config, params: Params) -> list[Params]:
    """Returns the leaves of each function of `run_stage`: of the layers of the encoder, and then of the decoder.

    All layers of a half read its relative positions, and the last layer its last norm.
    """
    out = list[Params]()
    for name in config.halves:
        p = params[name]
        shared = {n: p[n] for n in ("relative",) if n in p}
        layers = [{**block, **shared} for block in p["blocks"]]
        layers[-1] |= {n: p[n] for n in ("norm_w", "norm_b") if n in p}
        out += layers
    return out


def run_stage(config: Config, name: str, i: int, along: Along, p: Params, h: Table, key: Tensor | None = None) -> Table:
    """Runs one layer of a half on the half's stream. The encoder's last layer ends with the encoder's last norm."""
    half, stream = config.halves[name], "source" if name == "encoder" else "target"
    x_BTD, mask_BT = h[stream], h.get("source_mask" if name == "encoder" else "mask")
    positions_T = torch.arange(x_BTD.shape[1], device=x_BTD.device)
    table = _hide_padding(name, make_tables(half, positions_T, x_BTD.dtype)[i], mask_BT)
    source = EncodedSource(h["source"], h.get("source_mask")) if name == "decoder" else None
    bias_HD = _look_up_distances(config, name, p, along)
    own = {n: x for n, x in p.items() if n not in ("relative", "norm_w", "norm_b")}
    more = bias_HD, source, key, h.get("index"), f"{name}.blocks.{i}", mask_BT
    x_BTD, seen = run_layer(config, half, along, own, x_BTD, table, *more)
    x_BTD = _end_half(half, p, x_BTD, along)
    if seen is None:
        return h | {stream: x_BTD}
    num = sum(len(each.expert_layers) for each in config.halves.values())
    return h | {stream: x_BTD, "balance": h["balance"] + seen.loss / num}


def scale_states(config: Config, x_BTD: Tensor) -> Tensor:
    """Returns the states that the output layer multiplies, after their factor."""
    return x_BTD if config.logits_scale is None else x_BTD * config.logits_scale


def _end_half(half: Half, p: Params, x_BTD: Tensor, along: Along) -> Tensor:
    return norm(half, along, x_BTD, p["norm_w"], p.get("norm_b")) if "norm_w" in p else x_BTD


def _add_to_stream(
    config: Config,
    half: Half,
    along: Along,
    index_B: Tensor | None,
    p: Params,
    name: str,
    key: Tensor | None,
    x_BTD: Tensor,
    y_BTD: Tensor,
) -> Tensor:
    """Returns the sum of the stream and a part's result, after a norm where the config has it there."""
    x_BTD = x_BTD + dropout(half, along, key, y_BTD, index_B)
    return norm(half, along, x_BTD, p[f"{name}_w"], p.get(f"{name}_b")) if config.norm_sums else x_BTD


def _inner(config: Config, p: Params) -> Params:
    """Returns the leaves of a layer that its parts read: without norms that come after the sums."""
    return {n: x for n, x in p.items() if not n.startswith("norm")} if config.norm_sums else p


def _cross_leaves(p: Params) -> Params:
    """Returns the leaves of cross attention under the names of self-attention."""
    return {n.removeprefix(CROSS): x for n, x in p.items() if n.startswith(CROSS)}


def _project_keys(half: Half, along: Along, p: Params, states_BSD: Tensor) -> nn.KeyValues:
    weights, heads = attention_weights(half, _cross_leaves(p))
    return nn.project_keys(states_BSD, weights, heads, **along._asdict())


def _cross_mask(mask_BS: Tensor | None) -> nn.Attending:
    return nn.Attending(nn.Full() if mask_BS is None else nn.Keys(mask_BS))


def _find_positions(config: Config, name: str, tokens_BT: Tensor) -> Tensor:
    """Returns the positions of a half's tokens.

    Raises:
        ValueError: there are more tokens than learned positions.
    """
    half, T = config.halves[name], tokens_BT.shape[1]
    if name == "encoder" and config.features is not None:
        if tokens_BT.ndim != 3 or tokens_BT.shape[2] != config.features or not tokens_BT.is_floating_point():
            raise ValueError(
                f"a source must be features, float [B, F, {config.features}], got {tokens_BT.dtype} of shape"
                f" {tuple(tokens_BT.shape)}."
            )
        T = (T + 1) // 2
    if half.position == "learned" and half.max_len < T:
        what = "source" if name == "encoder" else "target"
        raise ValueError(
            f"a {what} of {T} tokens for Config({name}=Config(max_len={half.max_len})), whose positions are learned."
            " Cut it or raise max_len."
        )
    return torch.arange(T, device=tokens_BT.device)
