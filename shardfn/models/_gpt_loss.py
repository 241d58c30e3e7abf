"""The loss of the GPT, and the batches that the loss takes.

B batch, T tokens, V vocabulary.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from shardfn import nn
from shardfn.collectives import bind_mesh
from shardfn.core import Axes, Mesh
from shardfn.engine import WeightedMean

from ._gpt_block import Along, Seen, Wrap
from ._gpt_config import Config
from ._gpt_forward import compute_hidden, compute_logits, name_head
from ._gpt_images import hide_images
from ._gpt_leaves import Params

# From logits and a batch to a loss, in place of the cross entropy.
LogitsLoss = Callable[[Tensor, Any], Any]


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
            "mask", as "tokens" and False for padding after a row's tokens, padding is not a target, gets no expert,
            takes no capacity and counts in no balance. `torch.arange(T + 1) < lengths[:, None]` makes a mask of
            lengths. "image_features", with `Config(images=)`, are [N, D], a row for each image token, row by row in
            order of positions, and replicated on ranks that cut the sequence. Image tokens are not targets.
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
        A 0-d tensor, or a WeightedMean where "targets", "segment_ids" or "mask" are in the batch, or of a model with
        images.

    Raises:
        TypeError: the batch is not a dict with "tokens" of integers, [B, T + 1].
        ValueError: as `apply`. A model that looks ahead and a batch without "targets", whose tokens it would see, or
            with a "mask" without "segment_ids", by which tokens leave out padding. A "mask" that does not fit the
            tokens. "at" or "routes", which are of `stages(loss=)`, or `tile` and `sequence`, whose layers take all of a
            rank's tokens together, or `of_logits` with a `loss_tile`, which computes no logits.

    Example:
        >>> import shardfn.core as core
        >>> from shardfn.models.gpt import init
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
        >>> from shardfn.models.gpt import init
        >>> config = Config(vocab_size=64, num_layers=1, d_model=32, num_heads=4)
        >>> batch = {"tokens": torch.zeros(2, 9, dtype=torch.int64)}
        >>> _, seen = loss_and_seen(config, init(config, core.key(0)), batch)
        >>> print(seen)  # no layer has experts
        None
    """
    _check_batch(batch)
    check_of_logits(batch, "loss", "Take a loss of apply(..., at=, chosen=)")
    check_untiled(config, "loss", "of_logits", of_logits)
    given, batch = batch, shift_targets(config, batch)
    along = Along(axis, batch["tokens"].shape[1] if sequence else None)
    x_BTD, seen = compute_hidden(config, params, batch, key, wrap, along, tile, bias, load=load)
    extra = None if seen is None else seen.loss.mean()
    if of_logits is not None:
        return _add_balance(of_logits(compute_logits(config, params, x_BTD, along), batch), extra), seen
    return compute_mean(config, params, x_BTD, batch, along, extra, weighted=is_weighted(config, given)), seen


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
    out = shift_targets(config, batch)
    T = out["tokens"].shape[1]
    with bind_mesh(mesh):
        length = nn.whole_length(config.attention, T)
        if length != T:
            raise ValueError(f"cut_sequences: rows of {T} tokens for {config.attention}. Give their number as length.")
        rows = config.attention.rows(T)
    at = torch.cat([torch.arange(a, b, device=out["tokens"].device) for a, b in (*rows, (0, 0))])
    return out | {name: out[name][:, at] for name in _OF_TOKENS if name in out}


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


def shift_targets(config: Config, batch: dict[str, Any]) -> dict[str, Any]:
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
    out = shifted(batch)
    return out if config.images is None else out | {"targets": hide_images(config, out["targets"])}


def check_of_logits(batch: dict[str, Any], who: str, remedy: str) -> None:
    """Refuses entries of a batch that a mean cross entropy does not use.

    Raises:
        ValueError: names the entries.
    """
    if given := [name for name in ("at", "routes") if name in batch]:
        raise ValueError(
            f"{who}: the batch has {' and '.join(map(repr, given))}, and the mean cross entropy is of all tokens, by"
            f" the routers' own choices. {remedy}, or leave them out."
        )


def check_untiled(config: Config, who: str, name: str, of_logits: LogitsLoss | None) -> None:
    if of_logits is not None and config.loss_tile is not None:
        raise ValueError(
            f"{who}: {name}={of_logits} reads logits, and Config(loss_tile={config.loss_tile}) has only those of a tile"
            " at a time. Use loss_tile=None."
        )


def is_weighted(config: Config, batch: dict[str, Any]) -> bool:
    """Returns whether rows differ in the number of targets that count."""
    return config.images is not None or any(name in batch for name in ("targets", "segment_ids", "mask"))


def compute_mean(
    config: Config, params: Params, x_BTD: Tensor, batch: Any, along: Along, extra: Tensor | None, *, weighted: bool
) -> Any:
    """Returns the mean cross entropy, and `extra` added to it."""
    targets_BT = batch["targets"]
    if config.loss_tile is None:
        logits_BTV = compute_logits(config, params, x_BTD, along)
        pair = nn.cross_entropy_sum(logits_BTV, targets_BT, axis=along.axis, vocab_size=config.vocab_size)
    else:
        options: dict[str, Any] = {"vocab_size": config.vocab_size, **along._asdict()}
        pair = nn.tiled_cross_entropy(x_BTD, params[name_head(config)], targets_BT, tile=config.loss_tile, **options)
    return _add_balance(WeightedMean(*pair) if weighted else pair[0] / pair[1].clamp(min=1), extra)


def _add_balance(value: Any, extra: Tensor | None) -> Any:
    """Returns a loss and the balance losses. A mean over ranks by their targets has the balance by the same weight."""
    if extra is None:
        return value
    if isinstance(value, WeightedMean):
        return WeightedMean(value.total + extra * value.weight, value.weight)
    return value + extra
