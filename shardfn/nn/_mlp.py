"""Position-wise feed-forward layers.

D model, F ffn.
Hendrycks, Gimpel, Gaussian Error Linear Units, 2016, https://arxiv.org/abs/1606.08415
Shazeer, GLU Variants Improve Transformer, 2020, https://arxiv.org/abs/2002.05202
"""

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor


def mlp(
    x_D: Float[Tensor, "*batch d"],
    w_up_FD: Float[Tensor, "f d"],
    w_down_DF: Float[Tensor, "d f"],
    b_up_F: Float[Tensor, " f"] | None = None,
    b_down_D: Float[Tensor, " d"] | None = None,
) -> Float[Tensor, "*batch d"]:
    """gelu(x w_up^T + b_up) w_down^T + b_down, gelu in GPT-2's form with tanh.

    Args:
        x_D: any leading dims.
        w_up_FD: first weight.
        w_down_DF: second weight.
        b_up_F: first bias, or None.
        b_down_D: second bias, or None.

    Example:
        >>> import torch
        >>> mlp(torch.zeros(2, 3), torch.ones(4, 3), torch.ones(3, 4)).tolist()
        [[0.0, 0.0, 0.0], [0.0, 0.0, 0.0]]
    """
    h_F = F.gelu(F.linear(x_D, w_up_FD, b_up_F), approximate="tanh")
    return F.linear(h_F, w_down_DF, b_down_D)


def swiglu(
    x_D: Float[Tensor, "*batch d"],
    w_gate_FD: Float[Tensor, "f d"],
    w_up_FD: Float[Tensor, "f d"],
    w_down_DF: Float[Tensor, "d f"],
) -> Float[Tensor, "*batch d"]:
    """(silu(x w_gate^T) * x w_up^T) w_down^T, silu(z) = z sigmoid(z).

    Args:
        x_D: any leading dims.
        w_gate_FD: weight of the gate.
        w_up_FD: weight of the gated branch.
        w_down_DF: weight back to D.

    Example:
        >>> import torch
        >>> swiglu(torch.ones(2), torch.zeros(3, 2), torch.ones(3, 2), torch.ones(2, 3)).tolist()
        [0.0, 0.0]
    """
    return F.linear(F.silu(F.linear(x_D, w_gate_FD)) * F.linear(x_D, w_up_FD), w_down_DF)
