"""Experts: feed-forward layers of groups of rows, each group with separate weights.

`f(params, rows, counts) -> rows`: `counts[e]` consecutive rows belong to expert e. Leaves have the experts along dim 0.
M rows, E experts, D model, F ffn.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor
from torch.nn import functional as F

from shardfn.collectives import axis_index, axis_size, pvary
from shardfn.core import Axes, PyTree
from shardfn.nn._batch_invariant_functions import batch_invariant_gelu

from ._gated import gated_product
from ._grouped import grouped

ExpertFunction = Callable[[PyTree, Tensor, Tensor], Tensor]


def swiglu_experts(
    params: Mapping[str, Any],
    x_MD: Float[Tensor, "m d"],
    counts_E: Int64[Tensor, " e"],
    *,
    batch_invariant: bool = False,
) -> Float[Tensor, "m d"]:
    """Returns `(silu(x w_gate^T) * x w_up^T) w_down^T` with the weights of each row's expert, as in Mixtral.

    Args:
        params: leaves `{"w_gate_up": [E, 2, F, D], "w_down": [E, D, F]}`. Where an axis cuts F, the result is the
            rank's part of a sum.
        x_MD: rows, by expert. Rows past the last count are zeros, and stay zeros.
        counts_E: rows of each expert.
        batch_invariant: whether a row has the same bits next to any other rows, for float32 or float64.

    Example:
        >>> import torch
        >>> params = {"w_gate_up": torch.zeros(2, 2, 4, 3), "w_down": torch.ones(2, 3, 4)}
        >>> swiglu_experts(params, torch.ones(5, 3), torch.tensor([2, 3])).shape
        torch.Size([5, 3])
    """
    w_E2FD, w_EDF = params["w_gate_up"], params["w_down"]
    gate_up_MI = grouped(x_MD, w_E2FD.flatten(1, 2), counts_E, transposed=True, batch_invariant=batch_invariant)
    return gated_product(gate_up_MI, w_EDF, counts_E, batch_invariant=batch_invariant)


def gelu_experts(
    params: Mapping[str, Any],
    x_MD: Float[Tensor, "m d"],
    counts_E: Int64[Tensor, " e"],
    *,
    axis: Axes = None,
    batch_invariant: bool = False,
) -> Float[Tensor, "m d"]:
    """Returns `gelu(x w_up^T + b_up) w_down^T + b_down` with the weights of each row's expert, as in GPT-MoE.

    Args:
        params: `{"w_up": [E, F, D], "w_down": [E, D, F]}`, and "b_up" [E, F] and "b_down" [E, D] or neither.
        x_MD: rows, by expert. Rows past the last count are zeros, and stay zeros.
        counts_E: rows of each expert.
        axis: mesh axes along which F is cut. All ranks have the same rows, and the result is the rank's part of a sum,
            with the second bias only on the first rank. None means a single device.
        batch_invariant: whether a row has the same bits next to any other rows, for float32 or float64.

    Example:
        >>> import torch
        >>> params = {"w_up": torch.ones(2, 4, 3), "w_down": torch.zeros(2, 3, 4), "b_down": torch.ones(2, 3)}
        >>> gelu_experts(params, torch.zeros(2, 3), torch.tensor([1, 0])).tolist()
        [[1.0, 1.0, 1.0], [0.0, 0.0, 0.0]]
    """
    up_MF = _apply_affine(x_MD, params["w_up"], params.get("b_up"), counts_E, batch_invariant)
    h_MF = batch_invariant_gelu(up_MF) if batch_invariant else F.gelu(up_MF, approximate="tanh")
    b_ED = params.get("b_down")
    if b_ED is not None and axis_size(axis) > 1:
        b_ED = pvary(b_ED, axis) * (axis_index(axis) == 0)
    return _apply_affine(h_MF, params["w_down"], b_ED, counts_E, batch_invariant)


def _apply_affine(x_MD: Tensor, w_EFD: Tensor, b_EF: Tensor | None, counts_E: Tensor, batch_invariant: bool) -> Tensor:
    y_MF = grouped(x_MD, w_EFD, counts_E, transposed=True, batch_invariant=batch_invariant)
    return y_MF if b_EF is None else y_MF + _expand_bias(b_EF, y_MF, counts_E, batch_invariant)


def _expand_bias(b_EF: Tensor, like_MF: Tensor, counts_E: Tensor, batch_invariant: bool) -> Tensor:
    """Returns the bias of each row's expert: a product with a matrix of 1, so the transpose sums in a fixed order."""
    return grouped(torch.ones_like(like_MF[:, :1]), b_EF[:, None], counts_E, batch_invariant=batch_invariant)
