"""The GPT on tokens of many sequences at once. The bodies of attention keep their keys and values (KV cache).

T tokens of all sequences, R rows whose logits are wanted, D model, H heads, V vocabulary.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from shardfn import nn
from shardfn.collectives import all_gather_invariant, axis_size, pvary
from shardfn.core import Axes, P, PyTree, QuantizationPolicy, check_policy, find_quantization, named_leaves, raise_all
from shardfn.kernels import GROUP, Activations, Quantization, pack_blocks, pack_rows, rotate, slice_panels

from ._gpt_block import Along, block, causal_mask, norm, rope_table, score_arguments
from ._gpt_config import Config
from ._gpt_experts import check_bias
from ._gpt_forward import compute_logits, look_up_tokens, name_head
from ._gpt_leaves import Params, block_shapes, check_leaves, specs, unstack_blocks
from ._gpt_swift import SwiftKeys


class Decoded(NamedTuple):
    """Results of `decode`.

    Attributes:
        logits: logits of the rows.
        hidden: states of the rows that the head multiplies.
        experts: experts of each token, in each of the m layers with experts.
        state_after: function from a number of layers to the states of the rows after so many layers, [R, D]. After all
            layers they are `hidden`.
        stream: states after the last layer, before the last norm, of all tokens with `enter`.
    """

    logits: Float[Tensor, "r v"]
    hidden: Float[Tensor, "r d"]
    experts: Int[Tensor, "t m k"]
    state_after: Callable[[int], Tensor]
    stream: Float[Tensor, "t d"]


class TokenParts(NamedTuple):
    """Parts of the tokens of `decode` on ranks. By default each rank has all tokens.

    Attributes:
        num: number of tokens on all ranks, or None where each rank has all.
        gather: function from rows of this rank's tokens to the rows of all tokens.
        cut: function from the rows of all wanted tokens to this rank's part.
        join: function from this rank's part of the wanted tokens to all their rows.
        positions: positions of this rank's part of the wanted tokens, or None where each rank has all.
    """

    num: int | None = None
    gather: Callable[[Tensor], Tensor] = lambda rows: rows
    cut: Callable[[Tensor], Tensor] = lambda rows: rows
    join: Callable[[Tensor], Tensor] = lambda rows: rows
    positions: Int[Tensor, " r"] | None = None


_WHOLE = TokenParts()


def decode(
    config: Config,
    params: Params,
    tokens_T: Int[Tensor, " t"],
    positions_T: Int[Tensor, " t"],
    rows_R: Int[Tensor, " r"],
    bodies: Sequence[nn.AttentionBackend],
    *,
    axis: Axes = None,
    shared: Axes = None,
    then: Mapping[str, nn.Then] = MappingProxyType({}),
    parts: TokenParts = _WHOLE,
    activations: Activations | None = None,
    images: tuple[Bool[Tensor, " t"], Float[Tensor, "t d"]] | None = None,
    enter: Callable[[Tensor], Tensor] | None = None,
    mask_T: Bool[Tensor, " t"] | None = None,
) -> Decoded:
    """Returns logits of some of the tokens of several sequences, and the hidden states and experts behind the logits.

    Each layer's attention is computed by a separate body, which keeps the layer's keys and values from a single call to
    the next, and knows which tokens belong together. So a sequence may be passed in any chunks, next to any other
    sequences (continuous batching).

    Args:
        config: shape, causal, without `layout`.
        params: parameters from `pack`.
        tokens_T: ids.
        positions_T: positions of each token in its sequence, below `max_len`.
        rows_R: tokens whose logits are wanted.
        bodies: bodies of attention, one for each layer of the KV cache (`Config.num_cache_layers`).
        axis: mesh axes along which `specs(config, tp=axis)` cuts the leaves. None is a single device.
        shared: last axes of `axis`, along which the leaves are not cut: a rank reads its part of each leaf, as a view.
            For a batch-invariant config.
        then: functions for weights of a batch-invariant config, by names such as "blocks.0.wq". Each is a
            `BatchInvariantWeight.then`.
        parts: parts of the tokens on ranks. `rows_R` counts all tokens, and the rest of the arguments are of this
            rank's part.
        activations: "int8" rounds the inputs of layers in codes, see `kernels.integer_linears`.
        images: True for image tokens, and features in the rows of these tokens. The bodies read images by the rule of
            the config.
        enter: function from the states of tokens before the first layer to the states in their place, for example those
            of an earlier stage of a pipeline.
        mask_T: False for padding, which gets no expert.

    Returns:
        Logits of the whole vocabulary on all ranks.

    Raises:
        ValueError: the config's layers cannot be run so, or `bodies` are not one for each layer.

    Example:
        >>> import shardfn.core as core
        >>> from shardfn.models.gpt import apply, init
        >>> config = Config(vocab_size=64, num_layers=1, d_model=32, num_heads=4)
        >>> params, tokens_T = init(config, core.key(0)), torch.tensor([5, 6, 7])
        >>> packed = pack(config, params)
        >>> found = decode(config, packed, tokens_T, torch.arange(3), torch.tensor([2]), [nn.Dense()])
        >>> torch.allclose(found.logits, apply(config, params, tokens_T[None])[:, 2], atol=1e-6)
        True
        >>> tuple(found.hidden.shape), tuple(found.experts.shape)  # no layer has experts
        ((1, 32), (3, 0, 0))
    """
    check_decodable(config)
    if len(bodies) != config.num_cache_layers:
        raise ValueError(
            f"decode: bodies must have {config.num_cache_layers} entries, one for each layer of the KV cache (of"
            f" num_layers={config.num_layers}), got {len(bodies)}."
        )
    if config.batch_invariant:
        params = _make_batch_invariant_weights(config, params, axis, shared, then, activations)
    config = drop_losses(config)
    along = Along(axis)
    x_TD = look_up_tokens(config, params, tokens_T, along)
    if images is not None:
        x_TD = torch.where(images[0][:, None], images[1].to(x_TD.dtype), x_TD)
    if config.position == "learned":
        x_TD = x_TD + params["position"][positions_T]
    if config.embedding_norm:
        x_TD = norm(config, along, x_TD, params["embed_norm_w"], params.get("embed_norm_b"))
    rotations = {rope: [params[name][positions_T] for name in names] for rope, names in _name_tables(config).items()}
    kinds, swift = config.layer_settings, config.swift
    bodies = bodies if swift is None else [bodies[swift.cache_layer(i)] for i in range(config.num_layers)]
    bodies = [
        body if kind.rope is None else _Rotating(body, kind.rope, *rotations[kind.rope])
        for body, kind in zip(bodies, kinds, strict=True)
    ]
    x_1TD = (x_TD if enter is None else enter(x_TD))[None]
    common = score_arguments(config, positions_T, x_TD.dtype)
    mask_1T = None if mask_T is None else mask_T[None]
    common |= {} if config.latent is None else {"absorbed": True, "cached": True}
    blocks, keys = params["blocks"], SwiftKeys(config, along, params)
    shares_keys = swift is not None and swift.first < config.num_layers
    first = swift.first if swift is not None and shares_keys else config.num_layers - 1
    # Adapters and records of experts need all tokens, and so do layers without shared keys where ranks have parts.
    are_all = bool(then) or "router" in blocks[-1] or not (shares_keys or parts.num is None) or enter is not None
    num = len(tokens_T) if parts.num is None else parts.num

    @functools.cache
    def find_tables(rope: nn.Rope) -> list[Tensor]:
        positions_r = positions_T[rows_R] if parts.positions is None else parts.positions
        return [params[name][positions_r] for name in _name_tables(config)[rope]]

    narrow = [] if are_all or len(rows_R) >= num else [_narrow_body(x, rows_R, find_tables) for x in bodies[first:]]
    is_narrow = bool(narrow) and all(x is not None for x in narrow)
    experts, states, biases = list[Tensor](), [x_1TD], params.get(EXPERT_BIAS)
    for i, (p, body, kind) in enumerate(zip(blocks, bodies, kinds, strict=True)):
        body = narrow[i - first] or body if is_narrow and i >= first else body
        table = keys.add_to(common | {"how": nn.Attending(causal_mask(kind), body)}, i, x_1TD)
        rows = rows_R if is_narrow and i == first else None
        if rows is not None and "keys" in table:  # all tokens have given their keys and values
            x_1TD, rows = parts.cut(parts.gather(x_1TD[0])[rows_R])[None], None
        bias_E = None if biases is None or "router" not in p else biases[len(experts)]
        x_1TD, seen = block(config, along, None, p, x_1TD, table, None, None, bias_E, mask_BT=mask_1T, rows_R=rows)
        experts += [] if seen is None else [seen.experts]
        states.append(x_1TD)
    x_RD = parts.join(x_1TD[0]) if is_narrow else parts.gather(x_1TD[0])[rows_R]
    x_RD = norm(config, along, x_RD, params["norm_w"], params.get("norm_b"))
    own_RV = compute_logits(config, params, x_RD, along)
    logits_RV = all_gather_invariant(own_RV, axis, dim=-1, size=config.vocab_size)
    experts_Tmk = torch.stack(experts, 1) if experts else tokens_T.new_zeros(len(tokens_T), 0, 0)
    return Decoded(
        logits_RV,
        x_RD,
        experts_Tmk,
        _LayerStates(states, x_RD, rows_R, parts, first + 1 if is_narrow else len(states)),
        x_1TD[0],
    )


def _narrow_body(
    body: nn.AttentionBackend, rows_R: Tensor, tables: Callable[[nn.Rope], list[Tensor]]
) -> nn.Local | None:
    """Returns the body of a late layer for only the wanted tokens, or None where the layer computes all tokens.

    Args:
        body: body for all tokens.
        rows_R: wanted tokens.
        tables: function from a rotation to its tables for the wanted tokens of this rank.
    """
    if isinstance(body, _Rotating):
        inner = _narrow_body(body.inner, rows_R, tables)
        return None if inner is None else dataclasses.replace(body, inner=inner, queries=tables(body.rope))
    return body.with_queries(rows_R) if isinstance(body, nn.Local) else None


class _LayerStates(NamedTuple):
    """States of the rows after a number of layers. A program that does not ask pays nothing.

    Attributes:
        states: states [1, T, D] before the first layer, and after each layer.
        last_RD: states after the last norm.
        rows_R: rows.
        parts: see `decode`.
        whole: number of states of all tokens. Later states have only the rows.
    """

    states: list[Tensor]
    last_RD: Tensor
    rows_R: Tensor
    parts: TokenParts
    whole: int

    def __call__(self, layers: int) -> Tensor:
        if layers == len(self.states) - 1:
            return self.last_RD
        if layers >= self.whole:
            return self.parts.join(self.states[layers][0])
        return self.parts.gather(self.states[layers][0])[self.rows_R]


def drop_losses(config: Config) -> Config:
    """Returns the config with routers over only this rank's tokens, as the axes of a training batch are not here."""
    if config.experts is None:
        return config
    return dataclasses.replace(config, experts=dataclasses.replace(config.experts, axes=None, z=0.0))


@dataclasses.dataclass(frozen=True, eq=False)
class _Rotating(nn.Local):
    """Body that first rotates queries and keys by their positions, with the bits of `nn.rope`."""

    inner: nn.AttentionBackend
    rope: nn.Rope
    cos_TK: Tensor
    sin_TK: Tensor
    queries: Sequence[Tensor] | None = None  # tables of queries, where only some tokens have a query

    def attend(self, q_BTHK: Tensor, k_BSGK: Tensor, v_BSGK: Tensor, how: nn.OnlineScores, length: int) -> Tensor:
        tables = self.cos_TK, self.sin_TK
        q_BTHK = _rotate_heads(q_BTHK, *(tables if self.queries is None else self.queries))
        return self.inner.attend(q_BTHK, _rotate_heads(k_BSGK, *tables), v_BSGK, how, length)


def _rotate_heads(x_1THK: Tensor, cos_TK: Tensor, sin_TK: Tensor) -> Tensor:
    if x_1THK.dtype != torch.float32 or cos_TK.shape[-1] < x_1THK.shape[-1]:
        return nn.rope(x_1THK, cos_TK, sin_TK)
    return rotate(x_1THK[0], cos_TK, sin_TK)[None]


def pack(
    config: Config,
    params: Params,
    *,
    axis: Axes = None,
    shared: Axes = None,
    quantization: QuantizationPolicy = None,
) -> Params:
    """Returns parameters as `decode` takes them.

    Separate layers, with the weights of batch-invariant layers as `row_linear` reads them.

    A function of each rank's blocks. `specs(config, tp=axis)` of unstacked blocks are the specs of the result, too. A
    weight of a linear layer may also be the blocks of codes of its rows, uint8, as from `kernels.quantize_blocks` or a
    GGUF file. Such blocks are not rounded again. A table of embeddings is in codes where it is tied to the head.

    Args:
        config: shape.
        params: parameters as from `init`, or this rank's blocks of them. For experts with `bias_rate` also the leaf
            "expert_bias", as from `models.moe.add_biases`.
        axis: mesh axes along which `specs(config, tp=axis)` cuts the leaves. None is a single device.
        shared: further axes along which `decode` reads a part of each leaf.
        quantization: codes to which the weights of linear layers are rounded. Logits equal the logits of the rounded
            weights, bit for bit. "int8", "int4", or codes by regular expressions found in names such as "blocks.0.wq"
            and "embed", of which the first that fits counts, for example `{"embed|head": "int8", "": "int4"}`.

    Raises:
        TypeError: leaves of a batch-invariant model are float16, or only some are float64. The message lists all. Or
            float64 has codes.
        ValueError: leaves are missing, unknown, or of another model. The message lists all. Or codes of layers that are
            not exact, or whose groups of inputs lie on several ranks. Or biases of experts are missing.

    Example:
        >>> import shardfn.core as core
        >>> from shardfn.models.gpt import init
        >>> config = Config(vocab_size=64, num_layers=1, d_model=32, num_heads=4, batch_invariant=True)
        >>> pack(config, init(config, core.key(0)))["blocks"][0]["wq"].shape
        torch.Size([1, 32, 64])
    """
    biases = {name: x for name, x in params.items() if name == EXPERT_BIAS}
    params = {name: x for name, x in params.items() if name not in biases}
    check_leaves(config, params, axis)
    if not biases and EXPERT_BIAS in served_specs(config):
        raise ValueError(
            "pack: experts with bias_rate are chosen by biases, got parameters without them. Pass"
            " models.moe.add_biases(params, model_state)."
        )
    check_bias(config, biases.get(EXPERT_BIAS))
    if config.batch_invariant:
        _check_batch_invariant(params | biases, quantization)
    params = unstack_blocks(config, params) | _tables_of_all(config, params) | biases
    blocks = params["blocks"]
    head = name_head(config)
    linear = [f"blocks.{i}.{name}" for i, p in enumerate(blocks) for name in p if name in LINEAR]
    check_policy(quantization, [*linear, head], "pack")
    _check_quantization(
        config, {f"blocks.{i}.{name}": x for i, p in enumerate(blocks) for name, x in p.items()}, axis, quantization
    )
    _check_quantization(config, {name: x for name, x in params.items() if name != "blocks"}, axis, quantization)
    if not config.batch_invariant:
        return params
    _check_shared(config, params, axis, shared, quantization)
    shapes: Any = block_shapes(config, axis)
    blocks = [
        {
            name: pack_weight(name, x, own[name].shape, find_quantization(quantization, f"blocks.{i}.{name}"))
            if name in LINEAR
            else x
            for name, x in p.items()
        }
        for i, (p, own) in enumerate(zip(blocks, shapes["blocks"], strict=True))
    ]
    return params | {
        "blocks": blocks,
        head: pack_weight(head, params[head], shapes[head].shape, find_quantization(quantization, head)),
    }


def _check_batch_invariant(params: Params, quantization: QuantizationPolicy) -> None:
    named = named_leaves(params)
    if named and all(x.dtype == torch.float64 for _, x in named):
        if quantization is not None:
            raise TypeError(
                f"pack: quantization={quantization!r} of leaves in float64. Convert them:"
                " tree_map(lambda x: x.float(), params)"
            )
        return
    known = torch.float32, torch.bfloat16, torch.uint8
    raise_all(
        TypeError,
        "pack: a batch-invariant model computes float32, or float64 if all leaves are float64. Convert these leaves, as"
        " in tree_map(lambda x: x.float(), params):",
        [f"{name} is {x.dtype}" for name, x in named if x.dtype not in known],
    )


def _check_quantization(config: Config, leaves: Params, axis: Axes, policy: QuantizationPolicy) -> None:
    """Refuses quantization where layers do not read them, and where ranks would have other groups than one rank."""
    for name, x in leaves.items():
        kind, quantization = name.rpartition(".")[2], find_quantization(policy, name)
        if x.dtype == torch.uint8 and not (config.batch_invariant and kind in (*LINEAR, name_head(config))):
            raise ValueError(
                f"pack: {name} is quantized, which only linear layers of Config(batch_invariant=True) read. Decode it."
            )
        if kind in _BY_INPUTS and quantization is not None and axis_size(axis) > 1 and x.dtype != torch.uint8:
            inputs = x.shape[1:].numel()
            if inputs % GROUP:
                raise ValueError(
                    f"pack: quantization={quantization!r} of {name}: each of {axis_size(axis)} ranks has {inputs} of"
                    f" its inputs, but {GROUP} share a scale. Use fewer ranks, or no quantization."
                )
    if policy is not None and not config.batch_invariant:
        raise ValueError(
            f"pack: quantization={policy!r} of layers that are not batch-invariant. Use Config(batch_invariant=True)."
        )


def _check_shared(config: Config, params: Params, axis: Axes, shared: Axes, policy: QuantizationPolicy) -> None:
    """Refuses codes whose groups of inputs would lie on several ranks that share a leaf."""
    if axis_size(shared) == 1:
        return
    shapes: Any = block_shapes(config, (*P(axis).axes, *P(shared).axes), shared)
    problems = []
    for i, (p, own) in enumerate(zip(params["blocks"], shapes["blocks"], strict=True)):
        for kind in [x for x in _BY_INPUTS if x in p]:
            name, inputs = f"blocks.{i}.{kind}", math.prod(own[kind].shape[1:])
            coded = p[kind].dtype == torch.uint8 or find_quantization(policy, name) is not None
            if coded and inputs % GROUP:
                problems.append(f"{name}: each of {axis_size(shared)} ranks of {shared!r} has {inputs} of the inputs")
    raise_all(ValueError, f"pack: {GROUP} inputs of a weight in codes share a scale. Use fewer ranks:", problems)


def served_specs(config: Config, *, tp: Axes = None) -> PyTree:
    """Returns the specs of the parameters that `pack` takes: `specs`, and the specs of the biases of experts."""
    biased = config.experts is not None and config.experts.bias_rate > 0
    return specs(config, tp=tp) | ({EXPERT_BIAS: P()} if biased else {})


def packed_specs(config: Config, *, tp: Axes = None) -> PyTree:
    """Returns the specs of the result of `pack`."""
    tree: Any = served_specs(dataclasses.replace(config, stacked=False), tp=tp)
    return tree | dict.fromkeys((name for names in _name_tables(config).values() for name in names), P())


def _name_tables(config: Config) -> dict[nn.Rope, tuple[str, str]]:
    """Returns the names of the tables of each kind of rotary positions in the layers: cos and sin, cos1 and sin1, .."""
    ropes = dict.fromkeys(kind.rope for kind in config.layer_settings if kind.rope is not None)
    return {rope: (f"cos{i or ''}", f"sin{i or ''}") for i, rope in enumerate(ropes)}


def _tables_of_all(config: Config, params: Params) -> Params:
    """Returns the rotations of all positions, computed once, as they are much work for one token."""
    embed, out = params["embed"], {}
    # On "meta" torch imports its compiler for the functions of a table, so the shapes are those of one position.
    num, device = (1, "cpu") if embed.is_meta else (config.max_len, embed.device)
    for rope, names in _name_tables(config).items():
        table = rope_table(config, rope, torch.arange(num, device=device), embed.dtype)
        if embed.is_meta:
            table = [x.new_empty(config.max_len, *x.shape[1:], device="meta") for x in table]
        out |= dict(zip(names, table, strict=True))
    return out


# Leaf of parameters that are served: the biases of experts, [m, E], or a list by layer for a pyramid.
EXPERT_BIAS = "expert_bias"

LINEAR = ("wq", "wq_a", "wkv_a", "wk", "wv", "s_wq", "s_wk", "s_wv", "wo", "w_up", "w_gate", "w_down", "router", "mix")
# Small layers that decide on experts, never in codes.
_GATES = ("router", "mix")
# Whose inputs tensor parallelism cuts.
_BY_INPUTS = ("wo", "w_down")


def pack_weight(name: str, weight: Tensor, shape: tuple[int, ...], quantization: Quantization | None) -> Tensor:
    """Returns the panels of a weight, whose dims of heads count as one."""
    rows = _count_output_dims(name, weight.shape)
    matrix = weight.flatten(0, rows - 1).flatten(1)
    if matrix.dtype == torch.uint8:
        return pack_blocks(matrix, math.prod(shape[rows:]))
    return pack_rows(matrix, None if name in _GATES else quantization)


def _count_output_dims(name: str, shape: Sequence[int]) -> int:
    return 1 if name.endswith("wo") else len(shape) - 1


def _make_batch_invariant_weights(
    config: Config,
    params: Params,
    axis: Axes,
    shared: Axes,
    then: Mapping[str, nn.Then],
    activations: Activations | None,
) -> Params:
    """Returns this rank's parts of packed leaves, as weights of layers."""
    shapes: Any = block_shapes(config, axis, shared)
    head, alone = name_head(config), axis_size(shared) == 1

    def get_weight(panels: Tensor, block: Any, name: str) -> nn.BatchInvariantWeight:
        how: Any = {"then": then.get(name), "activations": activations}
        if not alone:
            rows, shape, starts = _count_output_dims(name, block.shape), block.shape, block.starts
            dims = slice(0, rows), slice(rows, None)
            spans = [_flatten_span(shape[d], starts[d]) for d in dims]
            panels, how["skipped"] = slice_panels(pvary(panels, shared), *spans)
        return nn.BatchInvariantWeight(panels, block.shape, config.chunks, **how)

    def get_part(x: Tensor, block: Any) -> Tensor:
        if tuple(x.shape) == block.shape:
            return x
        return pvary(x, shared)[*(slice(a, a + n) for a, n in zip(block.starts, block.shape, strict=True))]

    def get_leaf(x: Any, block: Any, name: str) -> Any:
        if name.rpartition(".")[2] in LINEAR or name == head:
            return get_weight(x, block, name)
        return x if alone else get_part(x, block)

    blocks = [
        {name: get_leaf(x, own[name], f"blocks.{i}.{name}") for name, x in p.items()}
        for i, (p, own) in enumerate(zip(params["blocks"], shapes["blocks"], strict=True))
    ]
    rest = {x: get_leaf(y, shapes[x], x) for x, y in params.items() if x != "blocks" and x in shapes}
    return params | {"blocks": blocks} | rest


def _flatten_span(shape: Sequence[int], starts: Sequence[int]) -> tuple[int, int]:
    """Returns the start and stop of a block among elements of dims. Only the first dim is cut."""
    start = starts[0] * math.prod(shape[1:])
    return start, start + math.prod(shape)


def linear_sizes(config: Config) -> dict[str, tuple[int, int]]:
    """Returns inputs and outputs of the linear layers inside blocks, by the names of their weights.

    Routers are left out, and the keys and queries that SwiftKV replaces.

    Example:
        >>> sizes = linear_sizes(Config(vocab_size=64, num_layers=1, d_model=32, num_heads=4))
        >>> sizes["blocks.0.w_up"], sizes["blocks.0.wo"]
        ((32, 128), (32, 32))
    """
    shapes: Any = block_shapes(config, None)
    sizes = {}
    for i, own in enumerate(shapes["blocks"]):
        unread = (*_GATES, *(("wq", "wk", "wv") if "s_wq" in own else ()))
        for name in LINEAR:
            if name in own and name not in unread:
                shape = own[name].shape
                outs = 1 if name == "wo" else len(shape) - 1
                sizes[f"blocks.{i}.{name}"] = math.prod(shape[outs:]), math.prod(shape[:outs])
    return sizes


def check_decodable(config: Config) -> None:
    """Refuses a config that cannot be decoded token by token, for example with `causal=False`.

    Raises:
        ValueError: names the setting.
    """
    if not config.causal:
        raise ValueError("decode: causal=False: tokens see later ones, so none can be drawn after another.")
    if config.layout is not None:
        raise ValueError("decode: the masks of `layout` are those of whole sequences. Leave it out.")
    if not isinstance(config.attention, nn.Dense):
        raise ValueError(f"decode: attention={config.attention!r}: bodies are given. Use attention=Dense().")
