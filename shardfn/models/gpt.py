"""A transformer of one stack: GPT-2, Llama and, with `causal=False`, BERT's encoder are settings of one `Config`.

B batch, T tokens, D model, H heads, G key and value heads, K head dim, F ffn, V vocabulary.

Radford et al., Language Models are Unsupervised Multitask Learners, 2019
Touvron et al., LLaMA: Open and Efficient Foundation Language Models, 2023, https://arxiv.org/abs/2302.13971
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from einops import rearrange
from jaxtyping import Float, Int, Int64
from torch import Tensor

from shardfn import nn
from shardfn.collectives import all_gather_invariant, axis_size, bind_mesh
from shardfn.core import Axes, Mesh, fold_in, split, uniform
from shardfn.engine import WeightedMean

from ._gpt_block import Along as _Along
from ._gpt_block import Seen as Seen
from ._gpt_block import Wrap as Wrap
from ._gpt_block import block as _block
from ._gpt_block import by_layer as _by_layer
from ._gpt_block import dropout as _dropout
from ._gpt_block import norm as _norm
from ._gpt_block import position_tables as _position_tables
from ._gpt_block import weight as _weight
from ._gpt_config import Config as Config
from ._gpt_decode import Decoded as Decoded
from ._gpt_decode import check_decodable as check_decodable
from ._gpt_decode import decode as decode
from ._gpt_decode import linear_sizes as linear_sizes
from ._gpt_decode import pack as pack
from ._gpt_decode import packed_specs as packed_specs
from ._gpt_experts import check_bias, join_seen
from ._gpt_leaves import Params as Params
from ._gpt_leaves import check_blocks, layers_of
from ._gpt_leaves import init as init
from ._gpt_leaves import num_params as num_params
from ._gpt_leaves import specs as specs
from ._gpt_leaves import unstack_blocks as unstack_blocks

# From logits and a batch to a loss, in place of the cross entropy.
LogitsLoss = Callable[[Tensor, Any], Any]


def apply(
    config: Config,
    params: Params,
    tokens_BT: Int64[Tensor, "b t"],
    *,
    key: Int64[Tensor, "2"] | None = None,
    index_B: Int64[Tensor, " b"] | None = None,
    wrap: Wrap = lambda inner: inner,
    axis: Axes = None,
    sequence: bool = False,
    chosen: Int[Tensor, "b t m k"] | None = None,
    bias: Float[Tensor, "m e"] | Sequence[Tensor] | None = None,
    at: Int[Tensor, "b s"] | None = None,
) -> Float[Tensor, "b _ v"]:
    """Returns logits of the next token at each position, or at some positions.

    x = embed[tokens] (+ position); for each block x += attn(norm(x)), x += mlp(norm(x)); logits = norm(x) head^T.

    Args:
        config: shape.
        params: parameters as from `init`.
        tokens_BT: ids, T <= max_len. Where `config.attention` cuts the sequence, this rank's ids.
        key: key that turns dropout on.
        index_B: global numbers of the samples, needed where dropout is on.
        wrap: function applied to the block function, as in `wrap=remat` (activation checkpointing).
        axis: mesh axes along which `specs(config, tp=axis)` cuts the leaves. None is a single device.
        sequence: whether between blocks each rank of `axis` has only some tokens (Megatron's sequence parallelism).
        chosen: experts of each token in each layer with experts, in place of the routers' choices, such as the experts
            of `rl.Rollout.expert_ids`. -1 is a choice without an expert. The routers' weights and gradients are as
            before.
        bias: biases of the experts in each of the m layers with experts, used only in the choice: `model_state["bias"]`
            of `models.moe`, which a config with `bias_rate` needs.
        at: positions of each row whose logits are returned, such as `rl.completion_positions`. The head multiplies only
            them. None is all positions.

    Returns:
        [B, T, V], or [B, S, V] with `at`: all logits, or this rank's part of V, which `all_gather_invariant(logits,
        axis, dim=-1, size=V)` joins.

    Raises:
        ValueError: too long a sequence, dropout without `index_B`, leaves that are not cut along `axis`, choices or
            biases of other experts, no biases where experts have biases, or `at` where a rank has only some of the
            tokens.

    Example:
        >>> import shardfn.core as core
        >>> config = Config(vocab_size=64, num_layers=1, d_model=32, num_heads=4)
        >>> apply(config, init(config, core.key(0)), torch.zeros(2, 5, dtype=torch.int64)).shape
        torch.Size([2, 5, 64])
    """
    along = _Along(axis, tokens_BT.shape[1] if sequence else None)
    batch = {"tokens": tokens_BT, "index": index_B}
    x_BTD, _ = _compute_hidden(config, params, batch, key, wrap, along, bias=bias, chosen=chosen)
    return _compute_logits(config, params, x_BTD if at is None else _rows_at(config, along, x_BTD, at), along)


def choices(
    config: Config,
    params: Params,
    tokens_BT: Int64[Tensor, "b t"],
    *,
    axis: Axes = None,
    chosen: Int[Tensor, "b t m k"] | None = None,
    bias: Float[Tensor, "m e"] | Sequence[Tensor] | None = None,
) -> Int64[Tensor, "b t m k"]:
    """Returns the experts of each token in each of the m layers with experts, as `apply` uses them.

    Args:
        config: shape, with experts.
        params: see `apply`.
        tokens_BT: see `apply`.
        axis: see `apply`.
        chosen: see `apply`.
        bias: see `apply`.

    Raises:
        ValueError: as `apply`, or the model has no experts.

    Example:
        >>> import shardfn.core as core
        >>> from shardfn.models.moe import mixtral_like
        >>> config = mixtral_like(vocab_size=64, num_layers=3, d_model=32, num_heads=8, d_ff=16)
        >>> choices(config, init(config, core.key(0)), torch.zeros(2, 5, dtype=torch.int64)).shape
        torch.Size([2, 5, 3, 2])
    """
    _, seen = _compute_hidden(config, params, {"tokens": tokens_BT}, along=_Along(axis), bias=bias, chosen=chosen)
    if seen is None:
        raise ValueError(
            "choices: the config has experts=None, so tokens choose none. Give it models.moe.Experts(...)."
        )
    B, T = tokens_BT.shape
    return rearrange(seen.experts, "m (b t) k -> b t m k", b=B, t=T)


def loss(
    config: Config,
    params: Params,
    batch: dict[str, Any],
    key: Int64[Tensor, "2"] | None = None,
    *,
    wrap: Wrap = lambda inner: inner,
    axis: Axes = None,
    sequence: bool = False,
    tile: Wrap | None = None,
    bias: Float[Tensor, "m e"] | Sequence[Tensor] | None = None,
    of_logits: LogitsLoss | None = None,
) -> Any:
    """Returns the mean cross entropy of each token given earlier tokens.

    Without `causal`, of the "targets" given all tokens.

    Sequences that are cut, packed or padded have unequal numbers of targets that count, for example 5 and 3, so that
    the result is a WeightedMean.

    Args:
        config: shape.
        params: parameters as from `init`.
        batch: {"tokens": int64 [B, T + 1]}, and where dropout is on "index": int64 [B], global sample numbers. With
            "segment_ids", int64 [B, T + 1], tokens attend only to tokens of their document. Or as `shifted` and
            `cut_sequences` make it: {"tokens", "targets", "segment_ids"}, [B, T] each, of this rank's tokens. With
            "mask", as "tokens" and False for padding after a row's tokens, padding is no target, gets no expert, takes
            no capacity and counts in no balance. `torch.arange(T + 1) < lengths[:, None]` makes a mask of lengths.
        key: key that turns dropout on.
        wrap: function applied to the block function.
        axis: mesh axes along which `specs(config, tp=axis)` cuts the leaves. None is a single device.
        sequence: whether between blocks each rank of `axis` has only some tokens (Megatron's sequence parallelism).
        tile: function applied to a block's norm and MLP, a function of single tokens: `tile=partial(sf.tiled,
            tiles=8)`.
        bias: biases as of `apply`. `models.moe.loss` takes biases from the model state, and counts the choices that
            move biases.
        of_logits: function `of_logits(logits, batch)` to a 0-d tensor or a WeightedMean, in place of the mean cross
            entropy, such as the cross entropy and a divergence from a teacher (`sf.distill`). The logits are `apply`'s
            for all tokens, and the batch is `shifted`. The balance of experts is added to the result.

    Returns:
        A 0-d tensor, or a WeightedMean where "targets", "segment_ids" or "mask" are in the batch.

    Raises:
        TypeError: the batch is not a dict with "tokens" of integers, [B, T + 1].
        ValueError: as `apply`. A model that looks ahead and a batch without "targets", whose tokens it would see, or
            with a "mask" without "segment_ids", by which tokens leave out padding. A "mask" that does not fit the
            tokens. "at" or "routes", which are of `stages(loss=)`, or `tile` and `sequence`, whose layers take all of a
            rank's tokens together, or `of_logits` with a `loss_tile`, which computes no logits.

    Example:
        >>> import shardfn.core as core
        >>> config = Config(vocab_size=64, num_layers=1, d_model=32, num_heads=4)
        >>> batch = {"tokens": torch.zeros(2, 9, dtype=torch.int64)}
        >>> loss(config, init(config, core.key(0)), batch).shape
        torch.Size([])
    """
    options: dict[str, Any] = {"wrap": wrap, "axis": axis, "sequence": sequence, "tile": tile, "bias": bias}
    return loss_and_seen(config, params, batch, key, load=False, of_logits=of_logits, **options)[0]


def loss_and_seen(
    config: Config,
    params: Params,
    batch: dict[str, Any],
    key: Int64[Tensor, "2"] | None = None,
    *,
    load: bool = True,
    wrap: Wrap = lambda inner: inner,
    axis: Axes = None,
    sequence: bool = False,
    tile: Wrap | None = None,
    bias: Float[Tensor, "m e"] | Sequence[Tensor] | None = None,
    of_logits: LogitsLoss | None = None,
) -> tuple[Any, Seen | None]:
    """Returns `loss`, and the facts of all routers. `models.moe.loss` makes metrics of the facts.

    Args:
        config: see `loss`.
        params: see `loss`.
        batch: see `loss`.
        key: see `loss`.
        load: whether `Seen.metrics` are computed. Over axes each layer then sends E counts.
        wrap: see `loss`.
        axis: see `loss`.
        sequence: see `loss`.
        tile: see `loss`.
        bias: see `loss`.
        of_logits: see `loss`.

    Example:
        >>> import shardfn.core as core
        >>> config = Config(vocab_size=64, num_layers=1, d_model=32, num_heads=4)
        >>> batch = {"tokens": torch.zeros(2, 9, dtype=torch.int64)}
        >>> _, seen = loss_and_seen(config, init(config, core.key(0)), batch)
        >>> print(seen)  # no layer has experts
        None
    """
    _check_batch(batch)
    _check_of_logits(batch, "loss", "take a loss of apply(..., at=, chosen=)")
    _check_untiled(config, "loss", "of_logits", of_logits)
    given, batch = batch, _shift_targets(config, batch)
    along = _Along(axis, batch["tokens"].shape[1] if sequence else None)
    x_BTD, seen = _compute_hidden(config, params, batch, key, wrap, along, tile, bias, load=load)
    extra = None if seen is None else seen.loss.mean()
    if of_logits is not None:
        return _add_balance(of_logits(_compute_logits(config, params, x_BTD, along), batch), extra), seen
    return _compute_mean(config, params, x_BTD, batch, along, extra, weighted=_is_weighted(given)), seen


def shifted(batch: dict[str, Any]) -> dict[str, Any]:
    """Returns the batch with each token's successor as "targets", so that sequences can be cut.

    A batch with "targets" is returned unchanged. The successor of a document's last token does not count, and padding
    does not.

    Args:
        batch: {"tokens": int64 [B, T + 1], "segment_ids"?: int64 [B, T + 1], "mask"?: bool [B, T + 1], ...}.

    Returns:
        {"tokens": [B, T], "targets": [B, T], "segment_ids"?: [B, T], "mask"?: [B, T], ...}.

    Example:
        >>> shifted({"tokens": torch.tensor([[5, 6, 7]])})
        {'tokens': tensor([[5, 6]]), 'targets': tensor([[6, 7]])}
    """
    if "targets" in batch:
        return batch
    out = batch | {"tokens": batch["tokens"][:, :-1], "targets": batch["tokens"][:, 1:]}
    if (ids := batch.get("segment_ids")) is not None:
        out["targets"] = out["targets"].masked_fill(ids[:, 1:] != ids[:, :-1], -100)
        out["segment_ids"] = ids[:, :-1]
    if (mask := batch.get("mask")) is not None:
        out["targets"] = out["targets"].masked_fill(~mask[:, 1:], -100)
        out["mask"] = mask[:, :-1]
    return out


_OF_TOKENS = ("tokens", "targets", "segment_ids", "mask")


def cut_sequences(config: Config, batch: dict[str, Any], mesh: Mesh) -> dict[str, Any]:
    """Returns this rank's tokens of whole rows, as `config.attention` cuts them: `shifted`, and then cut.

    The step's spec for each entry is `P("dp", config.attention.axes)`.

    Args:
        config: shape.
        batch: whole rows, as `loss` takes them.
        mesh: mesh of the step.

    Example:
        >>> import shardfn.core as core
        >>> config = Config(vocab_size=64, num_layers=1, d_model=32, num_heads=4, attention=nn.Ulysses("sp", 2))
        >>> batch = {"tokens": torch.tensor([[5, 6, 7]])}
        >>> cut_sequences(config, batch, core.make_mesh({"sp": 1}))["targets"].tolist()
        [[6, 7]]
    """
    out = _shift_targets(config, batch)
    T = out["tokens"].shape[1]
    with bind_mesh(mesh):
        length = nn.whole_length(config.attention, T)
        if length != T:
            raise ValueError(f"cut_sequences: rows of {T} tokens for {config.attention}; length must be their number.")
        rows = config.attention.rows(T)
    at = torch.cat([torch.arange(a, b, device=out["tokens"].device) for a, b in (*rows, (0, 0))])
    return out | {name: out[name][:, at] for name in _OF_TOKENS if name in out}


class Stages(NamedTuple):
    """The loss in three parts, as a pipeline takes them.

    Attributes:
        first: function `first(params, batch[, key]) -> h` that embeds the tokens.
        block: function `block(p, h[, key]) -> h` of a single layer. p has the layer's leaves.
        last: function `last(params, h, batch[, key])`: the mean cross entropy, or another loss of the logits.
    """

    first: Callable[..., Any]
    block: Callable[..., Any]
    last: Callable[..., Any]


def stages(
    config: Config,
    *,
    wrap: Wrap = lambda inner: inner,
    axis: Axes = None,
    sequence: bool = False,
    loss: LogitsLoss | None = None,
) -> Stages:
    """Returns `loss` as parts of a pipeline: `pipeline(*stages(config), axis="pp")` with `specs(config, pp="pp")`.

    Stages send the residual stream, the positions and documents of the tokens, and with dropout the samples' numbers. A
    pipeline gives each layer a separate key, so dropout masks differ from `loss`'s masks.

    Args:
        config: shape with stacked blocks.
        wrap: function applied to the block function, as in `wrap=remat` (activation checkpointing).
        axis: mesh axes along which `specs(config, tp=axis)` cuts the leaves. None is a single device.
        sequence: whether between blocks each rank of `axis` has only some tokens (Megatron's sequence parallelism).
        loss: function `loss(logits, batch)`, in place of the mean cross entropy, such as a loss of `shardfn.rl`: to a
            0-d tensor or a WeightedMean, and with `has_aux` an aux. The logits are `apply`'s for all of
            `batch["tokens"]`, a part of V on each rank of `axis`. As with `apply`, no balance of experts is added. The
            batch may have "at" and "routes", which are `at` and `chosen` of `apply`. Stages then also send the routes,
            as int32.

    Raises:
        ValueError: the blocks are not stacked, or experts have a bias, which `models.moe.stages` passes on, or `loss`
            with a `loss_tile`, which computes no logits. By the first stage: "at" or "routes" without a `loss`, or
            routes of other experts.

    Example:
        >>> import shardfn.core as core
        >>> config = Config(vocab_size=64, num_layers=2, d_model=32, num_heads=4, stacked=True)
        >>> params, batch = init(config, core.key(0)), {"tokens": torch.zeros(2, 9, dtype=torch.int64)}
        >>> first, block, last = stages(config)
        >>> h = first(params, batch)
        >>> for i in range(config.num_layers):
        ...     h = block({name: x[i] for name, x in params["blocks"].items()}, h)
        >>> torch.allclose(last(params, h, batch), loss(config, params, batch))
        True
        >>> _, _, last = stages(config, loss=lambda logits, batch: logits.square().mean())
        >>> torch.allclose(last(params, h, batch), apply(config, params, batch["tokens"][:, :-1]).square().mean())
        True
    """
    if config.experts is not None and config.experts.bias_rate > 0:
        raise ValueError(
            f"gpt.stages of experts with bias_rate={config.experts.bias_rate}: these functions have no biases, by which"
            " tokens choose experts. Use models.moe.stages, with sharded_step(has_state=True)."
        )
    first, run, last = stages_and_seen(config, axis, sequence, loss)

    def run_layer(p: Params, h: dict[str, Tensor], key: Tensor | None = None) -> dict[str, Tensor]:
        return run(p, h, key)[0]

    return Stages(first, wrap(run_layer), last)


def stages_and_seen(
    config: Config, axis: Axes = None, sequence: bool = False, loss: LogitsLoss | None = None
) -> Stages:
    """Returns the parts of `stages`, of which `block(p, h, key, bias_E)` also returns the facts of its router, or None.

    Raises:
        ValueError: the blocks are not stacked, or `loss` with a `loss_tile`.
    """
    if not config.stacked:
        raise ValueError("stages: a pipeline runs stacked layers. Use Config(stacked=True).")
    _check_untiled(config, "stages", "loss", loss)

    def get_along(num_tokens: int) -> _Along:
        return _Along(axis, num_tokens if sequence else None)

    def run_first(params: Params, batch: dict[str, Any], key: Tensor | None = None) -> dict[str, Tensor]:
        if loss is None:
            _check_of_logits(batch, "stages", "pass stages(loss=)")
            batch = _shift_targets(config, batch)
        tokens_BT, index_B = batch["tokens"], batch.get("index")
        cut, positions_T = get_along(tokens_BT.shape[1]), _get_positions(config, tokens_BT)
        x_BTD = _embed_tokens(config, params, tokens_BT, positions_T, cut)
        x_BTD = _dropout(config, cut, key, x_BTD, index_B)
        h = {"x": x_BTD, "position": positions_T}
        h |= {name: batch[name] for name in ("segment_ids", "mask") if name in batch}
        # A sum of no tokens is 0, and varies along the axes of the tokens, as the balance of layers does.
        h |= {"balance": tokens_BT.flatten()[:0].sum().to(x_BTD.dtype)} if config.experts else {}
        if "routes" in batch:  # each layer takes the first ones and puts them last; NCCL sends no int16
            h["routes"] = _by_layer(config, batch["routes"], tokens_BT).int().contiguous()
        return h | ({} if key is None or index_B is None else {"index": index_B})

    def run_layer(
        p: Params, h: dict[str, Tensor], key: Tensor | None = None, bias_E: Tensor | None = None
    ) -> tuple[dict[str, Tensor], Seen | None]:
        table = _make_table(config, h["position"], h["x"].dtype, h.get("segment_ids"))
        cut, x_BTD, index_B, seen = get_along(len(h["position"])), h["x"], h.get("index"), None
        routes_mBTk = h.get("routes")
        more = "blocks", h.get("mask"), None if routes_mBTk is None else routes_mBTk[0]
        layers = layers_of(config, p)
        keys = [key] if len(layers) == 1 or key is None else split(key, len(layers)).unbind()
        for own, k in zip(layers, keys * len(layers) if key is None else keys, strict=True):
            x_BTD, seen = _block(config, cut, None, own, x_BTD, table, k, index_B, bias_E, *more)
        share = {} if seen is None else {"balance": h["balance"] + seen.loss / len(config.expert_layers)}
        share |= {} if routes_mBTk is None else {"routes": routes_mBTk.roll(-1, 0)}
        return h | {"x": x_BTD} | share, seen

    def run_last(params: Params, h: dict[str, Tensor], batch: dict[str, Any], key: Tensor | None = None) -> Any:
        del key
        cut = get_along(len(h["position"]))
        x_BTD = _norm(config, cut, h["x"], params["norm_w"], params.get("norm_b"))
        if loss is not None:
            x_BTD = x_BTD if (at_BS := batch.get("at")) is None else _rows_at(config, cut, x_BTD, at_BS)
            return loss(_compute_logits(config, params, x_BTD, cut), batch)
        return _compute_mean(config, params, x_BTD, shifted(batch), cut, h.get("balance"), weighted=_is_weighted(batch))

    return Stages(run_first, run_layer, run_last)


@torch.no_grad()
def generate(
    config: Config,
    params: Params,
    prompt_BT: Int64[Tensor, "b t"],
    num_tokens: int,
    key: Int64[Tensor, "2"],
    temperature: float = 1.0,
    axis: Axes = None,
    bias: Float[Tensor, "m e"] | Sequence[Tensor] | None = None,
) -> Int64[Tensor, "b s"]:
    """Samples a continuation: argmax(logits / temperature + Gumbel noise), token by token.

    Every step runs the model on the last `max_len` tokens. A `layout` must take any number of tokens (`padded=True`).
    The noise is a function of (key, step), so all ranks that hold the same prompt sample the same tokens.

    Args:
        config: shape.
        params: parameters as from `init`.
        prompt_BT: prompts of at least one token.
        num_tokens: number of tokens to append.
        key: key of the noise.
        temperature: divisor of logits. 0 takes the likeliest token.
        axis: mesh axes along which the leaves are cut, as in `apply`.
        bias: see `apply`.

    Returns:
        The prompt and its continuation, [B, T + num_tokens].

    Raises:
        ValueError: an empty prompt, a negative temperature, or a model that looks ahead.

    Example:
        >>> import shardfn.core as core
        >>> config = Config(vocab_size=64, num_layers=1, d_model=32, num_heads=4)
        >>> params, prompt_BT = init(config, core.key(0)), torch.zeros(2, 1, dtype=torch.int64)
        >>> generate(config, params, prompt_BT, 3, core.key(1)).shape
        torch.Size([2, 4])
    """
    if prompt_BT.shape[1] == 0 or temperature < 0:
        raise ValueError(
            f"generate: prompt of shape {tuple(prompt_BT.shape)}, temperature {temperature}: give at least one token"
            " (for example a start token) and a temperature of 0 or more."
        )
    if not config.causal:
        raise ValueError("generate: a model with causal=False sees later tokens, and cannot go on with a text.")
    tokens_BT, config = prompt_BT, dataclasses.replace(config, attention=nn.Dense())
    for step in range(num_tokens):
        x_BTD, _ = _compute_hidden(
            config, params, {"tokens": tokens_BT[:, -config.max_len :]}, along=_Along(axis), bias=bias
        )
        own_BV = _compute_logits(config, params, x_BTD[:, -1], _Along(axis))
        logits_BV = all_gather_invariant(own_BV, axis, dim=-1, size=config.vocab_size)
        next_B = _sample_tokens(logits_BV.float(), fold_in(key, step), temperature)
        tokens_BT = torch.cat((tokens_BT, next_B[:, None]), dim=1)
    return tokens_BT


# The forward pass.


def _check_batch(batch: Any) -> None:
    """Refuses batches without integer tokens [B, T + 1].

    Raises:
        TypeError: describes a batch, and the argument.
        ValueError: a mask does not fit the tokens.
    """
    tokens = batch.get("tokens") if isinstance(batch, Mapping) else None
    if not isinstance(tokens, Tensor) or tokens.ndim != 2 or tokens.is_floating_point():
        what = f"a {type(batch).__name__}" if not isinstance(batch, Mapping) else f"a dict with {sorted(batch)}"
        if isinstance(tokens, Tensor):
            what = f"a dict whose tokens are {tokens.dtype} of shape {tuple(tokens.shape)}"
        raise TypeError(f"a batch of gpt is {{'tokens': int64 [B, T + 1]}}, and this is {what}.")
    mask = batch.get("mask")  # pyright: ignore[reportOptionalMemberAccess]
    if mask is not None and (mask.dtype != torch.bool or mask.shape != tokens.shape):
        raise ValueError(
            f'the "mask" of a batch is {mask.dtype} of shape {tuple(mask.shape)}, and its tokens have shape'
            f" {tuple(tokens.shape)}. Give each token a bool, False for padding."
        )


_WHOLE = _Along()


def _compute_hidden(
    config: Config,
    params: Params,
    batch: dict[str, Any],
    key: Tensor | None = None,
    wrap: Wrap = lambda inner: inner,
    along: _Along = _WHOLE,
    tile: Wrap | None = None,
    bias: Tensor | Sequence[Tensor] | None = None,
    *,
    load: bool = False,
    chosen: Tensor | None = None,
) -> tuple[Tensor, Seen | None]:
    chosen = None if chosen is None else _by_layer(config, chosen, batch["tokens"])
    check_bias(config, bias)
    if tile is not None and along.sequence is not None:
        raise ValueError("loss(tile=, sequence=True): layers along `axis` take a rank's tokens together. Drop one.")
    tokens_BT, index_B, mask_BT = batch["tokens"], batch.get("index"), batch.get("mask")
    positions_T = _get_positions(config, tokens_BT)
    if axis_size(along.axis) > 1:
        check_blocks(config, params, along.axis)
    x_BTD = _embed_tokens(config, params, tokens_BT, positions_T, along)
    table = _make_table(config, positions_T, x_BTD.dtype, batch.get("segment_ids"))
    keys = [None] * (config.num_layers + 1) if key is None else split(key, config.num_layers + 1).unbind()
    x_BTD = _dropout(config, along, keys[-1], x_BTD, index_B)
    block = wrap(functools.partial(_block, config, along, tile, load=load))
    if config.stacked:
        x_BTD, seen = _scan_blocks(
            config, block, params["blocks"], x_BTD, table, keys[:-1], index_B, bias, mask_BT, chosen
        )
    else:
        found = list[Seen]()
        for i, (p, k) in enumerate(zip(params["blocks"], keys[:-1], strict=True)):
            own = (None if x is None or "router" not in p else x[len(found)] for x in (bias, chosen))
            bias_E, chosen_BTk = own
            x_BTD, one = block(p, x_BTD, table, k, index_B, bias_E, f"blocks.{i}", mask_BT, chosen_BTk)
            found += [] if one is None else [one]
        seen = join_seen(config, found)
    return _norm(config, along, x_BTD, params["norm_w"], params.get("norm_b")), seen


def _scan_blocks(
    config: Config,
    block: Callable[..., Any],
    blocks: Params,
    x_BTD: Tensor,
    table: Any,
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
            x_BTD, seen = block(p, x_BTD, table, key, index_B, take_bias, *more)
        return x_BTD, seen

    return nn.scan(run_block, x_BTD, (blocks, keyed, bias, chosen))


def _get_positions(config: Config, tokens_BT: Tensor) -> Tensor:
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


def _embed_tokens(config: Config, params: Params, tokens_BT: Tensor, positions_T: Tensor, along: _Along) -> Tensor:
    x_BTD = nn.embedding(tokens_BT, params["embed"], vocab_size=config.vocab_size, **along._asdict())
    if config.position == "learned":
        whole = not config.attention.axes
        table_TD = params["position"]
        x_BTD = x_BTD + nn.rank_tokens(table_TD[: len(positions_T)] if whole else table_TD[positions_T], *along)
    if config.embedding_norm:
        x_BTD = _norm(config, along, x_BTD, params["embed_norm_w"], params.get("embed_norm_b"))
    return x_BTD


def _shift_targets(config: Config, batch: dict[str, Any]) -> dict[str, Any]:
    if not config.causal and "targets" not in batch:
        raise ValueError(
            'Config(causal=False): each token sees the next, which cannot be its target. Give the batch "targets": the'
            ' tokens that are masked in its "tokens", and -100 elsewhere.'
        )
    if not config.causal and "mask" in batch and "segment_ids" not in batch:
        raise ValueError(
            'Config(causal=False): each token sees the padding of its row, which "mask" leaves to attention. Give the'
            ' batch "segment_ids", in which padding has a number of its own.'
        )
    return shifted(batch)


def _check_of_logits(batch: dict[str, Any], who: str, remedy: str) -> None:
    """Refuses entries of a batch that a mean cross entropy does not use.

    Raises:
        ValueError: names the entries.
    """
    if given := [name for name in ("at", "routes") if name in batch]:
        raise ValueError(
            f"{who}: the batch has {' and '.join(map(repr, given))}, and the mean cross entropy is of all tokens, by"
            f" the routers' own choices; {remedy}, or leave them out."
        )


def _check_untiled(config: Config, who: str, name: str, of_logits: LogitsLoss | None) -> None:
    if of_logits is not None and config.loss_tile is not None:
        raise ValueError(
            f"{who}: {name}={of_logits} reads logits, and Config(loss_tile={config.loss_tile}) has only those of a tile"
            " at a time. Take loss_tile=None."
        )


def _is_weighted(batch: dict[str, Any]) -> bool:
    """Returns whether rows differ in the number of targets that count."""
    return any(name in batch for name in ("targets", "segment_ids", "mask"))


def _compute_mean(
    config: Config, params: Params, x_BTD: Tensor, batch: Any, along: _Along, extra: Tensor | None, *, weighted: bool
) -> Any:
    """Returns the mean cross entropy, and `extra` added to it."""
    targets_BT = batch["targets"]
    if config.loss_tile is None:
        logits_BTV = _compute_logits(config, params, x_BTD, along)
        pair = nn.cross_entropy_sum(logits_BTV, targets_BT, axis=along.axis, vocab_size=config.vocab_size)
    else:
        options: dict[str, Any] = {"vocab_size": config.vocab_size, **along._asdict()}
        pair = nn.tiled_cross_entropy(x_BTD, _get_head(config, params), targets_BT, tile=config.loss_tile, **options)
    return _add_balance(WeightedMean(*pair) if weighted else pair[0] / pair[1].clamp(min=1), extra)


def _add_balance(value: Any, extra: Tensor | None) -> Any:
    """Returns a loss and the balance losses. A mean over ranks by their targets has the balance by the same weight."""
    if extra is None:
        return value
    if isinstance(value, WeightedMean):
        return WeightedMean(value.total + extra * value.weight, value.weight)
    return value + extra


def _get_head(config: Config, params: Params) -> Any:
    return params["embed" if config.tie_embeddings else "head"]


def _compute_logits(config: Config, params: Params, x_BTD: Tensor, along: _Along) -> Tensor:
    return nn.column_linear(
        x_BTD, _weight(config, _get_head(config, params)), features=config.vocab_size, **along._asdict()
    )


def _rows_at(config: Config, along: _Along, x_BTD: Tensor, at_BS: Tensor) -> Tensor:
    if along.sequence is not None or config.attention.axes:
        cause = f"{config.attention}" if config.attention.axes else "sequence=True"
        raise ValueError(
            f"apply(at=) of shape {tuple(at_BS.shape)} takes positions of whole rows, and with {cause} a rank has only"
            " some tokens of each. Drop one."
        )
    return x_BTD.gather(1, at_BS[..., None].expand(-1, -1, x_BTD.shape[-1]))


def _make_table(
    config: Config, positions_T: Tensor, dtype: torch.dtype, ids_BT: Tensor | None = None
) -> dict[str, Any]:
    """Returns attention's arguments for positions and documents: of this rank's tokens and all heads."""
    causal = nn.Causal() if config.window is None else nn.Window(config.window - 1)
    mask = causal if config.causal else nn.Full()
    if config.layout is not None:
        mask = mask & config.layout(nn.whole_length(config.attention, len(positions_T)))
    mask = mask if ids_BT is None else mask & nn.Segments(nn.whole_sequence(ids_BT, config.attention))
    how: dict[str, Any] = {
        "how": nn.Attending(mask, nn.BatchInvariant() if config.batch_invariant else config.attention)
    }
    return how | _position_tables(config, positions_T, dtype)


def _sample_tokens(logits_BV: Tensor, key: Tensor, temperature: float) -> Tensor:
    if temperature == 0:
        return logits_BV.argmax(-1)
    tiny = torch.finfo(torch.float32).tiny
    u_BV = uniform(key, logits_BV.shape, minval=tiny, device=logits_BV.device)
    return (logits_BV / temperature - (-u_BV.log()).log()).argmax(-1)
