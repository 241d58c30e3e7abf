"""LSTM, GRU and recurrent highway layers over whole sequences, for a single device or with units cut along an axis.

    z_t = W_x x_t + b                           for all t at once
    LSTM     i, f, o = sigmoid(z + W_h h)       g = tanh(z + W_h h)
             c' = f c + i g                     h' = o tanh(c')
    GRU      r, u = sigmoid(z + W_h h)          n = tanh(z_n + r (W_h h + b_h))
             h' = (1 - u) n + u h
    highway  for l = 1 .. L:  n = tanh(R_l s + b_l + [l = 1] W_x x),  t = sigmoid(same form),  s = t n + (1 - t) s

Weights are [K, H, inputs]: the gates of a unit have a separate dim, in torch's order. So a unit is one index of the dim
H of a leaf, and an axis cuts units. A rank then computes the gates of the rank's units, and the ranks gather h before
each step. `scan` loops over time, so a captured step has one traced step. The LSTM of whole float32 weights is torch's.

B batch, T tokens, D inputs, H hidden units, K gates, L depth.

Hochreiter and Schmidhuber, Long Short-Term Memory, 1997
Cho et al., Learning Phrase Representations using RNN Encoder-Decoder, 2014, https://arxiv.org/abs/1406.1078
Zilly et al., Recurrent Highway Networks, 2016, https://arxiv.org/abs/1607.03474
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from shardfn import collectives, core, nn

from ._structure import Leaves, Structure, apply_map, dense

Kind = Literal["lstm", "gru", "highway"]
KINDS: tuple[Kind, ...] = ("lstm", "gru", "highway")


class CellWeights(NamedTuple):
    """Weights of a recurrent layer.

    Attributes:
        w_x: map of the inputs: [K, H, D], or the leaves of a structured map.
        w_h: map of the hidden units: [K, H, H], or leaves. A highway layer has L maps, one for each depth.
        b: biases: [K, H], of a GRU [4, H] with the biases of n of inputs and of hidden units, of a highway layer [L, K,
            H].
    """

    w_x: Leaves
    w_h: Any
    b: Tensor


class LSTMState(NamedTuple):
    """State of an LSTM: hidden units h and cells c, [B, H] each, or the rank's units."""

    h: Tensor
    c: Tensor


class _LayerShape(NamedTuple):
    """Sizes and maps of a layer."""

    hidden: int
    axis: core.Axes
    maps: tuple[Structure, Structure]

    def read(self, h_BH: Tensor) -> Tensor:
        """Returns all hidden units, where each rank has some."""
        return collectives.all_gather(h_BH, self.axis, dim=-1, size=self.hidden)

    def recur(self, w_h: Leaves, h_BH: Tensor) -> Tensor:
        """Returns [B, K, H] of all hidden units."""
        return apply_map(self.maps[1], w_h, h_BH, outputs=self.hidden, axis=self.axis)


def lstm(
    x_BTD: Float[Tensor, "b t d"],
    w: CellWeights,
    state: LSTMState | None = None,
    *,
    hidden: int,
    maps: tuple[Structure, Structure] = (dense(), dense()),
    axis: core.Axes = None,
) -> tuple[Float[Tensor, "b t h"], LSTMState]:
    """Returns the hidden units at all positions, and the last state.

    Args:
        x_BTD: inputs.
        w: weights with gates i, f, g, o. Over several ranks, the blocks.
        state: state before the first position, or None for zeros. Over several ranks, the rank's units.
        hidden: number of hidden units H of the whole layer.
        maps: structures of the maps of inputs and of hidden units.
        axis: mesh axes that cut the units. None is a single device.

    Returns:
        All units [B, T, H], and the state of the rank's units.

    Raises:
        ValueError: weights are not the blocks of a layer of `hidden` units.

    Example:
        >>> w = CellWeights(torch.ones(4, 3, 2), torch.ones(4, 3, 3), torch.zeros(4, 3))
        >>> y, state = lstm(torch.ones(1, 5, 2), w, hidden=3)
        >>> torch.equal(y[:, -1], state.h)
        True
    """
    layer = _LayerShape(hidden, axis, maps)
    _check_bias(layer, w.b, (4,))
    alone = collectives.axis_size(axis) == 1 and not collectives.transforming() and not torch.compiler.is_exporting()
    if maps == (dense(), dense()) and alone:
        return _lstm_of_torch(x_BTD, w, state)

    def step(state: LSTMState, w_h: Leaves, z_BKH: Tensor) -> tuple[LSTMState, Tensor]:
        i, f, g, o = (z_BKH + layer.recur(w_h, layer.read(state.h))).unbind(1)
        c_BH = f.sigmoid() * state.c + i.sigmoid() * g.tanh()
        h_BH = o.sigmoid() * c_BH.tanh()
        return LSTMState(h_BH, c_BH), h_BH

    z_BTKH = _read_inputs(layer, w, x_BTD, w.b)
    return _run(layer, step, z_BTKH, LSTMState(*_zeros(z_BTKH, 2)) if state is None else state, w.w_h)


def gru(
    x_BTD: Float[Tensor, "b t d"],
    w: CellWeights,
    state: Float[Tensor, "b h"] | None = None,
    *,
    hidden: int,
    maps: tuple[Structure, Structure] = (dense(), dense()),
    axis: core.Axes = None,
) -> tuple[Float[Tensor, "b t h"], Float[Tensor, "b own"]]:
    """Returns the hidden units at all positions, and the last hidden units.

    Args:
        x_BTD: see `lstm`.
        w: weights with gates r, u, n, and 4 biases: r, u, n of the inputs, n of the hidden units.
        state: hidden units before the first position, or None for zeros.
        hidden: see `lstm`.
        maps: see `lstm`.
        axis: see `lstm`.

    Raises:
        ValueError: as `lstm`.

    Example:
        >>> w = CellWeights(torch.ones(3, 4, 2), torch.ones(3, 4, 4), torch.zeros(4, 4))
        >>> gru(torch.ones(1, 5, 2), w, hidden=4)[0].shape
        torch.Size([1, 5, 4])
    """
    layer = _LayerShape(hidden, axis, maps)
    _check_bias(layer, w.b, (4,))

    def step(h_BH: Tensor, leaves: Any, z_BKH: Tensor) -> tuple[Tensor, Tensor]:
        w_h, b_H = leaves
        a_BKH = layer.recur(w_h, layer.read(h_BH))
        r, u = (z_BKH[:, :2] + a_BKH[:, :2]).sigmoid().unbind(1)
        n = (z_BKH[:, 2] + r * (a_BKH[:, 2] + b_H)).tanh()
        h_BH = (1 - u) * n + u * h_BH
        return h_BH, h_BH

    z_BTKH = _read_inputs(layer, w, x_BTD, w.b[:3])
    return _run(layer, step, z_BTKH, _zeros(z_BTKH, 1)[0] if state is None else state, (w.w_h, w.b[3]))


def highway(
    x_BTD: Float[Tensor, "b t d"],
    w: CellWeights,
    state: Float[Tensor, "b h"] | None = None,
    *,
    hidden: int,
    maps: tuple[Structure, Structure] = (dense(), dense()),
    axis: core.Axes = None,
) -> tuple[Float[Tensor, "b t h"], Float[Tensor, "b own"]]:
    """Returns the units at all positions, and the last units, of a recurrent highway layer of depth L.

    Args:
        x_BTD: see `lstm`.
        w: weights with gates n, t. `w_h` has a map for each depth: a tensor [L, K, H, H], or a list of leaves.
        state: units before the first position, or None for zeros.
        hidden: see `lstm`.
        maps: see `lstm`.
        axis: see `lstm`.

    Raises:
        ValueError: as `lstm`.

    Example:
        >>> w = CellWeights(torch.ones(2, 4, 3), torch.ones(5, 2, 4, 4), torch.zeros(5, 2, 4))
        >>> highway(torch.ones(1, 6, 3), w, hidden=4)[0].shape
        torch.Size([1, 6, 4])
    """
    layer = _LayerShape(hidden, axis, maps)
    _check_bias(layer, w.b, (len(w.w_h), 2))

    def step(s_BH: Tensor, leaves: Any, z_BKH: Tensor) -> tuple[Tensor, Tensor]:
        for depth, (w_h, b_KH) in enumerate(zip(*leaves, strict=True)):
            a_BKH = layer.recur(w_h, layer.read(s_BH)) + b_KH
            n, t = (a_BKH if depth else a_BKH + z_BKH).unbind(1)
            s_BH = s_BH + t.sigmoid() * (n.tanh() - s_BH)
        return s_BH, s_BH

    z_BTKH = _read_inputs(layer, w, x_BTD, None)
    return _run(layer, step, z_BTKH, _zeros(z_BTKH, 1)[0] if state is None else state, (list(w.w_h), list(w.b)))


def _read_inputs(layer: _LayerShape, w: CellWeights, x_BTD: Tensor, b_KH: Tensor | None) -> Tensor:
    """Returns [B, T, K, H] of all positions."""
    x_BTD = nn.enter_parallel(x_BTD, layer.axis)
    z_BTKH = apply_map(layer.maps[0], w.w_x, x_BTD, outputs=layer.hidden, axis=layer.axis)
    return z_BTKH if b_KH is None else z_BTKH + b_KH


def _run(layer: _LayerShape, step: Callable[..., Any], z_BTKH: Tensor, state: Any, leaves: Any) -> tuple[Tensor, Any]:
    """Loops over time. The leaves are part of the carry, so that a captured step writes their gradients down once."""

    def body(carry: tuple[Any, Any], z_BKH: Tensor) -> tuple[tuple[Any, Any], Tensor]:
        # Views, so that the gradients of the uses in a step are added first, in a captured step as in the loop.
        state, leaves = core.tree_map(lambda x: x.view(x.shape), carry[0]), carry[1]
        state, h_BH = step(state, leaves, z_BKH)
        return (state, leaves), h_BH

    # A view, so that a leaf in pieces is gathered before the loop, and not in each step.
    leaves = core.tree_map(lambda w: w.view(w.shape), leaves)
    (state, _), h_TBH = nn.scan(body, (state, leaves), z_BTKH.transpose(0, 1))
    return collectives.all_gather_invariant(
        h_TBH.transpose(0, 1).contiguous(), layer.axis, dim=-1, size=layer.hidden
    ), state


def _zeros(z_BTKH: Tensor, num: int) -> list[Tensor]:
    """Returns states of zeros, which vary along the axes along which the inputs vary."""
    zeros = [z_BTKH.new_zeros(z_BTKH.shape[0], z_BTKH.shape[-1]) for _ in range(num)]
    mode = collectives.current_axis_types(begin=False)
    return zeros if mode is None else [collectives.pvary(x, mode.axes_of(z_BTKH)) for x in zeros]


def _lstm_of_torch(x_BTD: Tensor, w: CellWeights, state: LSTMState | None) -> tuple[Tensor, LSTMState]:
    zeros = x_BTD.new_zeros(1, x_BTD.shape[0], w.b.shape[1])
    first = (zeros, zeros) if state is None else (state.h[None], state.c[None])
    b = w.b.flatten()
    weights = [w.w_x.flatten(0, 1), w.w_h.flatten(0, 1), b, torch.zeros_like(b)]
    y_BTH, h, c = torch.lstm(x_BTD, first, weights, True, 1, 0.0, torch.is_grad_enabled(), False, True)
    return y_BTH, LSTMState(h[0], c[0])


def _check_bias(layer: _LayerShape, b: Tensor, front: tuple[int, ...]) -> None:
    start, stop = nn.rank_range(layer.hidden, layer.axis)
    if tuple(b.shape) != (*front, stop - start):
        num = collectives.axis_size(layer.axis)
        raise ValueError(
            f"a recurrent layer of hidden={layer.hidden} over {num} ranks must have biases of shape"
            f" {(*front, stop - start)}, got {tuple(b.shape)}. Cut the units along {layer.axis!r}, or correct hidden."
        )
