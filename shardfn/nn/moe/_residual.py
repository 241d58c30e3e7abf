"""`residual`: experts next to a dense MLP, mixed by a learnt coefficient."""

import torch
from jaxtyping import Float
from torch import Tensor


def residual(
    experts_SD: Float[Tensor, "*s d"],
    mlp_SD: Float[Tensor, "*s d"],
    x_SD: Float[Tensor, "*s d"],
    w_2D: Float[Tensor, "2 d"],
    b_2: Float[Tensor, "2"] | None = None,
) -> Float[Tensor, "*s d"]:
    """Returns `c[0] * experts + c[1] * mlp`, c = softmax(x w^T + b) of each token.

    With a single expert for each token the layer has the computation of two experts, without the second exchange.

    Args:
        experts_SD: the result of `moe.apply`.
        mlp_SD: mlp of the dense MLP, for the same tokens.
        x_SD: the tokens.
        w_2D: leaf next to the router's leaf, whole on all ranks.
        b_2: bias, or None.

    Example:
        >>> one = torch.ones(1, 3)
        >>> residual(3 * one, one, one, torch.zeros(2, 3))
        tensor([[2., 2., 2.]])

    References:
        Rajbhandari et al., DeepSpeed-MoE, 2022, https://arxiv.org/abs/2201.05596
    """
    mixed = torch.nn.functional.linear(x_SD, w_2D, b_2).softmax(-1)
    return experts_SD * mixed[..., :1] + mlp_SD * mixed[..., 1:]
