"""Balance without a loss: a bias of each expert in the choice, moved once a step by how busy the expert was."""

from jaxtyping import Float, Num
from torch import Tensor


def bias_update(
    bias: Float[Tensor, "*layers e"], counts: Num[Tensor, "*layers e"], rate: float, *, centred: bool = False
) -> Float[Tensor, "*layers e"]:
    """Moves each bias by `rate`, up where the expert has fewer choices than the mean, down where it has more.

    The result is bias + rate * sign(mean count - count). For example counts [3, 1, 2] move the biases by -rate, +rate
    and 0.

    Call `bias_update` once a step with the counts of the whole batch: sums over ranks and microbatches.

    Args:
        bias: biases of `sigmoid_groups`, of a layer or several layers. Biases are part of the model's state, and no
            parameters.
        counts: choices of each expert.
        rate: 0.001 in DeepSeek-V3.
        centred: whether the mean of the moves is subtracted, so that the mean of the biases stays (torchtitan).

    Example:
        >>> import torch
        >>> bias_update(torch.zeros(4), torch.tensor([2, 4, 1, 1]), 0.5)
        tensor([ 0.0000, -0.5000,  0.5000,  0.5000])

    References:
        Wang et al., Auxiliary-Loss-Free Load Balancing Strategy, 2024, https://arxiv.org/abs/2408.15664
    """
    # In whole numbers, so a count equal to the mean is found equal.
    move = (counts.sum(-1, keepdim=True) - counts.shape[-1] * counts).sign().to(bias.dtype)
    return bias + rate * (move - move.mean(-1, keepdim=True) if centred else move)
