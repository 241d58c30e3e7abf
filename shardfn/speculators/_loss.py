"""Parameters, logits and loss of speculators of all kinds.

B samples, S tokens, T positions with all labels, N widths of the wanted states, V vocabulary, n drafts.
"""

from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from shardfn import nn
from shardfn.core import Axes, P, PyTree, full, normal, raise_all, split
from shardfn.engine import WeightedMean

from ._config import EagleConfig, MTPConfig, SpeculatorConfig
from ._eagle import apply_eagle
from ._mtp import apply_mtp
from ._recurrent import apply_recurrent

Params = dict[str, Any]


def init(config: SpeculatorConfig, key: Int64[Tensor, "2"]) -> Params:
    """Returns fresh parameters: weights normal(0, 1 / sqrt(smaller dim)), and norms of scale 1 and shift 0.

    Args:
        config: shape.
        key: key. Weight i is drawn with `fold_in(key, i)`.

    Returns:
        float32: a leaf for each entry of `config.shapes`. "draft_tokens" is int64: the first tokens.

    Example:
        >>> from shardfn import core
        >>> from shardfn.speculators import RecurrentConfig
        >>> config = RecurrentConfig("lstm", vocab_size=64, d_model=32, num_layers=2, d_inner=16)
        >>> init(config, core.key(0))["first"].shape
        torch.Size([64, 32])
    """
    shapes = config.shapes
    weights = [name for name in shapes if "norm" not in name and name != "draft_tokens"]
    keys = dict(zip(weights, split(key, len(weights)), strict=True))
    params = {
        name: normal(keys[name], shape, stddev=min(shape) ** -0.5)
        if name in keys
        else full(shape, float(name.endswith("_w")))
        for name, shape in shapes.items()
    }
    if "draft_tokens" in params:
        params["draft_tokens"] = torch.arange(len(params["draft_tokens"]))
    return params


def specs(config: SpeculatorConfig, *, tp: Axes = None) -> PyTree:
    """Returns the compute layout: `P()`, whole, for every leaf. With `tp`, the vocabulary of embedding and head is cut.

    Args:
        config: shape.
        tp: mesh axes of tensor parallelism, the `axis` of `loss`.
    """
    return {name: P(tp) if name in ("embed", "head") and tp is not None else P() for name in config.shapes}


def check_params(config: SpeculatorConfig, params: Params) -> None:
    """Refuses parameters of another shape.

    Raises:
        ValueError: lists all leaves that are missing, unknown, or of another shape.
    """
    shapes = config.shapes
    problems = [f"{name} is missing" for name in shapes if name not in params]
    problems += [f"{name} is unknown" for name in params if name not in shapes]
    problems += [
        f"{name} is {tuple(params[name].shape)}, and must be {shape}"
        for name, shape in shapes.items()
        if name in params and tuple(params[name].shape) != shape
    ]
    raise_all(ValueError, f"these are not the parameters of {config}:", problems)


def apply(
    config: SpeculatorConfig,
    params: Params,
    hidden_BTN: Float[Tensor, "b t n"],
    tokens_BTn: Int64[Tensor, "b t n2"],
    *,
    axis: Axes = None,
) -> list[Float[Tensor, "b t v"]]:
    """Returns the logits of each guessed token, after each position.

    Args:
        config: shape.
        params: parameters as from `init`.
        hidden_BTN: hidden states of the model after `config.layers`, concatenated. After the last layer, the
            model's head multiplies the states. EAGLE-3 and MTP also read the states of the positions before.
        tokens_BTn: token drawn from each state, and the n - 1 tokens after that token.
        axis: mesh axes along which `specs(config, tp=axis)` cuts the leaves. The logits are then the rank's classes.

    Example:
        >>> from shardfn import core
        >>> from shardfn.speculators import RecurrentConfig
        >>> config = RecurrentConfig("mlp", vocab_size=64, d_model=32, num_layers=2, d_inner=16)
        >>> params, tokens = init(config, core.key(0)), torch.zeros(2, 5, 3, dtype=torch.int64)
        >>> [x.shape for x in apply(config, params, torch.ones(2, 5, 32), tokens)][0]
        torch.Size([2, 5, 64])
    """
    if isinstance(config, EagleConfig):
        return apply_eagle(config, params, hidden_BTN, tokens_BTn, axis)
    if isinstance(config, MTPConfig):
        return apply_mtp(config, params, hidden_BTN, tokens_BTn, axis)
    return apply_recurrent(config, params, hidden_BTN, tokens_BTn, axis)


def loss(config: SpeculatorConfig, params: Params, batch: Mapping[str, Tensor], *, axis: Axes = None) -> WeightedMean:
    """Returns the sum over the drafts of the mean cross entropy of their tokens, times `config.step_weights`.

    Draft i at position t sees the state at t and the tokens t + 1 to t + 1 + i, and guesses the token t + i + 2. A
    token that is not in "draft_tokens" adds nothing to a sum.

    Args:
        config: shape.
        params: parameters as from `init`.
        batch: {"hidden": [B, S, N], states of the frozen model as of `hidden_states`, "tokens": int64 [B, S]}.
        axis: mesh axes along which `specs(config, tp=axis)` cuts the leaves. None is a single device.

    Raises:
        ValueError: sequences have no position with all labels, or states have another width.

    Example:
        >>> from shardfn import core
        >>> from shardfn.speculators import RecurrentConfig
        >>> config = RecurrentConfig("mlp", vocab_size=64, d_model=32, num_layers=2, d_inner=16)
        >>> batch = {"hidden": torch.ones(2, 9, 32), "tokens": torch.zeros(2, 9, dtype=torch.int64)}
        >>> total, weight = loss(config, init(config, core.key(0)), batch)
        >>> weight.item()
        10.0
    """
    hidden_BSN, tokens_BS, n = batch["hidden"], batch["tokens"], config.num_drafts
    (S, N), width = hidden_BSN.shape[1:], config.d_model * len(config.layers)
    if N != width or tokens_BS.shape[1] != S or S < n + 2:
        raise ValueError(
            f"speculators.loss: states {tuple(hidden_BSN.shape)} and tokens {tuple(tokens_BS.shape)}. There must be a"
            f" state of {width} numbers for each token, and {n + 2} tokens or more."
        )
    windows_BTn = tokens_BS[:, 1:].unfold(1, n + 1, 1)  # the tokens that each position reads, and the last label
    T = windows_BTn.shape[1]
    logits = apply(config, params, hidden_BSN[:, :T], windows_BTn[..., :n], axis=axis)
    labels_BTn = _find_outputs(params.get("draft_tokens"), windows_BTn[..., 1:])
    totals = [
        weight * nn.cross_entropy_sum(x_BTV, labels_BT, axis=axis, vocab_size=config.num_outputs)[0]
        for weight, x_BTV, labels_BT in zip(config.step_weights, logits, labels_BTn.unbind(-1), strict=True)
    ]
    total = torch.stack(totals).sum()
    return WeightedMean(total, torch.full_like(total, labels_BTn[..., 0].numel()))


def _find_outputs(draft_tokens_M: Tensor | None, tokens: Int64[Tensor, "*shape"]) -> Int64[Tensor, "*shape"]:
    """Returns the numbers of tokens in the head, and -100 for tokens that the head does not have."""
    if draft_tokens_M is None:
        return tokens
    found = torch.searchsorted(draft_tokens_M, tokens.contiguous()).clamp(max=len(draft_tokens_M) - 1)
    return torch.where(draft_tokens_M[found] == tokens, found, -100)
