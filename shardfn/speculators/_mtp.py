"""Multi-token prediction: a decoder layer for each of the next n tokens, each fed the states of the layer before.

    g_0,t   = state of the model at t                                          that the model's head multiplies
    x       = Project_k [RMSNorm(Emb[token_t+k+1]), RMSNorm(g_k,t)]            for k from 0 to n - 1
    h       = x + attention(RMSNorm(x))                                        over the last W positions
    g_k+1,t = h + SwiGLU(RMSNorm(h))
    logits  = Head RMSNorm(g_k+1,t)                                            of token t + k + 2

Embedding and head are the same for all modules, and the model's in `joint_loss`. A module reads the token that the
module before guesses, so that the whole causal chain is kept. At a proposal the modules compute the last states of the
model anew: W positions for the last module, and W - 1 more for each module before, so that drafts are functions of the
states and tokens that training had. There is no KV cache, and a proposal costs the same at any length. The published
modules attend to all tokens.

B samples, T positions with all labels, D model, E = D width, H heads, K head dim, n drafts, V vocabulary, W window, R
positions of a proposal.

References:
    DeepSeek-AI, DeepSeek-V3 Technical Report, 2024, https://arxiv.org/abs/2412.19437, section 2.2
"""

from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from shardfn import kernels, nn
from shardfn.core import Axes

from ._config import MTPConfig
from ._eagle import (
    LayerFunctions,
    batch_invariant_functions,
    finish_layer,
    join_inputs,
    repeat_heads,
    split_heads,
    torch_functions,
)
from ._inputs import DraftInputs, DraftSteps

Params = dict[str, Any]


def apply_mtp(
    config: MTPConfig,
    params: Params,
    hidden_BTD: Float[Tensor, "b t d"],
    tokens_BTn: Int64[Tensor, "b t n"],
    axis: Axes = None,
) -> list[Float[Tensor, "b t v"]]:
    """Returns the logits of each module after each position."""
    at_T = torch.arange(hidden_BTD.shape[1], device=hidden_BTD.device)
    distance_TS = at_T[:, None] - at_T
    seen_TS = (distance_TS >= 0) & (distance_TS < config.window)
    table = nn.rope_table(at_T, config.head_dim, base=config.rope_base, dtype=hidden_BTD.dtype)
    g_BTE, logits = hidden_BTD, list[Tensor]()
    for i, tokens_BT in enumerate(tokens_BTn.unbind(-1)):
        own = _take_module(params, i)
        functions = torch_functions(config, own)
        e_BTE = nn.embedding(tokens_BT, params["embed"], vocab_size=config.vocab_size, axis=axis)
        x_BTE = functions.multiply("project", join_inputs(own, functions, e_BTE, g_BTE))
        y_BTE = functions.rms_norm(x_BTE, own["first_norm_w"])
        q, k, v = (split_heads(config, functions.multiply(name, y_BTE)) for name in ("wq", "wk", "wv"))
        k, v = repeat_heads(config, nn.rope(k, *table)), repeat_heads(config, v)
        g_BTE = finish_layer(own, functions, x_BTE, _attend_window(nn.rope(q, *table), k, v, seen_TS))
        last_BTE = functions.rms_norm(g_BTE, own["last_norm_w"])
        logits.append(nn.column_linear(last_BTE, params["head"], features=config.vocab_size, axis=axis))
    return logits


class MTPState(NamedTuple):
    """States, tokens and places of the last positions of N chains, which the next module reads.

    The first module has all tokens, and a later module lacks the last token.
    """

    g_NRE: Tensor
    tokens_NR: Tensor
    at_NR: Tensor  # below 0 is padding


def start_mtp(config: MTPConfig, params: Params, inputs: DraftInputs) -> DraftSteps:
    """Returns the drafts of B sequences, by batch-invariant kernels: the function of `apply_mtp`.

    The states are those at the last R positions. Module k computes only the positions that the modules after k attend
    to: R - (k + 1) (W - 1). The KV cache is for only this call, and its block 0 takes the keys of padding.
    """
    R, device = inputs.tokens_BW.shape[1], inputs.tokens_BW.device
    table = params["cos"][:R], params["sin"][:R]

    def advance(i: int, state: MTPState, tokens_N: Tensor) -> tuple[MTPState, Tensor]:
        tokens_NR = torch.cat([state.tokens_NR, tokens_N[:, None]], 1) if i else state.tokens_NR
        own, N, before = _take_module(params, i), len(tokens_N), config.window - 1
        functions = batch_invariant_functions(config, params, f"{i}.")
        e_NRE = params["embed"][tokens_NR]
        x_NRE = functions.multiply("project", join_inputs(own, functions, e_NRE, state.g_NRE).flatten(0, 1))
        y_NRE = functions.rms_norm(x_NRE, own["first_norm_w"])
        kept = x_NRE.unflatten(0, (N, -1))[:, before:]
        heads = _attend_last(config, functions, y_NRE, state.at_NR, table)
        g_NRE = finish_layer(own, functions, kept.flatten(0, 1), heads).unflatten(0, (N, -1))
        last_NE = functions.rms_norm(g_NRE[:, -1], own["last_norm_w"])
        logits_NV = kernels.row_linear(last_NE, params["head"], config.vocab_size)
        return MTPState(g_NRE, tokens_NR[:, before + 1 :], state.at_NR[:, before:]), logits_NV

    def select(state: MTPState, index_M: Tensor) -> MTPState:
        return MTPState(*(x[index_M] for x in state))

    at_BR = inputs.counts_B[:, None] + torch.arange(-R, 0, device=device)
    own_BR = at_BR.clamp(min=0)
    g_BRE = inputs.hidden_BWN.take_along_dim(own_BR[..., None], 1)
    return DraftSteps(MTPState(g_BRE, inputs.tokens_BW.take_along_dim(own_BR, 1), at_BR), advance, select)


def _attend_last(
    config: MTPConfig,
    functions: LayerFunctions,
    y: Float[Tensor, "n e"],
    at_BR: Int64[Tensor, "b r"],
    table: tuple[Tensor, Tensor],
) -> Float[Tensor, "m h k"]:
    """Returns attention of the positions that have W - 1 positions before, over W positions each."""
    (B, R), device = at_BR.shape, at_BR.device
    count: dict[str, Any] = {"dtype": torch.int32, "device": device}
    room = len(table[0])
    own_B1 = torch.arange(B, **count)[:, None]
    slots = torch.where(at_BR >= 0, (own_B1 + 1) * room + at_BR, torch.arange(R, device=device)).flatten().int()
    positions = at_BR.clamp(min=0).flatten().int()
    rows = (own_B1 * R + torch.arange(config.window - 1, R, **count)).flatten()
    cache = torch.zeros(B + 1, 2, config.num_kv_heads or config.num_heads, room, config.head_dim, device=device)
    turn = [x[positions] for x in table]
    q = kernels.rotate(split_heads(config, functions.multiply("wq", y[rows])), *[x[rows] for x in turn])
    k = kernels.rotate(split_heads(config, functions.multiply("wk", y)), *turn)
    v = split_heads(config, functions.multiply("wv", y))
    of, tables = own_B1.expand(B, R).flatten(), own_B1 + 1
    return kernels.ragged_attention(q, k, v, cache, slots, positions, of, tables, window=config.window, rows=rows)[0]


def _take_module(params: Params, number: int) -> Params:
    """Returns the leaves of a module without its number."""
    head = f"{number}."
    return {name.removeprefix(head): x for name, x in params.items() if name.startswith(head)}


def _attend_window(q_BTHK: Tensor, k_BTHK: Tensor, v_BTHK: Tensor, seen_TS: Tensor) -> Float[Tensor, "b t h k"]:
    scores_BHTS = torch.einsum("bthk,bshk->bhts", q_BTHK * q_BTHK.shape[-1] ** -0.5, k_BTHK)
    return torch.einsum("bhts,bshk->bthk", scores_BHTS.where(seen_TS, -torch.inf).softmax(-1), v_BTHK)
