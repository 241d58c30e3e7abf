"""Layouts of a decoder over ranks: functions of a single rank's blocks, and the specs that cut the blocks.

    rows of this rank's tokens, all heads -- all_to_all --> rows of all tokens, this rank's heads: attention -- back -->

The heads are those of the layout "tp", so that both layouts share one KV cache. A step sends two exchanges a layer in
place of the gathers of "tp", which pays for many tokens. Rows of a batch-invariant model do not depend on other rows,
so logits have the bits of a single device.

With a separate axis for the tokens ("tp", "sp"), both layouts also share the weights: each rank keeps the block of its
place along "tp", and "tp" over both axes reads a part of the block in place (shift parallelism).

Of a model with experts, "sp" has all experts on all ranks, and "ep" has a part of the experts on each rank and sends
tokens to their experts. With `Engine(weights_axis=)`, "sp" gathers the experts of a layer while the layer before
computes (AsyncEP).

References:
    Jacobs et al., DeepSpeed Ulysses, 2023, https://arxiv.org/abs/2309.14509
    Hidayetoglu et al., Shift Parallelism, 2025, https://arxiv.org/abs/2509.16495
    ZeRO-Prefill, 2026, https://arxiv.org/abs/2605.02960 (AsyncEP)

T tokens of all sequences, H query heads, G key and value heads, K head dim.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardfn import nn
from shardfn.collectives import all_gather_invariant, all_to_all, axis_size, take_own_block
from shardfn.core import Axes, P, PyTree, QuantizationPolicy
from shardfn.kernels import Activations
from shardfn.models import gpt
from shardfn.nn import moe

from ._low_rank import LowRank

_LOCAL = moe.Local()


class Outputs(NamedTuple):
    """Results of a decoder for T tokens, with R rows wanted.

    Attributes:
        logits: [R, V].
        hidden: [R, D], the states that the head multiplies. None from a decoder without `embeds`.
        experts: function that returns the experts of each token in the m layers with experts, [T, m, k], or None from a
            decoder without `expert_shape`.
        state_after: function from a number of layers to the states of the rows after so many layers, [R, D], for
            `Decoder.hidden_layers`. After all layers the states are `hidden`.
        carry: [T, D], the states of all tokens for the next stage, of a decoder of stages.
    """

    logits: Tensor
    hidden: Tensor | None = None
    experts: Callable[[], Tensor | None] = lambda: None
    state_after: Callable[[int], Tensor | None] = lambda layers: None
    carry: Tensor | None = None


class Layout(NamedTuple):
    """Way in which a decoder is cut over the mesh. All layouts of a decoder read and write one KV cache.

    Attributes:
        outputs: function `outputs(weights, tokens, positions, rows, bodies, adapters)` of this rank's blocks of
            `weights`, with a body of attention for each layer, with results equal on all ranks.
        specs: compute specs of the parameters.
        pack: function from this rank's blocks of the parameters to the weights that `outputs` takes. Layouts with the
            same function share one copy of the weights.
        packed: specs of the result of `pack`, a prefix tree.
        tokens: mesh axis that cuts the tokens of a step, or None where each rank computes all tokens.
        masked: whether `outputs` takes `mask=`, False for padding.
    """

    outputs: Callable[..., Outputs]
    specs: PyTree
    pack: Callable[[PyTree], PyTree]
    packed: PyTree = P()
    tokens: Axes = None
    masked: bool = False


def make_sequence_layout(
    config: gpt.Config,
    axis: str,
    quantization: QuantizationPolicy = None,
    activations: Activations | None = None,
    exchange: moe.Exchange = _LOCAL,
    *,
    tp: Axes = None,
    pack: Callable[[PyTree], PyTree] | None = None,
) -> Layout:
    """Returns the layout "sp", or "ep" with an exchange of tokens.

    Args:
        config: shape of the model, batch-invariant.
        axis: mesh axis that cuts the tokens, and within the blocks of `tp` the heads of the cache.
        quantization: see `decoder`.
        activations: see `decoder`.
        exchange: exchange of tokens and experts.
        tp: mesh axes that cut heads, features and vocabulary.
        pack: function of a layout with the same specs, to share the weights, or None.
    """
    config = _exchange_by(config, exchange)
    flat = replace(config, stacked=False)

    def compute_outputs(
        weights: PyTree,
        tokens_T: Tensor,
        positions_T: Tensor,
        rows_R: Tensor,
        bodies: Sequence[nn.AttentionBackend],
        low: LowRank | None = None,
    ) -> Outputs:
        assert low is None, "steps with adapters have the first layout"
        T = len(tokens_T)
        rank_tokens, rank_positions = (take_own_block(x, axis, dim=0) for x in (tokens_T, positions_T))
        heads, latent = config.num_heads // axis_size(tp), config.latent is not None
        exchanged = [_HeadExchange(body, axis, T, heads, whole_keys=latent) for body in bodies]
        gather = functools.partial(all_gather_invariant, axis=axis, dim=0, size=T)
        cut = functools.partial(take_own_block, axis=axis, dim=0)
        join = functools.partial(all_gather_invariant, axis=axis, dim=0, size=len(rows_R))
        parts = gpt.TokenParts(T, gather, cut, join, cut(positions_T[rows_R]))
        how: Any = {"parts": parts, "activations": activations, "axis": tp}
        counted = _exchange_by(flat, replace(exchange, tokens=T)) if isinstance(exchange, moe.AllToAll) else flat
        found = gpt.decode(counted, weights, rank_tokens, rank_positions, rows_R, exchanged, **how)
        return make_outputs(found, gather)

    return Layout(
        outputs=compute_outputs,
        specs=gpt.served_specs(config, tp=tp),
        pack=pack or functools.partial(gpt.pack, config, axis=tp, quantization=quantization),
        packed=gpt.packed_specs(config, tp=tp),
        tokens=axis,
    )


def make_stage(
    config: gpt.Config,
    axis: str,
    stages: int,
    tp: Axes = None,
    quantization: QuantizationPolicy = None,
    activations: Activations | None = None,
) -> Layout:
    """Returns the layout of a pipeline: each rank of the axis has a stage, with equally many layers.

    Each stage embeds its tokens and computes logits. Those of the first and the last stage count. The slowest
    stage is the last one, whose work does not grow by it.

    Args:
        config: shape of the model, with stacked layers.
        axis: mesh axis of the stages.
        stages: number of stages.
        tp: mesh axes that cut heads, features and vocabulary.
        quantization: see `decoder`.
        activations: see `decoder`.

    Raises:
        ValueError: stages would have unlike layers.
    """
    one = make_stage_config(config, axis, stages)
    flat = replace(one, stacked=False)

    def compute_outputs(
        weights: PyTree,
        tokens_T: Tensor,
        positions_T: Tensor,
        rows_R: Tensor,
        bodies: Sequence[nn.AttentionBackend],
        low: LowRank | None = None,
        carry: Tensor | None = None,
    ) -> Outputs:
        assert low is None, "a decoder of stages has no layers with adapters"
        own = weights | {"blocks": [{name: x[0] for name, x in p.items()} for p in weights["blocks"]]}
        begins = take_own_block(torch.arange(stages, device=tokens_T.device) == 0, axis, dim=0)
        enter = None if carry is None else lambda x_TD: torch.where(begins, x_TD, carry.to(x_TD.dtype))
        how: Any = {"axis": tp, "activations": activations, "enter": enter}
        found = gpt.decode(flat, own, tokens_T, positions_T, rows_R, bodies, **how)
        return Outputs(found.logits, carry=found.stream)

    def pack(params: PyTree) -> PyTree:
        packed = gpt.pack(one, params, axis=tp, quantization=quantization)
        return packed | {"blocks": [{name: x[None] for name, x in p.items()} for p in packed["blocks"]]}

    packed = gpt.packed_specs(one, tp=tp)
    packed |= {"blocks": [{name: P(axis, *spec) for name, spec in p.items()} for p in packed["blocks"]]}
    return Layout(compute_outputs, gpt.specs(config, tp=tp, pp=axis), pack, packed)


def make_group(
    config: gpt.Config,
    axis: str,
    tp: Axes = None,
    quantization: QuantizationPolicy = None,
    activations: Activations | None = None,
) -> Layout:
    """Returns the layout of groups of ranks with plans of their own, and with experts on all ranks.

    Args:
        config: shape of the model, batch-invariant.
        axis: mesh axis of the groups.
        tp: mesh axes that cut heads, features and vocabulary inside a group.
        quantization: see `decoder`.
        activations: see `decoder`.
    """
    config = _exchange_by(config, moe.AllToAll((axis, *P(tp).axes)))
    flat = replace(config, stacked=False)

    def compute_outputs(
        weights: PyTree,
        tokens_T: Tensor,
        positions_T: Tensor,
        rows_R: Tensor,
        bodies: Sequence[nn.AttentionBackend],
        low: LowRank | None = None,
        mask: Tensor | None = None,
    ) -> Outputs:
        assert low is None, "a decoder of groups has no layers with adapters"
        how: Any = {"axis": tp, "activations": activations, "mask_T": mask}
        return make_outputs(gpt.decode(flat, weights, tokens_T, positions_T, rows_R, bodies, **how))

    return Layout(
        outputs=compute_outputs,
        specs=gpt.served_specs(config, tp=tp),
        pack=functools.partial(gpt.pack, config, axis=tp, quantization=quantization),
        packed=gpt.packed_specs(config, tp=tp),
        masked=config.experts is not None,
    )


def make_stage_config(config: gpt.Config, axis: str, stages: int) -> gpt.Config:
    """Returns the shape of one of several stages of equal layers.

    Raises:
        ValueError: stages would have unlike layers, or layers are not stacked.
    """
    if not config.stacked or not config.batch_invariant or config.experts or config.images or config.swift:
        raise ValueError(
            f"decoder: pp={axis!r} must be of a batch-invariant model with stacked layers, without experts, images and"
            " SwiftKV. Use Config(batch_invariant=True, stacked=True), and gpt.stack_blocks for parameters by layer."
        )
    if stages < 1:
        raise ValueError(f"decoder: pp={axis!r} must have at least 1 stage, got {stages}. Pass its number of ranks.")
    num, rest = divmod(config.num_layers, stages)
    if rest:
        raise ValueError(f"decoder: {stages} stages of {axis!r} must divide the {config.num_layers} layers.")
    by_layer = {name: x[:num] for name in ("window", "rope") if type(x := getattr(config, name)) is tuple}
    one, kinds = replace(config, num_layers=num, **by_layer), config.layer_settings
    if any(kinds[i] != one.layer_settings[i % num] for i in range(config.num_layers)):
        raise ValueError(
            f"decoder: each of {stages} stages of {axis!r} must have the same kinds of layers in the same order, got"
            f" {kinds}. Use fewer stages."
        )
    return one


def make_outputs(found: gpt.Decoded, gather: Callable[[Tensor], Tensor] = lambda x: x) -> Outputs:
    """Returns the results of `gpt.decode`.

    Args:
        found: results of a rank.
        gather: function from rows of the rank's tokens to the rows of all tokens.
    """
    return Outputs(found.logits, found.hidden, lambda: gather(found.experts), found.state_after)


def _exchange_by(config: gpt.Config, exchange: moe.Exchange) -> gpt.Config:
    if config.experts is None:
        return config
    return replace(config, experts=replace(config.experts, exchange=exchange))


@dataclass(frozen=True, eq=False)
class _HeadExchange(nn.Local):
    """Attention that exchanges parts of the tokens for parts of the heads, and back.

    Attributes:
        inner: attention over all tokens, of this rank's heads.
        axis: mesh axis.
        num: number of tokens T on all ranks.
        heads: number of heads H on all ranks of the axis.
        num_queries: number of queries on all ranks, or None where each token has a query.
        whole_keys: whether all heads read the same keys, as in latent attention.
    """

    inner: nn.AttentionBackend
    axis: str
    num: int
    heads: int
    num_queries: int | None = None
    whole_keys: bool = False

    def with_queries(self, rows_R: Tensor) -> "_HeadExchange | None":
        inner = self.inner.with_queries(rows_R) if isinstance(self.inner, nn.Local) else None
        return None if inner is None else replace(self, inner=inner, num_queries=len(rows_R))

    def attend(self, q_BTHK: Tensor, k_BSGK: Tensor, v_BSGK: Tensor, how: nn.OnlineScores, length: int) -> Tensor:
        by_heads = functools.partial(all_to_all, axis=self.axis, split_dim=2, concat_dim=1)
        own = {
            name: take_own_block(x, self.axis, dim=0)
            for name in ("slopes_H", "sinks_H")
            if (x := getattr(how, name)) is not None
        }
        q_BTHK = by_heads(q_BTHK, size=self.num if self.num_queries is None else self.num_queries)
        if self.whole_keys:
            k_BSGK = v_BSGK = all_gather_invariant(k_BSGK, self.axis, dim=1, size=self.num)
        else:
            k_BSGK, v_BSGK = (by_heads(x, size=self.num) for x in (k_BSGK, v_BSGK))
        y_BTHK = self.inner.attend(q_BTHK, k_BSGK, v_BSGK, how._replace(**own), length)
        return all_to_all(y_BTHK, self.axis, split_dim=1, concat_dim=2, size=self.heads)
