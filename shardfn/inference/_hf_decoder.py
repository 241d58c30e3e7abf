"""Unmodified models of transformers as decoders of an engine.

A probe compares the results of functions with one another, on any values. So leaves of equal shape share memory, and so
do the packed forms.

A batch-invariant decoder computes linear layers by `kernels.row_linear` from weights that are packed once, and the
functions whose bits depend on the number of rows in another form. Whether the whole model is then batch-invariant is
not assumed: a probe computes tokens by themselves and next to other tokens, and compares bits.

T tokens, R rows whose logits are wanted, V vocabulary.
"""

import functools
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from shardfn import kernels, nn
from shardfn.collectives import all_gather_invariant, current_mesh, take_own_block
from shardfn.core import (
    Axes,
    P,
    QuantizationPolicy,
    block_slices,
    check_policy,
    did_you_mean,
    explains_keywords,
    find_quantization,
    first_of,
    raise_all,
)
from shardfn.modules import (
    AttentionScores,
    DecodingFunction,
    ExactRows,
    InputUses,
    PackedWeight,
    RowEdge,
    SameInput,
    WeightUses,
    decoding,
)

from ._cache import CacheLayout, PagedAttention
from ._decoder import Decoder, check_activations
from ._hf_edges import edges_of
from ._image_rows import ImageRule
from ._layouts import Outputs
from ._low_rank import Linear, LowRank

# Number of values after which a leaf begins again: a prime, so that rows differ.
_PERIOD = 65521


def make_probe_weights(like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns random values of the shapes and dtypes of some leaves.

    Args:
        like: leaves, which may be deferred, and are not read.

    Returns:
        New tensors by name. Tensors of equal shape and dtype share their memory.

    Example:
        >>> made = make_probe_weights({"a": torch.ones(3, 2), "b": torch.ones(3, 2)})
        >>> made["a"] is made["b"], made["a"].data_ptr() == made["b"].data_ptr()
        (False, True)
    """
    draw, kept = torch.randn(_PERIOD, generator=torch.Generator().manual_seed(0)), dict[Any, Tensor]()
    out = {}
    for name, x in like.items():
        key = tuple(x.shape), x.dtype
        if key not in kept:
            kept[key] = _spread_values(draw, *key)
        out[name] = kept[key].view_as(kept[key])
    return out


def packed_once() -> Callable[..., Tensor]:
    """Returns `kernels.pack_rows` that packs each memory once, for leaves that share memory and stay unchanged.

    Example:
        >>> pack, x = packed_once(), torch.ones(3, 2)
        >>> pack(x).data_ptr() == pack(x.view(3, 2)).data_ptr()
        True
    """
    kept: dict[Any, Tensor] = {}

    def pack_weight(weight: Tensor, quantization: kernels.Quantization | None = None) -> Tensor:
        key = weight.data_ptr(), weight.shape, weight.stride(), quantization
        if key not in kept:
            kept[key] = kernels.pack_rows(weight, quantization)
        return kept[key].view_as(kept[key])

    return pack_weight


def _spread_values(draw: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Returns values that leave rows of about the same size behind a product, and around 1 for the scales of norms."""
    if not dtype.is_floating_point:
        return torch.zeros(shape, dtype=dtype)
    one = 1 + 0.1 * draw if len(shape) < 2 else draw / math.sqrt(shape[-1])
    size = math.prod(shape)
    return one.to(dtype).repeat(-(-size // _PERIOD))[:size].view(shape)


_LOG = logging.getLogger("shardfn.inference")
_PACKED = (torch.float32, torch.bfloat16)
# Rows of the probe's calls: products of matrices differ at 1, 2 and 16, vectors have 4 to 16 elements.
_SIZES = (2, 3, 4, 6, 8, 11, 16, 21)
_BLOCK = 8

# Function of a linear layer, from input and bias.
_Run = Callable[[Tensor, Tensor | None], Tensor]
# Served weights: "params" in place of the module's, and "packed", panels of weights that embeddings read, too.
Served = Mapping[str, Mapping[str, Tensor]]


@explains_keywords(exact="batch_invariant={value!r}")
def hf_decoder(
    model: Any,
    *,
    batch_invariant: bool | None = None,
    tp: str | None = None,
    tokenizer: Any = None,
    quantization: QuantizationPolicy = None,
    activations: kernels.Activations | None = None,
    params: Mapping[str, Tensor] | None = None,
) -> tuple[Decoder, dict[str, Tensor]]:
    """Returns the decoder of an unmodified causal model of transformers, and its parameters.

    Each layer's attention reads and writes the engine's KV cache, by the scale, window, bound of scores and sinks that
    the layer passes. All other code is the model's code.

    On several ranks each weight of a linear layer is cut by its outputs, and ranks copy results from one another. So
    logits have the bits of a single device on any number of ranks that divides the key heads, for example 1, 2 or 4
    ranks with 4 key heads.

    Args:
        model: `...ForCausalLM` with its weights, in eval mode, or the language part of a model of images and text, see
            `modules.split_parts`. The model is not changed. Its code and its buffers run, so do not change the model
            while engines do. Its weights stay in memory next to the packed weights, unless `params` has other weights.
        batch_invariant: whether each token's logits must have the same bits next to any other tokens (batch-invariant).
            True is an error where a probe finds other bits. False leaves the model's linear layers and activations.
            None is batch-invariant where possible.
        tp: mesh axis that cuts the heads, and the outputs of linear layers. The decoder must be batch-invariant.
        tokenizer: tokenizer of the prompts, to check that the model has its tokens.
        quantization: "int8" or "int4" for the weights of linear layers, which needs a batch-invariant model, or codes
            by regular expressions found in names of parameters, of which the first that fits counts, for example
            `{"embed|head": "int8", "": "int4"}`. Logits equal the logits of the rounded weights, bit for bit. A table
            of embeddings that is also the head is rounded, too.
        activations: "int8" rounds the inputs of layers in codes, see `decoder`. Needs a batch-invariant model.
        params: weights, by name, in place of the model's, which may be on "meta". Deferred weights, as of
            `interop.module_from_hf`, are read only by an engine, each rank its parts. A probe then runs on random
            values, in the memory of a single leaf of each shape.

    Returns:
        The decoder, and the parameters by name, as an engine takes them.

    Raises:
        TypeError: the object is not a model of transformers.
        ValueError: the model cannot be served, with the reasons, or not exactly, as `batch_invariant=True`, `tp` and
            codes need, or the tokenizer has more tokens, or `params` has other names or shapes than the model. The
            message lists all.

    Example:
        >>> import torch
        >>> from shardfn.inference import Engine, Sampling
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
        >>> model = LlamaForCausalLM(LlamaConfig(vocab_size=64, max_position_embeddings=32, **sizes)).eval()
        >>> made, params = hf_decoder(model)
        >>> made.batch_invariant, made.cache
        (True, CacheLayout(layers=1, heads=2, head_dim=8, axis=None, cross_layers=0, parts=2, lanes=None))
        >>> [completion] = Engine(made, params).generate([[5, 6, 7]], Sampling(max_tokens=4))
        >>> len(completion.tokens)
        4
    """
    function = decoding(model, params)
    probed = function if params is None else decoding(model, make_probe_weights(params))
    name = type(function.module).__name__
    shape = _measure_shape(probed)
    if tokenizer is not None and len(tokenizer) > shape.vocab:
        raise ValueError(
            f"tokenizer has {len(tokenizer)} tokens, and {name} has {shape.vocab}. Pass the tokenizer of this model, or"
            " resize it first: model.resize_token_embeddings(len(tokenizer))."
        )
    check_activations(activations, "hf_decoder", batch_invariant is not False)
    if activations is not None and quantization is None:
        raise ValueError(
            f"hf_decoder: activations={activations!r} needs quantized weights. Pass quantization='int8' or 'int4'."
        )
    if quantization is not None:
        if batch_invariant is False:
            raise ValueError(
                f"{name} with quantization={quantization!r} needs batch-invariant layers. Remove batch_invariant=False."
            )
        batch_invariant = True
        check_policy(quantization, list(shape.uses.linear), "hf_decoder")
    reasons = (
        list(_explain_unpacked(function, shape.uses))
        if batch_invariant is not False
        else ["batch_invariant=False leaves them uncut"]
    )
    if not reasons:
        edges = {} if tp is None else edges_of(probed, shape.uses.linear, shape.kv[0][1])
        how = shape, shape.uses.linear, tp, quantization, edges, activations
        tried = _make_decoder(probed, *how) if params is None else _make_decoder(probed, *how, packing=packed_once())
        reasons = list(_find_inexact(tried, probed.params, shape.uses))
        if not reasons:
            return replace(
                tried if params is None else _make_decoder(function, *how), batch_invariant=True
            ), function.params
    if tp is not None:
        title = f"{name} with tp={tp!r}: ranks cut only batch-invariant linear layers; run it on one rank, without tp:"
        raise_all(ValueError, title, reasons)
    if batch_invariant:
        raise_all(ValueError, f"{name} with batch_invariant=True:", reasons)
    if batch_invariant is None:
        _LOG.warning("%s is served without batch invariance: %s", name, "; ".join(reasons))
    return _make_decoder(function, shape, {}), function.params


@dataclass
class _Shape:
    """Sizes of a model, and the uses of its parameters, as one call of the model shows them."""

    vocab: int = 0
    kv: list[tuple[int, int, int]] = field(default_factory=list)  # layer, key heads, head dim
    expert_shape: tuple[int, int] = (0, 0)  # layers with experts, and a token's choices in each
    uses: WeightUses = field(default_factory=lambda: WeightUses({}))
    groups: list[list[str]] = field(default_factory=list)  # weights multiplied by one input


def _measure_shape(function: DecodingFunction) -> _Shape:
    """Runs a model on two tokens, and returns its sizes.

    Raises:
        ValueError: layers have different caches, or no attention was asked for.
    """
    shape = _Shape(uses=WeightUses(function.params))

    def attend_probe(scores: AttentionScores, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        shape.kv.append((scores.layer, k.shape[2], k.shape[3]))
        return torch.zeros_like(q)

    at_T, inputs = torch.arange(2, device=_get_device(function.params)), InputUses(function.params)
    with torch.no_grad(), inputs:
        logits, chosen = function(function.params, at_T, at_T, at_T[1:], attend_probe, shape.uses)
    shape.vocab = logits.shape[-1]
    shape.expert_shape = (0, 0) if chosen is None else (chosen.shape[1], chosen.shape[2])
    shape.groups = inputs.groups
    name, layers = type(function.module).__name__, [layer for layer, *_ in shape.kv]
    if not layers or layers != list(range(len(layers))):
        raise ValueError(f"{name} cannot be served: its layers ask for attention in the order {layers}, not 0, 1, ...")
    sizes = sorted({(heads, dim) for _, heads, dim in shape.kv})
    if len(sizes) > 1:
        raise ValueError(
            f"{name} cannot be served: layers have caches of different sizes, (key heads, head dim) = {sizes}."
        )
    return shape


def _make_decoder(
    function: DecodingFunction,
    shape: _Shape,
    linear: Mapping[str, bool],
    tp: Axes = None,
    quantization: QuantizationPolicy = None,
    edges: Mapping[str, RowEdge] = MappingProxyType({}),
    activations: kernels.Activations | None = None,
    packing: Callable[..., Tensor] = kernels.pack_rows,
) -> Decoder:
    """Returns the decoder whose weights named in `linear` are packed, [inputs, outputs] where the value is True."""
    like, kept = function.params, shape.uses.others
    layers, (_, heads, dim) = len(shape.kv), shape.kv[0]
    nums = {name: like[name].shape[transposed] for name, transposed in linear.items()}
    inputs = {name: like[name].numel() // num for name, num in nums.items()}
    # A weight that other functions read, too, is whole on all ranks, next to the panels of this rank's outputs.
    cut = {} if tp is None else {name: P(None, tp) if flip else P(tp) for name, flip in linear.items()}
    specs = {name: P() if name in kept else cut.get(name, P()) for name in like}
    specs |= dict.fromkeys(function.experts, P(tp))
    exchange = nn.moe.Local() if tp is None else nn.moe.AllReduce(tp, in_order=True)

    def pack_panels(name: str, x: Tensor) -> Tensor:
        weight = x.T if linear[name] else x
        return packing(
            take_own_block(weight, tp, dim=0) if name in kept else weight, find_quantization(quantization, name)
        )

    def pack_params(params: Mapping[str, Tensor]) -> Served:
        _check_params(params, like, specs)
        packed = {name: pack_panels(name, params[name]) for name in linear}
        placed = {name: x if name in kept else packed.get(name, x) for name, x in params.items()}
        for name in linear:  # a weight that is read elsewhere, too, has the same values there
            if name in kept and (own := find_quantization(quantization, name)) is not None:
                placed[name] = _round_weight(params[name], linear[name], own)
        return {"params": placed, "packed": {name: x for name, x in packed.items() if name in kept}}

    head = _head_of(function)
    # A layer that is called twice, or cut by its inputs, stays separate.
    calls = [name for group in shape.groups for name in group]
    alone = {head, *(name for name in calls if calls.count(name) > 1 or edges.get(name) is RowEdge.LEAVE)}
    groups = [[name for name in group if name in linear and name not in alone] for group in shape.groups]
    combine_hooks = [group for group in groups if len(group) > 1]

    def compute_outputs(
        weights: Served,
        tokens_T: Tensor,
        positions_T: Tensor,
        rows_R: Tensor,
        bodies: Sequence[nn.AttentionBackend],
        low: LowRank | None = None,
        images: tuple[Tensor, Tensor] | None = None,
    ) -> Outputs:
        params = weights["params"]
        packed = {**params, **weights["packed"]}
        seen, made = list[Tensor](), dict[int, _Run]()
        layers = {
            name: PackedWeight(packed[name], num, tp, edges.get(name, RowEdge.WHOLE), inputs[name], activations)
            for name, num in nums.items()
        }
        runs: dict[str, _Run] = {**layers}
        for group in combine_hooks:
            same = SameInput({name: layers[name] for name in group})
            runs |= {name: functools.partial(same, name) for name in group}
        for name, layer in layers.items():
            if name == head:
                made[id(params[name])] = functools.partial(_record_input, seen, layer)
            else:
                run = runs[name]
                made[id(params[name])] = run if low is None else functools.partial(_adapt_layer, name, low, layer, run)
        attend = functools.partial(_attend_heads, bodies, tp)
        mode = ExactRows(made) if linear else None
        logits, chosen = function(params, tokens_T, positions_T, rows_R, attend, mode, exchange, images)
        last = seen[0].reshape(-1, seen[0].shape[-1]) if seen else None
        return Outputs(logits, last, lambda: chosen, lambda num: last)

    placed = {name: P(tp) if name in cut and name not in kept else P() for name in like}
    placed |= dict.fromkeys(function.experts, P(tp))
    served = {"params": placed, "packed": {name: P(tp) for name in cut if name in kept}}
    cache = CacheLayout(layers, heads, dim, tp)
    how: dict[str, Any] = {"outputs": compute_outputs, "pack": pack_params, "expert_shape": shape.expert_shape}
    made = Decoder(
        shape.vocab,
        function.context,
        cache,
        specs=P(),
        images=_find_rule(function),
        embed_size=_find_width(function),
        **how,
    )
    if head is not None and head in linear:
        inner = [name for name in linear if name != head and name not in kept]
        sizes = {name: Linear(inputs[name], nums[name], linear[name]) for name in inner}
        made = replace(made, hidden_layers=(layers,), hidden_size=inputs[head], linear=sizes)
    return made if tp is None else replace(made, specs=specs, packed=served)


def _find_width(function: DecodingFunction) -> int:
    """Returns the width of the embeddings of tokens, or 0 for a module without a table of them."""
    table = getattr(function.module, "get_input_embeddings", lambda: None)()
    return int(getattr(table, "embedding_dim", 0))


def _find_rule(function: DecodingFunction) -> ImageRule | None:
    found = function.images
    return None if found is None else ImageRule(found.token, "whole" if found.whole else "causal", found.grid)


def _round_weight(x: Tensor, flip: bool, quantization: kernels.Quantization) -> Tensor:
    """Returns a weight with the values of its codes."""
    weight = x.T if flip else x
    weight = kernels.unpack_rows(kernels.pack_rows(weight, quantization), *weight.shape).to(x.dtype)
    return weight.T.contiguous() if flip else weight


def _attend_heads(
    bodies: Sequence[nn.AttentionBackend],
    axis: Axes,
    scores: AttentionScores,
    q_BTHK: Tensor,
    k_BTGK: Tensor,
    v_BTGK: Tensor,
) -> Tensor:
    """Returns the attention of this rank's heads, or of all heads if the layer has all heads."""
    body = bodies[scores.layer]
    if not isinstance(body, PagedAttention):
        raise TypeError(
            f"an engine serves models of transformers with its paged cache, but layer {scores.layer} got the attention"
            f" {body}. Pass the bodies that the engine made."
        )
    sinks_H = None if scores.sinks_H is None else take_own_block(scores.sinks_H.float(), axis)
    how = {"scale": scores.scale, "window": scores.window, "softcap": scores.softcap, "sinks_H": sinks_H}
    if k_BTGK.shape[2] == body.cache.shape[2]:
        return body.attended(q_BTHK, k_BTGK, v_BTGK, **how)
    own = (take_own_block(x, axis, dim=2) for x in (q_BTHK, k_BTGK, v_BTGK))
    return all_gather_invariant(body.attended(*own, **how), axis, dim=2, size=q_BTHK.shape[2])


def _head_of(function: DecodingFunction) -> str | None:
    """Returns the name of the weight of the layer that makes logits."""
    head = getattr(function.module, "get_output_embeddings", lambda: None)()
    weight = getattr(head, "weight", None)
    return next((name for name, p in function.module.named_parameters() if p is weight), None)


def _record_input(seen: list[Tensor], layer: PackedWeight, x: Tensor, bias: Tensor | None) -> Tensor:
    """Calls a layer and appends the input to `seen`."""
    seen.append(x)
    return layer(x, bias)


def _adapt_layer(name: str, low: LowRank, layer: PackedWeight, run: _Run, x: Tensor, bias: Tensor | None) -> Tensor:
    """Calls a layer and adds the products of the LoRA adapters."""
    y, edge = run(x, bias), layer.edge
    return low.added(name, x, y, axis=layer.axis, joins=edge is RowEdge.LEAVE, cut=edge is RowEdge.ENTER)


def _check_params(params: Mapping[str, Tensor], like: Mapping[str, Tensor], specs: Mapping[str, P]) -> None:
    problems = [f"{name} is missing" for name in like if name not in params]
    mesh = current_mesh()
    for name, x in params.items():
        if name not in like:
            problems.append(f"{name} is not a parameter of the model.{did_you_mean(name, like)}")
            continue
        own = block_slices(like[name].shape, specs[name], mesh.shape, mesh.coords)
        block = tuple(s.stop - s.start for s in own)
        if x.shape != block:
            problems.append(f"{name} is {tuple(x.shape)}, and the model's is {block}")
    raise_all(ValueError, "these are not the parameters of the model:", first_of(problems, 20))


def _explain_unpacked(function: DecodingFunction, uses: WeightUses) -> Iterator[str]:
    """Yields the reasons for which no batch-invariant form of a model is tried."""
    dtypes = {function.params[name].dtype for name in uses.linear} - set(_PACKED)
    if dtypes:
        yield f"weights are of {', '.join(map(str, dtypes))}; packed ones are of {_PACKED[0]} or {_PACKED[1]}"


@torch.no_grad()
def _find_inexact(decoder: Decoder, params: Mapping[str, Tensor], uses: WeightUses) -> Iterator[str]:
    """Yields the first row of a probe whose bits depend on the other rows, if there is such a row."""
    served, device, seen = decoder.pack(params), _get_device(params), dict[int, Tensor]()
    most = max(_SIZES)
    cache = [torch.zeros(decoder.cache.layer_shape(most + 1, _BLOCK), device=device)]
    cache += [torch.zeros_like(cache[0]) for _ in range(decoder.cache.layers - 1)]
    tables = torch.arange(1, most + 1, dtype=torch.int32, device=device)[:, None]
    for order in ([0], [1], *map(_order_rows, _SIZES)):
        row_T = torch.tensor(order, dtype=torch.int32, device=device)
        # Each row is a separate sequence with earlier keys and values 0.
        position_T = row_T % min(decoder.context, _BLOCK)
        plan = (row_T + 1) * _BLOCK + position_T, position_T, row_T, tables
        bodies = [PagedAttention(x, *plan) for x in cache]
        tokens_T, rows_R = (row_T * 7919 + 1) % decoder.vocab, torch.arange(len(order), device=device)
        for row, logits_V in zip(order, decoder.logits(served, tokens_T, position_T, rows_R, bodies), strict=True):
            if not torch.equal(seen.setdefault(row, logits_V), logits_V):
                others = f"; it multiplies by {', '.join(sorted(uses.products))}" if uses.products else ""
                yield f"the bits of a token's logits differ beside {len(order) - 1} others{others}"
                return


def _order_rows(num: int) -> list[int]:
    """Returns rows 0 and 1 among other rows, in another order for each number."""
    at = num // 2
    return [*range(at, num), *range(at)][:: -1 if num % 2 else 1]


def _get_device(params: Mapping[str, Tensor]) -> torch.device:
    return next(iter(params.values())).device
