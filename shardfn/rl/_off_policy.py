"""Answers of older weights (off-policy): the factors by which their tokens count.

B rows, T tokens of an answer.
"""

from jaxtyping import Float, Int
from torch import Tensor

from ._completions import answer_mask, masked

TRUNCATE = 2.0  # the default of the losses


def truncated_weights(
    who: str,
    old_BT: Float[Tensor, "b t"],
    behaviour_BT: Float[Tensor, "b t"] | None,
    lengths_B: Int[Tensor, " b"],
    truncate: float,
) -> Float[Tensor, "..."]:
    """Returns truncated importance sampling weights: min(pi_old / pi_behaviour, truncate), as constants.

    Answers of pi_behaviour are learnt from by a loss of pi / pi_old. The clip of the loss then bounds only the updates
    by these answers, and not the updates since the answers were drawn. Without the bound, the mean of a token's
    gradient, given the tokens before, equals the mean over draws of pi_old. Where both have the same bits the weight is
    exactly 1.

    Args:
        who: function, for the error.
        old_BT: log probabilities by the weights before the first update by these answers.
        behaviour_BT: log probabilities by the weights that drew the answers, or None if the weights are the same.
        lengths_B: tokens of each answer.
        truncate: largest weight.

    Returns:
        Weights [B, T], 0 from each answer's end on, or 1.

    Raises:
        ValueError: `truncate` is not positive, or without effect.
    """
    if not truncate > 0:
        raise ValueError(f"{who}: truncate is {truncate}. It must be positive, such as {TRUNCATE}.")
    if behaviour_BT is None:
        if truncate != TRUNCATE:
            raise ValueError(
                f"{who}: truncate is {truncate} without behaviour_BT, so it has no effect. Pass both, or leave it out."
            )
        return old_BT.new_ones(())
    mask_BT = answer_mask(lengths_B, old_BT.shape[1])
    # Padding is left out before exp, so that its numbers never overflow.
    return masked(masked((old_BT - behaviour_BT).detach(), mask_BT).exp().clamp(max=truncate), mask_BT)


def drawn_ratios(
    logprobs_BT: Float[Tensor, "b t"],
    old_BT: Float[Tensor, "b t"],
    behaviour_BT: Float[Tensor, "b t"] | None,
    lengths_B: Int[Tensor, " b"],
) -> Float[Tensor, "b t"]:
    """Returns the ratios pi / pi_behaviour, with a gradient and without a bound. 1 from each answer's end on."""
    drawn_BT = old_BT if behaviour_BT is None else behaviour_BT
    return masked(logprobs_BT - drawn_BT, answer_mask(lengths_B, old_BT.shape[1])).exp()
