"""Position-wise feed-forward layers.

D model, F ffn.
Hendrycks, Gimpel, Gaussian Error Linear Units, 2016, https://arxiv.org/abs/1606.08415
Shazeer, GLU Variants Improve Transformer, 2020, https://arxiv.org/abs/2002.05202
"""

from collections.abc import Callable
from typing import Literal

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from shardfn.core import Axes

from ._batch_invariant import AnyWeight, BatchInvariantWeight
from ._batch_invariant_functions import gated_silu, gelu
from ._parallel import affine, affines, check_block, enter_parallel, row_linear

# From the gate, the gated branch and a weight, batch-invariant or not, to the product.
Gate = Callable[[Tensor, Tensor, AnyWeight], Tensor]


def gated_gelu(gate_F: Float[Tensor, "*shape"], up_F: Float[Tensor, "*shape"], w: AnyWeight) -> Float[Tensor, "*shape"]:
    """Returns gelu(gate) * up, gelu in the form with tanh: the gate of geglu.

    Args:
        gate_F: gate.
        up_F: gated branch.
        w: weight of a layer before. With a batch-invariant weight, gelu is batch-invariant.

    Example:
        >>> import torch
        >>> gated_gelu(torch.zeros(2), torch.ones(2), torch.ones(1, 1)).tolist()
        [0.0, 0.0]
    """
    return gelu(gate_F, w) * up_F


def mlp(
    x_D: Float[Tensor, "*batch d"],
    w_up_FD: Float[AnyWeight, "f d"],
    w_down_DF: Float[AnyWeight, "d f"],
    b_up_F: Float[Tensor, " f"] | None = None,
    b_down_D: Float[Tensor, " d"] | None = None,
    *,
    act: Literal["gelu", "gelu_erf", "relu"] = "gelu",
    d_ff: int | None = None,
    axis: Axes = None,
    sequence: int | None = None,
) -> Float[Tensor, "*batch d"]:
    """Returns gelu(x w_up^T + b_up) w_down^T + b_down, gelu in GPT-2's form with tanh, or another activation.

    Args:
        x_D: any leading dims.
        w_up_FD: first weight.
        w_down_DF: second weight.
        b_up_F: first bias, or None.
        b_down_D: second bias, or None.
        act: activation in place of gelu: "gelu_erf", in the form with the error function, as in GPT-NeoX, not with
            batch-invariant weights, or "relu", as in T5.
        d_ff: F of the whole layer, needed where the axis has several ranks.
        axis: mesh axes along which F is cut: w_up[F_axis, D], w_down[D, F_axis]. None means a single device.
        sequence: T where x and the result are the rank's rows of the tokens (sequence parallelism).

    Raises:
        ValueError: a weight is not the rank's block of a layer of `d_ff`, or is batch-invariant with "gelu_erf".

    Example:
        >>> import torch
        >>> mlp(torch.zeros(2, 3), torch.ones(4, 3), torch.ones(3, 4)).tolist()
        [[0.0, 0.0, 0.0], [0.0, 0.0, 0.0]]
    """
    check_block("mlp: w_up", w_up_FD.shape[:1], d_ff, axis, option="d_ff")
    if act == "gelu_erf" and isinstance(w_up_FD, BatchInvariantWeight):
        raise ValueError("mlp(act='gelu_erf'): batch-invariant gelu has the form with tanh. Use act='gelu'.")
    h_F = affine(enter_parallel(x_D, axis, sequence), w_up_FD, b_up_F)
    h_F = gelu(h_F, w_up_FD) if act == "gelu" else F.relu(h_F) if act == "relu" else F.gelu(h_F)
    return row_linear(h_F, w_down_DF, b_down_D, features=d_ff, axis=axis, sequence=sequence)


def swiglu(
    x_D: Float[Tensor, "*batch d"],
    w_gate_FD: Float[AnyWeight, "f d"],
    w_up_FD: Float[AnyWeight, "f d"],
    w_down_DF: Float[AnyWeight, "d f"],
    *,
    gate: Gate = gated_silu,
    d_ff: int | None = None,
    axis: Axes = None,
    sequence: int | None = None,
) -> Float[Tensor, "*batch d"]:
    """Returns (silu(x w_gate^T) * x w_up^T) w_down^T, silu(z) = z sigmoid(z).

    Args:
        x_D: any leading dims.
        w_gate_FD: weight of the gate.
        w_up_FD: weight of the gated branch.
        w_down_DF: weight back to D.
        gate: function `gate(gate_F, up_F, weight)` of both branches in place of silu(gate) * up, such as `gated_gelu`.
        d_ff: F of the whole layer, needed where the axis has several ranks.
        axis: mesh axes along which F is cut: w_up[F_axis, D], w_down[D, F_axis]. None means a single device.
        sequence: T where x and the result are the rank's rows of the tokens (sequence parallelism).

    Raises:
        ValueError: a weight is not the rank's block of a layer of `d_ff`.

    Example:
        >>> import torch
        >>> swiglu(torch.ones(2), torch.zeros(3, 2), torch.ones(3, 2), torch.ones(2, 3)).tolist()
        [0.0, 0.0]
    """
    for name, w_FD in (("w_gate", w_gate_FD), ("w_up", w_up_FD)):
        check_block(f"swiglu: {name}", w_FD.shape[:1], d_ff, axis, option="d_ff")
    x_D = enter_parallel(x_D, axis, sequence)
    gate_F, up_F = affines(x_D, (w_gate_FD, w_up_FD), (None, None))
    return row_linear(gate(gate_F, up_F, w_up_FD), w_down_DF, features=d_ff, axis=axis, sequence=sequence)


def fused_swiglu(
    x_D: Float[Tensor, "*batch d"],
    w_2FD: Float[AnyWeight, "2 f d"],
    w_down_DF: Float[AnyWeight, "d f"],
    *,
    d_ff: int | None = None,
    axis: Axes = None,
    sequence: int | None = None,
) -> Float[Tensor, "*batch d"]:
    """Returns `swiglu` with the gate and the gated branch in a single weight, and so in a single product.

    Args:
        x_D: any leading dims.
        w_2FD: weight of the gate, then of the branch. `P(None, axis)` cuts both equally.
        w_down_DF: weight back to D.
        d_ff: F of the whole layer, needed where the axis has several ranks.
        axis: mesh axes along which F is cut. None means a single device.
        sequence: T where x and the result are the rank's rows of the tokens (sequence parallelism).

    Raises:
        ValueError: a weight is not the rank's block of a layer of `d_ff`.

    Example:
        >>> import torch
        >>> fused_swiglu(torch.ones(2), torch.zeros(2, 3, 2), torch.ones(2, 3)).tolist()
        [0.0, 0.0]
    """
    check_block("fused_swiglu: w_2FD", w_2FD.shape[1:2], d_ff, axis, option="d_ff")
    gate_F, up_F = affine(enter_parallel(x_D, axis, sequence), w_2FD, None).unbind(-2)
    return row_linear(gated_silu(gate_F, up_F, w_2FD), w_down_DF, features=d_ff, axis=axis, sequence=sequence)
