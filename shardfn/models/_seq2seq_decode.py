"""The decoder of an encoder-decoder model on tokens of many sequences at once, over caches of its layers.

With a batch-invariant decoder, a token's logits have the same bits next to any other tokens. The encoder reads one
source at a time.

T tokens of all sequences, R rows whose logits are wanted, S source tokens, D model, G key heads, K head dim.
"""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from shardfn import nn
from shardfn.collectives import all_gather_invariant
from shardfn.core import Axes, PyTree

from ._gpt_block import Along
from ._gpt_decode import LINEAR, drop_losses, pack_weight
from ._gpt_forward import name_head
from ._seq2seq_config import CROSS, Config, Params, block_shapes, check_leaves, replace_halves, specs
from ._seq2seq_forward import ForwardSettings, SourceKeys, decode_hidden, logits_of, project_source, run_encoder


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
    config: Config, weights: Params, tokens_S: Int[Tensor, " s"], *, axis: Axes = None
) -> list[tuple[Float[Tensor, "s g k"], Float[Tensor, "s g k"]]]:
    """Returns the keys and values of one source for each layer of the decoder.

    Args:
        config: shape.
        weights: weights from `pack`.
        tokens_S: ids of the source.
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
