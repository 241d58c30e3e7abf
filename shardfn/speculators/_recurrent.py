"""Recurrent speculators: a small recurrence guesses the next n tokens from a hidden state of a model.

    h_0 = RMSNormalise(state) / sqrt(2)        c_0 = 0        z_i = a Emb[token_i]
    mlp     h_i+1 = GELU(LN(P h_i + z_i))
    lstm    f, i, o = sigmoid(P h_i + z_i)        g = GELU(LN(P h_i + z_i))
            c_i+1 = f c_i + i g                   h_i+1 = o GELU(LN(c_i+1))
    logits_i = Head h_i+1

P of head 0 multiplies the model's width, and all later heads share a second P. So a state and the token drawn from the
state give the next token, and so on. The factor is a = w_e / w_s, w_s = 0.5^(1 / 2n), w_e = sqrt((1 - w_s^2) E / 2). It
keeps the parts of state and token in proportion over n steps.

B samples, S tokens, T positions with all labels, D model, E inner width, G projections of a cell, V vocabulary, n
heads.

References:
    Wertheimer et al., Accelerating Production LLMs with Combined Token/Embedding Speculators, 2024,
    https://arxiv.org/abs/2404.19124
    Arctic Inference, 2025, https://arxiv.org/abs/2507.11830
"""

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64
from torch import Tensor

from shardfn import nn
from shardfn.core import Axes, P, PyTree, full, normal, split
from shardfn.engine import WeightedMean

from ._config import RecurrentConfig

Params = dict[str, Any]


class CellState(NamedTuple):
    """State of the recurrence.

    Attributes:
        h: hidden state [*, E], or [*, D] before the first head.
        c: cell of an LSTM [*, E], or 0 before the first head, and for "mlp".
    """

    h: Tensor
    c: Tensor


class CellFunctions(NamedTuple):
    """Functions of a cell, in torch's form or in the form that is batch-invariant."""

    rms_norm: Callable[..., Tensor]
    layer_norm: Callable[..., Tensor]
    gelu: Callable[[Tensor], Tensor]
    sigmoid: Callable[[Tensor], Tensor]


TORCH = CellFunctions(nn.rms_norm, nn.layer_norm, functools.partial(F.gelu, approximate="tanh"), torch.sigmoid)
BATCH_INVARIANT = CellFunctions(
    nn.batch_invariant_rms_norm,
    nn.batch_invariant_layer_norm,
    nn.batch_invariant_gelu,
    nn.batch_invariant_sigmoid,
)


def init(config: RecurrentConfig, key: Int64[Tensor, "2"]) -> Params:
    """Returns fresh parameters: weights normal(0, 1 / sqrt(smaller dim)), and norms of scale 1 and shift 0.

    Args:
        config: shape.
        key: key. Weight i is drawn with `fold_in(key, i)`.

    Returns:
        float32: {"embed" [V, E], "first" [G E, D], "later" [G E, E], "head" [V, E], "norm_w", "norm_b", and for "lstm"
            "cell_norm_w", "cell_norm_b"}.

    Example:
        >>> from shardfn import core
        >>> config = RecurrentConfig("lstm", vocab_size=64, d_model=32, num_layers=2, d_inner=16)
        >>> init(config, core.key(0))["first"].shape
        torch.Size([64, 32])
    """
    shapes = list_shapes(config)
    weights = [name for name in shapes if "norm" not in name]
    keys = dict(zip(weights, split(key, len(weights)), strict=True))
    return {
        name: normal(keys[name], shape, stddev=min(shape) ** -0.5)
        if name in keys
        else full(shape, float(name.endswith("_w")))
        for name, shape in shapes.items()
    }


def list_shapes(config: RecurrentConfig) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of the parameters by name."""
    V, D, E, rows = config.vocab_size, config.d_model, config.d_inner, config.num_gates * config.d_inner
    norms = ("norm_w", "norm_b", *(("cell_norm_w", "cell_norm_b") if config.kind == "lstm" else ()))
    weights = {"embed": (V, E), "first": (rows, D), "later": (rows, E), "head": (V, E)}
    return weights | dict.fromkeys(norms, (E,))


def specs(config: RecurrentConfig, *, tp: Axes = None) -> PyTree:
    """Returns the compute layout: `P()`, whole, for every leaf. With `tp`, the vocabulary of embedding and head is cut.

    Args:
        config: shape.
        tp: mesh axes of tensor parallelism, the `axis` of `loss`.
    """
    return {name: P(tp) if name in ("embed", "head") and tp is not None else P() for name in list_shapes(config)}


def apply(
    config: RecurrentConfig,
    params: Params,
    hidden_BTD: Float[Tensor, "b t d"],
    tokens_BTN: Int64[Tensor, "b t n"],
    *,
    axis: Axes = None,
) -> list[Float[Tensor, "b t v"]]:
    """Returns the logits of each head.

    Args:
        config: shape.
        params: parameters as from `init`.
        hidden_BTD: hidden states of the model: the states that the model's head multiplies.
        tokens_BTN: token drawn from each state, and the n - 1 tokens after that token.
        axis: mesh axes along which `specs(config, tp=axis)` cuts the leaves. The logits are then the rank's classes.

    Example:
        >>> from shardfn import core
        >>> config = RecurrentConfig("mlp", vocab_size=64, d_model=32, num_layers=2, d_inner=16)
        >>> params, tokens = init(config, core.key(0)), torch.zeros(2, 5, 3, dtype=torch.int64)
        >>> [x.shape for x in apply(config, params, torch.ones(2, 5, 32), tokens)][0]
        torch.Size([2, 5, 64])
    """
    state, logits = start_state(TORCH, hidden_BTD), []
    for i, tokens_BT in enumerate(tokens_BTN.unbind(-1)):
        z_BTE = nn.embedding(tokens_BT, params["embed"], vocab_size=config.vocab_size, axis=axis)
        y_BTN = F.linear(state.h, params["later" if i else "first"])
        state = advance_state(config, params, TORCH, y_BTN, state.c, z_BTE * scale_of(config))
        logits.append(nn.column_linear(state.h, params["head"], features=config.vocab_size, axis=axis))
    return logits


def loss(config: RecurrentConfig, params: Params, batch: Mapping[str, Tensor], *, axis: Axes = None) -> WeightedMean:
    """Returns the sum over the heads of the mean cross entropy of their tokens.

    Head i at position t sees the state at t and the tokens t + 1 to t + 1 + i, and guesses the token t + i + 2.

    Args:
        config: shape.
        params: parameters as from `init`.
        batch: {"hidden": [B, S, D], states of the frozen model as of `hidden_states`, "tokens": int64 [B, S]}.
        axis: mesh axes along which `specs(config, tp=axis)` cuts the leaves. None is a single device.

    Raises:
        ValueError: sequences have no position with all labels, or states have another width.

    Example:
        >>> from shardfn import core
        >>> config = RecurrentConfig("mlp", vocab_size=64, d_model=32, num_layers=2, d_inner=16)
        >>> batch = {"hidden": torch.ones(2, 9, 32), "tokens": torch.zeros(2, 9, dtype=torch.int64)}
        >>> total, weight = loss(config, init(config, core.key(0)), batch)
        >>> weight.item()
        10.0
    """
    hidden_BSD, tokens_BS, n = batch["hidden"], batch["tokens"], config.num_heads
    S, D = hidden_BSD.shape[1:]
    if D != config.d_model or tokens_BS.shape[1] != S or S < n + 2:
        raise ValueError(
            f"loss: hidden states must have {config.d_model} numbers for each of {n + 2} tokens or more, got the shape"
            f" {tuple(hidden_BSD.shape)} for tokens of shape {tuple(tokens_BS.shape)}."
        )
    windows_BTN = tokens_BS[:, 1:].unfold(1, n + 1, 1)  # the tokens that each position reads, and the last label
    T = windows_BTN.shape[1]
    logits = apply(config, params, hidden_BSD[:, :T], windows_BTN[..., :n], axis=axis)
    pairs = [
        nn.cross_entropy_sum(x_BTV, windows_BTN[..., i + 1], axis=axis, vocab_size=config.vocab_size)
        for i, x_BTV in enumerate(logits)
    ]
    return WeightedMean(torch.stack([total for total, _ in pairs]).sum(), pairs[0][1])


def start_state(functions: CellFunctions, hidden_D: Float[Tensor, "*batch d"]) -> CellState:
    """Returns the state before the first head."""
    scale_D = hidden_D.new_full(hidden_D.shape[-1:], 0.5**0.5)
    return CellState(functions.rms_norm(hidden_D, scale_D), hidden_D.new_zeros(()))


def scale_of(config: RecurrentConfig) -> float:
    """Returns the factor a of embeddings."""
    state_weight = 0.5 ** (0.5 / config.num_heads)
    return math.sqrt((1 - state_weight**2) * config.d_inner / 2) / state_weight


def advance_state(
    config: RecurrentConfig,
    params: Params,
    functions: CellFunctions,
    projected: Float[Tensor, "*batch n"],
    c_E: Float[Tensor, "..."],
    z_E: Float[Tensor, "*batch e"],
) -> CellState:
    """Returns the state of the next head.

    Args:
        config: shape.
        params: parameters. Only norms are read.
        functions: functions of a cell.
        projected: product of h with "first" for the first head, and with "later" for all later heads.
        c_E: cell of the state before.
        z_E: embedding of the head's token, times `scale_of(config)`.
    """
    y_GE = projected.unflatten(-1, (config.num_gates, config.d_inner)) + z_E[..., None, :]
    g_E = functions.gelu(functions.layer_norm(y_GE[..., -1, :], params["norm_w"], params["norm_b"]))
    if config.kind == "mlp":
        return CellState(g_E, c_E)
    f_E, i_E, o_E = functions.sigmoid(y_GE[..., :-1, :]).unbind(-2)
    c_E = f_E * c_E + i_E * g_E
    out_E = functions.gelu(functions.layer_norm(c_E, params["cell_norm_w"], params["cell_norm_b"]))
    return CellState(o_E * out_E, c_E)
