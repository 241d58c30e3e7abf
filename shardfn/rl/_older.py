"""Answers of older weights: the factors by which their tokens count.

B rows, T tokens of an answer.
"""

from jaxtyping import Float, Int
from torch import Tensor

from ._answers import answer_mask, masked
from ._shapes import check_lengths, check_shapes


def truncated_weights(
    old_BT: Float[Tensor, "b t"],
    behaviour_BT: Float[Tensor, "b t"],
    lengths_B: Int[Tensor, " b"],
    *,
    most: float = 2.0,
) -> Float[Tensor, "b t"]:
    """Truncated importance sampling: min(pi_old / pi_behaviour, most), constants.

    Answers of pi_behaviour are learnt from by a loss of pi / pi_old, whose clip then bounds the updates by these
    answers alone, and not the updates since they were drawn. Without the bound, the mean of a token's gradient, given
    the tokens before it, is that over draws of pi_old. Where both have the same bits the weight is exactly 1.

    Args:
        old_BT: log probabilities by the weights before the first update by these answers, as by `step.apply`.
        behaviour_BT: by the weights that drew them: `Rollout.logprobs`.
        lengths_B: tokens of each answer.
        most: the largest weight.

    Returns:
        [B, T]; 0 from each answer's end on.

    Raises:
        ValueError: shapes do not fit, a length is not from 0 to T, or `most` is not positive.

    Example:
        >>> import torch
        >>> behaviour = torch.tensor([[-1.0, -1.0, -3.0]])
        >>> truncated_weights(torch.tensor([[-1.0, -2.0, -1.0]]), behaviour, torch.tensor([3]))
        tensor([[1.0000, 0.3679, 2.0000]])

    References:
        Espeholt et al., IMPALA, 2018, https://arxiv.org/abs/1802.01561
        Hilton et al., Batch size-invariance for policy optimization, 2021, https://arxiv.org/abs/2110.00641
        Fu et al., AReaL, 2025, https://arxiv.org/abs/2505.24298
    """
    check_shapes("truncated_weights", old_BT=old_BT, behaviour_BT=behaviour_BT, lengths_B=lengths_B)
    check_lengths("truncated_weights", old_BT.shape[1], lengths_B=lengths_B)
    if not most > 0:
        raise ValueError(f"truncated_weights: most is {most}; it must be positive, such as 2.0.")
    mask_BT = answer_mask(lengths_B, old_BT.shape[1])
    # Padding is left out before exp, so that its numbers never overflow.
    return masked(masked((old_BT - behaviour_BT).detach(), mask_BT).exp().clamp(max=most), mask_BT)
