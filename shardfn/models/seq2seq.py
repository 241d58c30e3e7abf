"""A transformer of an encoder and a decoder: T5, BART and Whisper are settings of a `Config`.

The encoder reads all tokens of a source. Each layer of the decoder attends to earlier tokens of the target, and then to
the encoder's result. Both halves are `gpt.Config`s, so that norms, MLPs and experts are those of `models.gpt`.

An engine decodes tokens of many sequences in one call, over caches of the decoder's layers. With a batch-invariant
decoder, a token's logits have the same bits next to any other tokens. The encoder reads one source at a time.

B batch, S source tokens, T target tokens, D model, H heads, G key heads, K head dim, R rows whose logits are wanted,
N relative buckets, V vocabulary.

Vaswani et al., Attention Is All You Need, 2017, https://arxiv.org/abs/1706.03762
Raffel et al., Exploring the Limits of Transfer Learning with a Unified Text-to-Text Transformer, 2020,
https://arxiv.org/abs/1910.10683
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float, Int, Int64
from torch import Tensor

from shardfn import nn
from shardfn.collectives import all_gather_invariant
from shardfn.core import Axes, PyTree, fold_in

from ._gpt_block import Along, Seen, Wrap
from ._gpt_block import Along as _Along
from ._gpt_decode import LINEAR, drop_losses, pack_weight
from ._gpt_forward import name_head
from ._gpt_forward import sample_tokens as _sample_tokens
from ._gpt_loss import compute_mean as _compute_mean
from ._gpt_loss import shifted as _shifted
from ._gpt_stages import Stages as _Stages
from ._seq2seq_config import CROSS, block_shapes, check_leaves
from ._seq2seq_config import Config as Config
from ._seq2seq_config import Params as Params
from ._seq2seq_config import init as init
from ._seq2seq_config import leaf_shapes as leaf_shapes
from ._seq2seq_config import num_params as num_params
from ._seq2seq_config import replace_half as replace_half
from ._seq2seq_config import replace_halves as replace_halves
from ._seq2seq_config import specs as specs
from ._seq2seq_config import unstack as unstack
from ._seq2seq_forward import EncodedSource as EncodedSource
from ._seq2seq_forward import ForwardSettings, decode_hidden, logits_of, run_encoder
from ._seq2seq_forward import ForwardSettings as _Settings
from ._seq2seq_forward import SourceKeys as SourceKeys
from ._seq2seq_forward import decode_hidden as _decode_hidden
from ._seq2seq_forward import embed_pair as _embed_pair
from ._seq2seq_forward import list_stage_leaves as _list_stage_leaves
from ._seq2seq_forward import logits_of as _logits_of
from ._seq2seq_forward import project_source as project_source
from ._seq2seq_forward import run_decoder as _run_decoder
from ._seq2seq_forward import run_encoder as _run_encoder
from ._seq2seq_forward import run_stage as _run_stage
from ._seq2seq_forward import scale_states as _scale_states


def encode(
    config: Config,
    params: Params,
    source_BS: Int64[Tensor, "b s"] | Float[Tensor, "b f m"],
    *,
    mask: Bool[Tensor, "b s"] | None = None,
    axis: Axes = None,
) -> EncodedSource:
    """Returns the encoder's result for sources.

    Args:
        config: shape.
        params: parameters as from `init`.
        source_BS: ids of the sources, or features of their frames.
        mask: False for padding, which no token attends to.
        axis: mesh axes along which `specs(config, tp=axis)` cuts the leaves. None is a single device.

    Example:
        >>> import shardfn.core as core
        >>> config = Config.t5_like(vocab_size=64, num_layers=1, d_model=32, num_heads=4, d_head=8)
        >>> encode(config, init(config, core.key(0)), torch.zeros(2, 5, dtype=torch.int64)).states.shape
        torch.Size([2, 5, 32])
    """
    return _run_encoder(config, params, source_BS, mask, _Settings(along=_Along(axis)))[0]


def apply(
    config: Config,
    params: Params,
    source_BS: Int64[Tensor, "b s"] | Float[Tensor, "b f m"],
    tokens_BT: Int64[Tensor, "b t"],
    *,
    source_mask: Bool[Tensor, "b s"] | None = None,
    key: Int64[Tensor, "2"] | None = None,
    index_B: Int64[Tensor, " b"] | None = None,
    wrap: Wrap = lambda inner: inner,
    axis: Axes = None,
) -> Float[Tensor, "b t v"]:
    """Returns logits of the next token of the target at each position.

    Args:
        config: shape.
        params: parameters as from `init`.
        source_BS: ids of the sources, or features of their frames.
        tokens_BT: inputs of the decoder: `config.start`, and then the target without its last token.
        source_mask: False for padding of the sources.
        key: key that turns dropout on.
        index_B: global numbers of the samples, needed where dropout is on.
        wrap: function applied to the function of a layer, as in `wrap=remat` (activation checkpointing).
        axis: mesh axes along which `specs(config, tp=axis)` cuts the leaves. None is a single device.

    Returns:
        [B, T, V]: all logits, or this rank's part of V.

    Raises:
        ValueError: more tokens than learned positions, numbers of sources and targets that differ, dropout without
            `index_B`, or leaves that are not cut along `axis`.

    Example:
        >>> import shardfn.core as core
        >>> config = Config.t5_like(vocab_size=64, num_layers=1, d_model=32, num_heads=4, d_head=8)
        >>> source, tokens = torch.zeros(2, 7, dtype=torch.int64), torch.zeros(2, 5, dtype=torch.int64)
        >>> apply(config, init(config, core.key(0)), source, tokens).shape
        torch.Size([2, 5, 64])
    """
    batch = {"source": source_BS, "source_mask": source_mask, "tokens": tokens_BT, "index": index_B}
    along = _Along(axis)
    x_BTD, _ = _compute_hidden(config, params, batch, key, wrap, along)
    return _logits_of(config, params, x_BTD, along)


def loss(
    config: Config,
    params: Params,
    batch: dict[str, Any],
    key: Int64[Tensor, "2"] | None = None,
    *,
    wrap: Wrap = lambda inner: inner,
    axis: Axes = None,
) -> Any:
    """Returns the mean cross entropy of each token of the target given the source and earlier tokens.

    With experts, the mean of the balance losses of all layers with experts is added.

    Args:
        config: shape.
        params: parameters as from `init`.
        batch: {"source": int64 [B, S], or features, float [B, F, M], "targets": int64 [B, T]}, with -100 for targets
            that do not count. The decoder's inputs are `config.start` and the targets without the last, or "tokens",
            int64 [B, T]. Or {"source", "tokens"} with tokens [B, T + 1] that begin with `config.start`. "source_mask",
            bool [B, S], is False for padding of sources, and "mask", shaped as "tokens", for padding of targets.
            Padding gets no expert. Where dropout is on also "index": int64 [B], global sample numbers.
        key: key that turns dropout on.
        wrap: function applied to the function of a layer.
        axis: mesh axes along which `specs(config, tp=axis)` cuts the leaves. None is a single device.

    Returns:
        A 0-d tensor, or a WeightedMean with "targets" or "mask" in the batch.

    Raises:
        TypeError: the batch has no source of integers, [B, S].
        ValueError: as `apply`, or there are no decoder inputs, or a mask does not fit.

    Example:
        >>> import shardfn.core as core
        >>> config = Config.t5_like(vocab_size=64, num_layers=1, d_model=32, num_heads=4, d_head=8)
        >>> batch = {"source": torch.zeros(2, 7, dtype=torch.int64), "tokens": torch.zeros(2, 6, dtype=torch.int64)}
        >>> loss(config, init(config, core.key(0)), batch).shape
        torch.Size([])
    """
    weighted = isinstance(batch, Mapping) and ("targets" in batch or "mask" in batch)
    batch, along = _read_batch(config, batch), _Along(axis)
    x_BTD, found = _compute_hidden(config, params, batch, key, wrap, along)
    extra = torch.cat([seen.loss.flatten() for seen in found]).mean() if found else None
    return _compute_mean(config.decoder, params, x_BTD, batch, along, extra, weighted=weighted)


def stages(config: Config, *, wrap: Wrap = lambda inner: inner, axis: Axes = None) -> _Stages:
    """Returns `loss` as parts of a pipeline: the layers of the encoder, and then the layers of the decoder.

        pipeline(*stages(config), blocks=functools.partial(stage_leaves, config), axis="pp")

    Ranks send both streams. The encoder's stream stays as it is once its last layer has run, and the layers of the
    decoder read it. Layers of the two halves have different leaves, so they are not stacked: each rank has all leaves,
    which ZeRO cuts along other axes, and the specs are `specs(config)`. A pipeline gives each layer a separate key, so
    dropout masks differ from `loss`'s masks.

    Args:
        config: shape.
        wrap: function applied to the function of each layer, as in `wrap=remat` (activation checkpointing).
        axis: mesh axes along which `specs(config, tp=axis)` cuts the leaves. None is a single device.

    Raises:
        ValueError: layers are stacked.

    Example:
        >>> import shardfn.core as core
        >>> from shardfn.transforms import pipeline
        >>> config = Config.t5_like(vocab_size=64, num_layers=1, d_model=32, num_heads=4, d_head=8)
        >>> params, ids = init(config, core.key(0)), torch.zeros(2, 6, dtype=torch.int64)
        >>> staged = pipeline(*stages(config), blocks=functools.partial(stage_leaves, config), num_microbatches=2)
        >>> batch = {"source": ids, "tokens": ids}
        >>> torch.allclose(staged(params, batch), loss(config, params, batch))
        True
    """
    if config.features is not None:
        raise ValueError(
            f"seq2seq.stages: sources must be token ids, got features={config.features}. Train without a pipeline."
        )
    if any(half.stacked for half in config.halves.values()):
        raise ValueError(
            "seq2seq.stages: layers must be lists, got stacked=True. Use seq2seq.unstack, or stacked=False."
        )
    along = _Along(axis)

    def run_first(params: Params, batch: dict[str, Any], key: Tensor | None = None) -> dict[str, Tensor]:
        return _embed_pair(config, params, _read_batch(config, batch), key, along)

    def run_last(params: Params, h: dict[str, Tensor], batch: dict[str, Any], key: Tensor | None = None) -> Any:
        del key
        weighted, batch = "targets" in batch or "mask" in batch, _read_batch(config, batch)
        x_BTD = _scale_states(config, h["target"])
        return _compute_mean(config.decoder, params, x_BTD, batch, along, h.get("balance"), weighted=weighted)

    layers = [
        wrap(functools.partial(_run_stage, config, name, i, along))
        for name, half in config.halves.items()
        for i in range(half.num_layers)
    ]
    return _Stages(run_first, layers, run_last)


def stage_leaves(config: Config, params: Params) -> list[Params]:
    """Returns the leaves of each layer of `stages`, the argument `blocks` of a pipeline.

    All layers of a half share the relative positions of the half.

    Example:
        >>> import shardfn.core as core
        >>> config = Config.t5_like(vocab_size=64, num_layers=2, d_model=32, num_heads=4, d_head=8)
        >>> len(stage_leaves(config, init(config, core.key(0))))
        4
    """
    return _list_stage_leaves(config, params)


def shift_right(config: Config, targets_BT: Int64[Tensor, "b t"]) -> Int64[Tensor, "b t"]:
    """Returns the decoder's inputs of targets: `config.start`, and then the targets without the last.

    Args:
        config: shape.
        targets_BT: targets. -100 becomes `config.start`.

    Example:
        >>> shift_right(Config.t5_like(vocab_size=64), torch.tensor([[5, 6, 1, -100]])).tolist()
        [[0, 5, 6, 1]]
    """
    before = targets_BT.new_full((len(targets_BT), 1), config.start)
    return torch.cat([before, targets_BT[:, :-1]], 1).masked_fill(
        torch.cat([torch.zeros_like(before), targets_BT[:, :-1]], 1) < 0, config.start
    )


def decode(
    config: Config,
    params: Params,
    tokens_BT: Int64[Tensor, "b t"],
    positions_T: Int64[Tensor, " t"],
    bodies: list[nn.AttentionBackend],
    sources: list[SourceKeys],
    *,
    axis: Axes = None,
) -> Float[Tensor, "b t v"]:
    """Returns logits of tokens whose earlier tokens, and whose source, are in a cache.

    Args:
        config: shape.
        params: parameters as from `init`.
        tokens_BT: next inputs of the decoder.
        positions_T: positions of the inputs.
        bodies: bodies of self-attention, one for each layer of the decoder, which keep keys and values from a single
            call to the next, such as `KeyCache()`.
        sources: keys of the source for each layer, from `project_source`. No call changes them.
        axis: mesh axes along which `specs(config, tp=axis)` cuts the leaves. None is a single device.

    Returns:
        [B, T, V], whole on all ranks.

    Raises:
        ValueError: bodies or keys are not one for each layer.

    Example:
        >>> import shardfn.core as core
        >>> config = Config.t5_like(vocab_size=64, num_layers=1, d_model=32, num_heads=4, d_head=8)
        >>> params, source, tokens = init(config, core.key(0)), torch.tensor([[5, 6, 7]]), torch.tensor([[0, 8, 9]])
        >>> keys, bodies = project_source(config, params, encode(config, params, source)), [KeyCache()]
        >>> first = decode(config, params, tokens[:, :2], torch.arange(2), bodies, keys)
        >>> last = decode(config, params, tokens[:, 2:], torch.arange(2, 3), bodies, keys)
        >>> torch.allclose(last, apply(config, params, source, tokens)[:, 2:], atol=1e-6)
        True
    """
    x_BTD = _decode_hidden(config, params, tokens_BT, positions_T, bodies, sources, axis=axis)
    own_BTV = _logits_of(config, params, x_BTD, _Along(axis))
    return all_gather_invariant(own_BTV, axis, dim=-1, size=config.decoder.vocab_size)


@dataclasses.dataclass(eq=False)
class KeyCache(nn.Local):
    """Body of self-attention that appends the keys and values of each call, for `decode`.

    Attributes:
        keys: keys so far.
        values: values so far.
    """

    keys: Float[Tensor, "b s g k"] | None = None
    values: Float[Tensor, "b s g k"] | None = None

    def attend(self, q_BTHK: Tensor, k_BSGK: Tensor, v_BSGK: Tensor, how: nn.OnlineScores, length: int) -> Tensor:
        """Returns the attention of the last tokens over all tokens so far."""
        del length
        self.keys = k_BSGK if self.keys is None else torch.cat([self.keys, k_BSGK], 1)
        self.values = v_BSGK if self.values is None else torch.cat([self.values, v_BSGK], 1)
        end = self.keys.shape[1]
        queries, keys, device = (end - q_BTHK.shape[1], end), (0, end), q_BTHK.device
        bias, pairs = how.bias(queries, keys, device), how.mask.pairs(queries, keys, device)
        numbers = torch.zeros_like(pairs, dtype=q_BTHK.dtype) if bias is None else bias
        added = nn.Added(numbers.masked_fill(~pairs, -torch.inf))
        how = how._replace(mask=added, slopes_H=None)
        return nn.Dense().attend(q_BTHK, self.keys, self.values, how, end)


@torch.no_grad()
def generate(
    config: Config,
    params: Params,
    source_BS: Int64[Tensor, "b s"] | Float[Tensor, "b f m"],
    num_tokens: int,
    key: Int64[Tensor, "2"],
    temperature: float = 1.0,
    *,
    mask: Bool[Tensor, "b s"] | None = None,
    axis: Axes = None,
) -> Int64[Tensor, "b t"]:
    """Samples targets: argmax(logits / temperature + Gumbel noise), token by token, over a cache.

    The encoder runs once. The noise is a function of (key, step).

    Args:
        config: shape.
        params: parameters as from `init`.
        source_BS: ids of the sources, or features of their frames.
        num_tokens: number of tokens to draw.
        key: key of the noise.
        temperature: divisor of logits. 0 takes the likeliest token.
        mask: False for padding of the sources.
        axis: mesh axes along which the leaves are cut, as in `apply`.

    Returns:
        The drawn tokens, without `config.start`.

    Raises:
        ValueError: a negative temperature, or more tokens than learned positions.

    Example:
        >>> import shardfn.core as core
        >>> config = Config.t5_like(vocab_size=64, num_layers=1, d_model=32, num_heads=4, d_head=8)
        >>> generate(config, init(config, core.key(0)), torch.tensor([[5, 6, 7]]), 4, core.key(1)).shape
        torch.Size([1, 4])
    """
    half = config.decoder
    if temperature < 0 or (half.position == "learned" and num_tokens > half.max_len):
        raise ValueError(
            f"generate: temperature must be 0 or more, got {temperature}, and num_tokens at most the learned positions,"
            f" got {num_tokens} for decoder.max_len={half.max_len}."
        )
    source = encode(config, params, source_BS, mask=mask, axis=axis)
    sources = project_source(config, params, source, axis=axis)
    bodies: list[nn.AttentionBackend] = [KeyCache() for _ in range(half.num_layers)]
    drawn_BT = torch.full((len(source_BS), 1), config.start, device=source_BS.device)
    for step in range(num_tokens):
        at_T = torch.arange(step, step + 1, device=source_BS.device)
        logits_BTV = decode(config, params, drawn_BT[:, -1:], at_T, bodies, sources, axis=axis)
        next_B = _sample_tokens(logits_BTV[:, -1].float(), fold_in(key, step), temperature)
        drawn_BT = torch.cat([drawn_BT, next_B[:, None]], 1)
    return drawn_BT[:, 1:]


def _compute_hidden(
    config: Config, params: Params, batch: dict[str, Any], key: Tensor | None, wrap: Wrap, along: _Along
) -> tuple[Tensor, list[Seen]]:
    """Returns the states that the output layer multiplies, and the facts of all routers."""
    keys = [None, None] if key is None else [fold_in(key, 0), fold_in(key, 1)]
    first, second = (_Settings(k, batch.get("index"), wrap, along) for k in keys)
    source, seen = _run_encoder(config, params, batch["source"], batch.get("source_mask"), first)
    x_BTD, more = _run_decoder(config, params, batch["tokens"], batch.get("mask"), source, second)
    return x_BTD, seen + more


def _read_batch(config: Config, batch: Any) -> dict[str, Any]:
    """Returns a batch with "tokens" and "targets" of equal shape.

    Raises:
        TypeError: describes a batch, and the argument.
        ValueError: decoder inputs are missing, or a mask or a shape does not fit.
    """
    given = dict(batch) if isinstance(batch, Mapping) else {}
    source = given.get("source")
    if not (_is_ids(source) if config.features is None else isinstance(source, Tensor) and source.ndim == 3):
        what = f"a dict with {sorted(given)}" if isinstance(batch, Mapping) else f"a {type(batch).__name__}"
        kind = "int64 [B, S]" if config.features is None else f"float [B, F, {config.features}]"
        raise TypeError(f"a batch of seq2seq is {{'source': {kind}, 'targets': int64 [B, T]}}, and this is {what}.")
    if "targets" not in given and not _is_ids(given.get("tokens")):
        raise ValueError(
            'seq2seq: the batch has no decoder inputs. Give it "targets", int64 [B, T], which are shifted, or'
            f' "tokens", int64 [B, T + 1]. It has {sorted(given)}.'
        )
    if "targets" in given:
        given = {"tokens": shift_right(config, given["targets"])} | given
    masks = {"source_mask": given["source"], "mask": given["tokens"]}
    for name, like in masks.items():
        mask = given.get(name)
        if mask is not None and (mask.dtype != torch.bool or mask.shape != like.shape):
            raise ValueError(
                f'the "{name}" of a batch is {mask.dtype} of shape {tuple(mask.shape)}, and its tokens have shape'
                f" {tuple(like.shape)}. Give each token a bool, False for padding."
            )
    if "targets" not in given:
        return _shifted(given)
    if given["targets"].shape != given["tokens"].shape:
        raise ValueError(
            f'the "tokens" of a batch with "targets" must have their shape, {tuple(given["targets"].shape)}, got'
            f" {tuple(given['tokens'].shape)}."
        )
    if (mask := given.get("mask")) is not None:
        given["targets"] = given["targets"].masked_fill(~mask, -100)
    return given


def _is_ids(x: Any) -> bool:
    return isinstance(x, Tensor) and x.ndim == 2 and not x.is_floating_point()


def pack(config: Config, params: Params, *, axis: Axes = None) -> Params:
    """Returns parameters as `decode_tokens` and `encode_tokens` take them.

    The weights of a batch-invariant decoder, and the output layer, are as `row_linear` reads them. `packed_specs` has
    the specs of the result.

    Args:
        config: shape.
        params: parameters as from `init`, or this rank's blocks of them.
        axis: mesh axes along which `specs(config, tp=axis)` cuts the leaves. None is a single device.

    Raises:
        ValueError: leaves are missing, unknown, or of another model. The message lists all.
    """
    check_leaves(config, params, axis)
    half, shapes = config.decoder, block_shapes(config, axis)
    if not half.batch_invariant:
        return params
    head = name_head(half)
    blocks = [
        {n: pack_weight(n.removeprefix(CROSS), x, own[n], None) if _is_linear(n) else x for n, x in p.items()}
        for p, own in zip(params["decoder"]["blocks"], shapes["decoder"]["blocks"], strict=True)
    ]
    decoder = params["decoder"] | {"blocks": blocks}
    return params | {"decoder": decoder, head: pack_weight(head, params[head], shapes[head], None)}


def packed_specs(config: Config, *, tp: Axes = None) -> PyTree:
    """Returns the specs of the result of `pack`."""
    return specs(config, tp=tp)


def encode_tokens(
    config: Config, weights: Params, tokens_S: Int[Tensor, " s"] | Float[Tensor, "f m"], *, axis: Axes = None
) -> list[tuple[Float[Tensor, "s g k"], Float[Tensor, "s g k"]]]:
    """Returns the keys and values of one source for each layer of the decoder.

    Args:
        config: shape.
        weights: weights from `pack`.
        tokens_S: ids of the source, or features of its frames.
        axis: mesh axes along which the leaves are cut. Keys are of this rank's heads.

    Raises:
        ValueError: more tokens than learned positions.
    """
    config, weights = _read_weights(config, weights, axis)
    source, _ = run_encoder(config, weights, tokens_S[None], None, ForwardSettings(along=Along(axis)), checked=True)
    keys = [x.keys for x in project_source(config, weights, source, axis=axis)]
    return [(x.k_BSGK[0], x.v_BSGK[0]) for x in keys]


def decode_tokens(
    config: Config,
    weights: Params,
    tokens_T: Int[Tensor, " t"],
    positions_T: Int[Tensor, " t"],
    rows_R: Int[Tensor, " r"],
    bodies: Sequence[nn.AttentionBackend],
    *,
    axis: Axes = None,
) -> Float[Tensor, "r v"]:
    """Returns logits of some of the tokens of several sequences.

    Args:
        config: shape.
        weights: weights from `pack`.
        tokens_T: ids of the decoder's inputs.
        positions_T: position of each token in its sequence.
        rows_R: tokens whose logits are wanted.
        bodies: bodies of self-attention of each layer, and then of cross attention of each layer. The latter hold the
            keys of the sources.
        axis: mesh axes along which the leaves are cut. None is a single device.

    Returns:
        Logits of the whole vocabulary on all ranks.

    Raises:
        ValueError: bodies are not two for each layer.
    """
    config, weights = _read_weights(config, weights, axis)
    half, num = config.decoder, config.decoder.num_layers
    start, stop = nn.rank_range(half.kv_heads, axis)
    none = torch.zeros(1, 0, stop - start, half.head_dim, dtype=_find_dtype(weights), device=tokens_T.device)
    sources = [SourceKeys(nn.KeyValues(start, none, none), nn.Attending(nn.Full(), x)) for x in bodies[num:]]
    x_1TD = decode_hidden(config, weights, tokens_T[None], positions_T.long(), bodies[:num], sources, axis=axis)
    own_RV = logits_of(config, weights, x_1TD[0][rows_R], Along(axis))
    return all_gather_invariant(own_RV, axis, dim=-1, size=half.vocab_size)


def _read_weights(config: Config, weights: Params, axis: Axes) -> tuple[Config, Params]:
    """Returns packed leaves as weights of layers, and the config with routers over only this rank's tokens."""
    half, shapes = config.decoder, block_shapes(config, axis)
    config = replace_halves(config, {name: drop_losses(x) for name, x in config.halves.items()})
    if not half.batch_invariant:
        return config, weights

    def get_weight(panels: Tensor, shape: tuple[int, ...]) -> nn.BatchInvariantWeight:
        return nn.BatchInvariantWeight(panels, shape, half.chunks)

    blocks = [
        {n: get_weight(x, own[n]) if _is_linear(n) else x for n, x in p.items()}
        for p, own in zip(weights["decoder"]["blocks"], shapes["decoder"]["blocks"], strict=True)
    ]
    head: Any = name_head(half)
    decoder = weights["decoder"] | {"blocks": blocks}
    return config, weights | {"decoder": decoder, head: get_weight(weights[head], shapes[head])}


def _find_dtype(weights: Params) -> torch.dtype:
    return weights["encoder"]["blocks"][0]["wq"].dtype


def _is_linear(name: str) -> bool:
    return name.removeprefix(CROSS) in LINEAR
