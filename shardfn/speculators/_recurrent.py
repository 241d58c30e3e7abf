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
drafts.

References:
    Wertheimer et al., Accelerating Production LLMs with Combined Token/Embedding Speculators, 2024,
    https://arxiv.org/abs/2404.19124
    Arctic Inference, 2025, https://arxiv.org/abs/2507.11830
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64
from torch import Tensor

from shardfn import kernels, nn
from shardfn.core import Axes

from ._config import RecurrentConfig
from ._inputs import DraftInputs, DraftSteps

Params = dict[str, Any]


class CellState(NamedTuple):
    """State of the recurrence.

    Attributes:
        h: hidden state [*, E], or [*, D] before the first head.
        c: cell of an LSTM [*, E]. Zeros before the first head, and for "mlp".
    """

    h: Tensor
    c: Tensor


class CellFunctions(NamedTuple):
    """Functions of a cell, in torch's form or in the form that is batch-invariant."""

    rms_norm: Callable[..., Tensor]
    layer_norm: Callable[..., Tensor]
    gelu: Callable[[Tensor], Tensor]
    gate: Callable[[Tensor, Tensor], Tensor]  # sigmoid of the first times the second


TORCH = CellFunctions(
    nn.rms_norm, nn.layer_norm, functools.partial(F.gelu, approximate="tanh"), lambda gate, x: torch.sigmoid(gate) * x
)
BATCH_INVARIANT = CellFunctions(
    nn.batch_invariant_rms_norm, nn.batch_invariant_layer_norm, nn.batch_invariant_gelu, kernels.gated_sigmoid
)


def apply_recurrent(
    config: RecurrentConfig,
    params: Params,
    hidden_BTD: Float[Tensor, "b t d"],
    tokens_BTN: Int64[Tensor, "b t n"],
    axis: Axes = None,
) -> list[Float[Tensor, "b t v"]]:
    """Returns the logits of each head after each position."""
    state, logits = _start_state(config, TORCH, hidden_BTD), []
    for i, tokens_BT in enumerate(tokens_BTN.unbind(-1)):
        z_BTE = nn.embedding(tokens_BT, params["embed"], vocab_size=config.vocab_size, axis=axis)
        y_BTN = F.linear(state.h, params["later" if i else "first"])
        y_E = y_BTN.chunk(config.num_gates, -1)
        state = _advance_state(config, params, TORCH, y_E, state.c, z_BTE * scale_of(config))
        logits.append(nn.column_linear(state.h, params["head"], features=config.num_outputs, axis=axis))
    return logits


def pack_recurrent(config: RecurrentConfig, params: Params) -> Params:
    """Returns the parameters of `start_recurrent`: embeddings times `scale_of(config)`, and panels of each gate.

    So a draft has only kernels and sums of equal shapes, and the graph makes a single chain of them.
    """
    weights = {"head": params["head"]}
    for name in ("first", "later"):
        weights |= {f"{name}.{i}": x for i, x in enumerate(params[name].chunk(config.num_gates))}
    others = {name: x for name, x in params.items() if name not in config.products}
    packed = {name: kernels.pack_rows(x) for name, x in weights.items()}
    return others | packed | {"embed": params["embed"] * scale_of(config)}


def start_recurrent(config: RecurrentConfig, params: Params, inputs: DraftInputs) -> DraftSteps:
    """Returns the drafts of B sequences, by batch-invariant kernels: the function of `apply_recurrent`.

    Args:
        config: shape.
        params: parameters as from `pack_recurrent`.
        inputs: states and tokens of the sequences.
    """

    def advance(i: int, state: CellState, tokens_N: Tensor) -> tuple[CellState, Tensor]:
        name, z_NE = "later" if i else "first", params["embed"][tokens_N]
        weights = [params[f"{name}.{j}"] for j in range(config.num_gates)]
        projected = [kernels.row_linear(state.h, w, config.d_inner) for w in weights]
        state = _advance_state(config, params, BATCH_INVARIANT, projected, state.c, z_NE)
        return state, kernels.row_linear(state.h, params["head"], config.num_outputs)

    def select(state: CellState, index_M: Tensor) -> CellState:
        return CellState(state.h[index_M], state.c[index_M])

    return DraftSteps(_start_state(config, BATCH_INVARIANT, inputs.hidden_BWN[:, 0]), advance, select)


def _start_state(config: RecurrentConfig, functions: CellFunctions, hidden_D: Float[Tensor, "*batch d"]) -> CellState:
    """Returns the state before the first head."""
    scale_D = hidden_D.new_full(hidden_D.shape[-1:], 0.5**0.5)
    c_E = hidden_D.new_zeros((*hidden_D.shape[:-1], config.d_inner))
    return CellState(functions.rms_norm(hidden_D, scale_D), c_E)


def scale_of(config: RecurrentConfig) -> float:
    """Returns the factor a of embeddings."""
    state_weight = 0.5 ** (0.5 / config.num_drafts)
    return math.sqrt((1 - state_weight**2) * config.d_inner / 2) / state_weight


def _advance_state(
    config: RecurrentConfig,
    params: Params,
    functions: CellFunctions,
    projected: Sequence[Float[Tensor, "*batch e"]],
    c_E: Float[Tensor, "..."],
    z_E: Float[Tensor, "*batch e"],
) -> CellState:
    """Returns the state of the next head.

    Args:
        config: shape.
        params: parameters. Only norms are read.
        functions: functions of a cell.
        projected: product of h with each gate's part of "first" for the first head, and of "later" for all later heads.
        c_E: cell of the state before.
        z_E: embedding of the head's token, times `scale_of(config)`.
    """
    *gates, y_E = [y_E + z_E for y_E in projected]
    g_E = functions.gelu(functions.layer_norm(y_E, params["norm_w"], params["norm_b"]))
    if config.kind == "mlp":
        return CellState(g_E, c_E)
    f_E, i_E, o_E = gates
    c_E = functions.gate(f_E, c_E) + functions.gate(i_E, g_E)
    out_E = functions.gelu(functions.layer_norm(c_E, params["cell_norm_w"], params["cell_norm_b"]))
    return CellState(functions.gate(o_E, out_E), c_E)
