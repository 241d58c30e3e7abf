"""The loss of the GPT as parts of a pipeline."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from shardfn.core import Axes, split

from ._gpt_block import Along, Seen, Wrap, block, by_layer, dropout, norm
from ._gpt_config import Config
from ._gpt_forward import compute_logits, embed_tokens, get_positions, make_tables, take_rows
from ._gpt_images import find_images
from ._gpt_leaves import Params, layers_of
from ._gpt_loss import LogitsLoss, check_of_logits, check_untiled, compute_mean, is_weighted, shift_targets


class Stages(NamedTuple):
    """The loss in three parts, as a pipeline takes them.

    Attributes:
        first: function `first(params, batch[, key]) -> h` that embeds the tokens.
        block: function `block(p, h[, key]) -> h` of a single layer, where p has the layer's leaves. Layers that are not
            stacked have a list with a function for each layer.
        last: function `last(params, h, batch[, key])`: the mean cross entropy, or another loss of the logits.
    """

    first: Callable[..., Any]
    block: Any
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

    Layers that are not stacked may differ, for example a pyramid of experts. Each rank then has the leaves of all
    layers, which ZeRO cuts along other axes, and the specs are `specs(config)` without `pp`.

    Args:
        config: shape.
        wrap: function applied to the block function, as in `wrap=remat` (activation checkpointing).
        axis: mesh axes along which `specs(config, tp=axis)` cuts the leaves. None is a single device.
        sequence: whether between blocks each rank of `axis` has only some tokens (Megatron's sequence parallelism).
        loss: function `loss(logits, batch)`, in place of the mean cross entropy, such as a loss of `shardfn.rl`: to a
            0-d tensor or a WeightedMean, and with `has_aux` an aux. The logits are `apply`'s for all of
            `batch["tokens"]`, a part of V on each rank of `axis`. As with `apply`, no balance of experts is added. The
            batch may have "at" and "routes", which are `at` and `chosen` of `apply`. Stages then also send the routes,
            as int32.

    Raises:
        ValueError: experts have a bias, which `models.moe.stages` passes on, or the model has SwiftKV, or `loss` with a
            `loss_tile`, which computes no logits. By the first stage: "at" or "routes" without a `loss`, or
            routes of other experts.

    Example:
        >>> import torch
        >>> import shardfn.core as core
        >>> from shardfn.models.gpt import apply, init, loss
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

    def run_layer(i: int, p: Params, h: dict[str, Tensor], key: Tensor | None = None) -> dict[str, Tensor]:
        return run(p, h, key, layer=i)[0]

    return Stages(first, for_each_layer(config, lambda i: wrap(functools.partial(run_layer, i))), last)


def for_each_layer(config: Config, make: Callable[[int], Callable[..., Any]]) -> Any:
    """Returns the function of a stacked layer, or a list with the function of each layer, by its number."""
    return make(0) if config.stacked else [make(i) for i in range(config.num_layers)]


def stages_and_seen(
    config: Config, axis: Axes = None, sequence: bool = False, loss: LogitsLoss | None = None
) -> Stages:
    """Returns the parts of `stages`, with a `block(p, h, key, bias_E, layer)` for all layers.

    The function also returns the facts of its router, or None. `layer` is the number of the first layer of `p`, and 0
    for stacked layers.

    Raises:
        ValueError: the model has SwiftKV, or `loss` with a `loss_tile`.
    """
    if config.swift is not None:
        raise ValueError(
            f"stages: a pipeline has no layers with SwiftKV, got swift={config.swift}. Train it without a pipeline."
        )
    check_untiled(config, "stages", "loss", loss)

    def get_along(num_tokens: int) -> Along:
        return Along(axis, num_tokens if sequence else None)

    def run_first(params: Params, batch: dict[str, Any], key: Tensor | None = None) -> dict[str, Tensor]:
        if loss is None:
            check_of_logits(batch, "stages", "Pass stages(loss=)")
            batch = shift_targets(config, batch)
        tokens_BT, index_B = batch["tokens"], batch.get("index")
        cut, positions_T = get_along(tokens_BT.shape[1]), get_positions(config, tokens_BT)
        x_BTD = embed_tokens(config, params, tokens_BT, positions_T, cut, batch.get("image_features"))
        x_BTD = dropout(config, cut, key, x_BTD, index_B)
        h = {"x": x_BTD, "position": positions_T}
        h |= {name: batch[name] for name in ("segment_ids", "mask") if name in batch}
        images_BT = find_images(config, tokens_BT)
        h |= {} if images_BT is None else {"images": images_BT.long()}
        # A sum of no tokens is 0, and varies along the axes of the tokens, as the balance of layers does.
        h |= {"balance": tokens_BT.flatten()[:0].sum().to(x_BTD.dtype)} if config.experts else {}
        if "routes" in batch:  # each layer takes the first ones and puts them last; NCCL sends no int16
            h["routes"] = by_layer(config, batch["routes"], tokens_BT).int().contiguous()
        return h | ({} if key is None or index_B is None else {"index": index_B})

    def run_layer(
        p: Params, h: dict[str, Tensor], key: Tensor | None = None, bias_E: Tensor | None = None, layer: int = 0
    ) -> tuple[dict[str, Tensor], Seen | None]:
        tables = make_tables(config, h["position"], h["x"].dtype, h.get("segment_ids"), h.get("images"))
        cut, x_BTD, index_B, seen = get_along(len(h["position"])), h["x"], h.get("index"), None
        routes_mBTk = h.get("routes")
        layers, name = (layers_of(config, p), "blocks") if config.stacked else ([p], f"blocks.{layer}")
        chosen = None if routes_mBTk is None or not any("router" in own for own in layers) else routes_mBTk[0]
        more = name, h.get("mask"), chosen
        keys = [key] if len(layers) == 1 or key is None else split(key, len(layers)).unbind()
        for i, (own, k) in enumerate(zip(layers, keys * len(layers) if key is None else keys, strict=True)):
            x_BTD, seen = block(config, cut, None, own, x_BTD, tables[layer + i], k, index_B, bias_E, *more)
        share = {} if seen is None else {"balance": h["balance"] + seen.loss / len(config.expert_layers)}
        share |= {} if routes_mBTk is None or seen is None else {"routes": routes_mBTk.roll(-1, 0)}
        return h | {"x": x_BTD} | share, seen

    def run_last(params: Params, h: dict[str, Tensor], batch: dict[str, Any], key: Tensor | None = None) -> Any:
        del key
        cut = get_along(len(h["position"]))
        x_BTD = norm(config, cut, h["x"], params["norm_w"], params.get("norm_b"))
        if loss is not None:
            x_BTD = x_BTD if (at_BS := batch.get("at")) is None else take_rows(config, cut, x_BTD, at_BS)
            return loss(compute_logits(config, params, x_BTD, cut), batch)
        weighted, batch = is_weighted(config, batch), shift_targets(config, batch)
        return compute_mean(config, params, x_BTD, batch, cut, h.get("balance"), weighted=weighted)

    return Stages(run_first, run_layer, run_last)
