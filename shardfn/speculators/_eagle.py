"""EAGLE-3: a decoder layer guesses the next n tokens from states of several layers of a model, and from its own states.

    g_t     = Fuse [state after layer low, middle, high]_t                  from the model, for t up to the last token
    x       = [RMSNorm(Emb[token]), RMSNorm(g)]
    h       = g + attention(x)                                              over the window and the own chain
    out     = h + SwiGLU(RMSNorm(h))
    logits  = Head RMSNorm(out)

The layer reads the state g_t and the token drawn from that state, and gives the logits of the token after. Then `out`
takes the place of g, with the guessed token, and so on: n tokens from a single state of the model. In training the
layer is fed its own `out`, too, for n steps (training-time test), so that it learns from the states that it meets.

The layer attends to the W last states of the model, at most, and to its own chain. So it has no KV cache: a proposal
computes the keys of W states anew, and costs the same at any length. The published layer attends to all tokens.

B samples, T positions with all labels, S positions of keys, D model, E inner width, H heads, K head dim, n drafts, V
vocabulary, W window, N widths of all fused states.

References:
    Li et al., EAGLE-3: Scaling up Inference Acceleration of Large Language Models via Training-Time Test, 2025,
    https://arxiv.org/abs/2503.01840
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64
from torch import Tensor

from shardfn import kernels, nn
from shardfn.core import Axes

from ._config import EagleConfig, MTPConfig
from ._inputs import DraftInputs, DraftSteps

Params = dict[str, Any]


class LayerFunctions(NamedTuple):
    """Functions of the layer, in torch's form or in the form that is batch-invariant."""

    multiply: Callable[[str, Tensor], Tensor]
    rms_norm: Callable[..., Tensor]
    gated_silu: Callable[[Tensor, Tensor], Tensor]


def torch_functions(config: EagleConfig | MTPConfig, params: Params) -> LayerFunctions:
    """Returns the functions of a layer with these weights, in torch's form."""
    norm = functools.partial(nn.rms_norm, eps=config.norm_eps)
    return LayerFunctions(lambda name, x: F.linear(x, params[name]), norm, lambda gate, up: F.silu(gate) * up)


def pack_layers(config: EagleConfig | MTPConfig, params: Params) -> Params:
    """Returns the parameters of `start_eagle` and `start_mtp`: panels in place of weights, and rotary tables.

    The tables, "cos" and "sin", have the places of all states of a proposal and of the drafts.
    """
    packed = {name: kernels.pack_rows(params[name]) for name in config.products}
    places = torch.arange(config.hidden_window + config.num_drafts, device=params["embed"].device)
    tables = nn.batch_invariant_rope_table(places, config.head_dim, base=config.rope_base)
    return params | packed | dict(zip(("cos", "sin"), tables, strict=True))


def batch_invariant_functions(config: EagleConfig | MTPConfig, params: Params, prefix: str = "") -> LayerFunctions:
    """Returns the functions of a layer with these weights, in the form that is batch-invariant.

    Args:
        config: shape.
        params: parameters as from `pack_layers`.
        prefix: beginning of the names of the layer's leaves, for example "1.".
    """

    def multiply(name: str, x: Tensor) -> Tensor:
        return kernels.row_linear(x, params[prefix + name], config.shapes[prefix + name][0])

    norm = functools.partial(nn.batch_invariant_rms_norm, eps=config.norm_eps)
    return LayerFunctions(multiply, norm, kernels.gated_silu)


def apply_eagle(
    config: EagleConfig,
    params: Params,
    hidden_BTN: Float[Tensor, "b t n"],
    tokens_BTn: Int64[Tensor, "b t n2"],
    axis: Axes = None,
) -> list[Float[Tensor, "b t v"]]:
    """Returns the logits of each guessed token, after the states of each position and of the W - 1 positions before."""
    functions = torch_functions(config, params)
    T, device = hidden_BTN.shape[1], hidden_BTN.device
    at_T = torch.arange(T, device=device)
    distance_TS = at_T[:, None] - at_T
    seen_TS = (distance_TS >= 0) & (distance_TS < config.window)
    g_BTE, logits = functions.multiply("fuse", hidden_BTN), list[Tensor]()
    keys, values = list[Tensor](), list[Tensor]()
    for i, tokens_BT in enumerate(tokens_BTn.unbind(-1)):
        e_BTE = nn.embedding(tokens_BT, params["embed"], vocab_size=config.vocab_size, axis=axis)
        x_BT2 = join_inputs(params, functions, e_BTE, g_BTE)
        table = nn.rope_table(at_T + i, config.head_dim, base=config.rope_base, dtype=hidden_BTN.dtype)
        q_BTHK, k_BTGK = (nn.rope(split_heads(config, functions.multiply(n, x_BT2)), *table) for n in ("wq", "wk"))
        keys.append(repeat_heads(config, k_BTGK))
        values.append(repeat_heads(config, split_heads(config, functions.multiply("wv", x_BT2))))
        y_BTHK = _attend_chains(q_BTHK, keys, values, seen_TS)
        g_BTE = finish_layer(params, functions, g_BTE, y_BTHK)
        last_BTE = functions.rms_norm(g_BTE, params["last_norm_w"])
        logits.append(nn.column_linear(last_BTE, params["head"], features=config.num_outputs, axis=axis))
    return logits


class EagleState(NamedTuple):
    """State of N chains.

    Attributes:
        g_NE: state of each chain's last token.
        cache: keys and values of the chains: a block each, and before them a block that takes the keys of padding.
        last_N: place of the last state of the model in a chain's block.
    """

    g_NE: Tensor
    cache: Tensor
    last_N: Tensor


def start_eagle(config: EagleConfig, params: Params, inputs: DraftInputs) -> DraftSteps:
    """Returns the drafts of B sequences, by batch-invariant kernels: the function of `apply_eagle`.

    Each chain has a block of a KV cache for only this call.
    """
    functions = batch_invariant_functions(config, params)
    multiply, cos, sin = functions.multiply, params["cos"], params["sin"]
    (B, W), device = inputs.tokens_BW.shape, inputs.tokens_BW.device
    room, count = W + config.num_drafts, {"dtype": torch.int32, "device": device}

    def attend(x: Tensor, row_x: Tensor, at: Tensor, slots: Tensor, of: Tensor, state: EagleState, *rows: Any) -> Any:
        row_at, row = rows
        q = kernels.rotate(split_heads(config, multiply("wq", row_x)), cos[row_at], sin[row_at])
        k = kernels.rotate(split_heads(config, multiply("wk", x)), cos[at], sin[at])
        v = split_heads(config, multiply("wv", x))
        tables = torch.arange(1, len(state.cache), **count)[:, None]
        return kernels.ragged_attention(q, k, v, state.cache, slots, at, of, tables, rows=row)[0]

    def embed(tokens: Tensor) -> Tensor:
        return params["embed"][tokens]

    def finish(state: EagleState, g_NE: Tensor, y_NHK: Tensor) -> tuple[EagleState, Tensor]:
        g_NE = finish_layer(params, functions, g_NE, y_NHK)
        return state._replace(g_NE=g_NE), multiply("head", functions.rms_norm(g_NE, params["last_norm_w"]))

    def read_states(state: EagleState) -> tuple[EagleState, Tensor]:
        places_W, own_B = torch.arange(W, **count), torch.arange(B, **count)
        known_BW = places_W <= state.last_N[:, None]
        slots = torch.where(known_BW, places_W + (own_B[:, None] + 1) * room, places_W).flatten()
        positions = torch.where(known_BW, places_W, 0).flatten()
        g_RE = multiply("fuse", inputs.hidden_BWN.flatten(0, 1))
        x_R2 = join_inputs(params, functions, embed(inputs.tokens_BW.flatten()), g_RE)
        rows_B = own_B * W + state.last_N
        of = own_B.repeat_interleave(W)
        y_BHK = attend(x_R2, x_R2[rows_B], positions, slots, of, state, state.last_N, rows_B)
        return finish(state, g_RE[rows_B], y_BHK)

    def advance(i: int, state: EagleState, tokens_N: Tensor) -> tuple[EagleState, Tensor]:
        if not i:
            return read_states(state)
        x_N2 = join_inputs(params, functions, embed(tokens_N), state.g_NE)
        own_N, at_N = torch.arange(len(tokens_N), **count), state.last_N + i
        y_NHK = attend(x_N2, x_N2, at_N, (own_N + 1) * room + at_N, own_N, state, at_N, None)
        return finish(state, state.g_NE, y_NHK)

    def select(state: EagleState, index_M: Tensor) -> EagleState:
        blocks = torch.cat([index_M.new_zeros(1), index_M + 1])
        return EagleState(state.g_NE[index_M], state.cache[blocks], state.last_N[index_M])

    cache = torch.zeros(B + 1, 2, config.num_kv_heads or config.num_heads, room, config.head_dim, device=device)
    nothing = inputs.hidden_BWN.new_zeros(B, config.d_inner)
    return DraftSteps(EagleState(nothing, cache, (inputs.counts_B - 1).int()), advance, select)


def join_inputs(params: Params, functions: LayerFunctions, e_E: Tensor, g_E: Tensor) -> Tensor:
    """Returns the norms of an embedding and of a state, concatenated."""
    norms = functions.rms_norm(e_E, params["embed_norm_w"]), functions.rms_norm(g_E, params["state_norm_w"])
    return torch.cat(norms, -1)


def split_heads(config: EagleConfig | MTPConfig, y: Tensor) -> Tensor:
    """Returns vectors [*, H K] as heads [*, H, K]."""
    return y.unflatten(-1, (-1, config.head_dim))


def repeat_heads(config: EagleConfig | MTPConfig, x_G: Tensor) -> Tensor:
    """Repeats key or value heads [*, G, K] for the query heads, [*, H, K]."""
    return x_G.repeat_interleave(config.num_heads // x_G.shape[-2], -2)


def _attend_chains(
    q_BTHK: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], seen_TS: Tensor
) -> Float[Tensor, "b t h k"]:
    """Returns attention over the first keys within a window, and over later keys of only the position's chain."""
    q_BTHK = q_BTHK * q_BTHK.shape[-1] ** -0.5
    first_BHTS = torch.einsum("bthk,bshk->bhts", q_BTHK, keys[0]).where(seen_TS, -torch.inf)
    own = [torch.einsum("bthk,bthk->bht", q_BTHK, k_BTHK)[..., None] for k_BTHK in keys[1:]]
    p = torch.cat([first_BHTS, *own], -1).softmax(-1)
    y_BTHK = torch.einsum("bhts,bshk->bthk", p[..., : len(seen_TS)], values[0])
    for i, v_BTHK in enumerate(values[1:]):
        y_BTHK = y_BTHK + p[..., len(seen_TS) + i].transpose(1, 2)[..., None] * v_BTHK
    return y_BTHK


def finish_layer(params: Params, functions: LayerFunctions, g_E: Tensor, y_HK: Tensor) -> Tensor:
    """Returns the state after a layer with this attention."""
    h_E = g_E + functions.multiply("wo", y_HK.flatten(-2))
    z_E = functions.rms_norm(h_E, params["norm_w"])
    up = functions.gated_silu(functions.multiply("w_gate", z_E), functions.multiply("w_up", z_E))
    return h_E + functions.multiply("w_down", up)
