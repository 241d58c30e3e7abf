"""Answers of older weights (off-policy): the factors by which their tokens count.

B rows, T tokens of an answer.
"""

from jaxtyping import Float, Int
from torch import Tensor

from ._completions import completion_mask, masked

CLIP_MAX = 2.0  # the default of the losses


def truncated_weights(
    who: str,
    old_logprobs_BT: Float[Tensor, "b t"],
    sampling_logprobs_BT: Float[Tensor, "b t"] | None,
    lengths_B: Int[Tensor, " b"],
    importance_sampling_clip_max: float,
) -> Float[Tensor, "..."]:
    """Returns truncated importance sampling weights: min(pi_old / pi_behaviour, importance_sampling_clip_max).

    Answers of pi_behaviour are learnt from by a loss of pi / pi_old. The clip of the loss then bounds only the updates
    by these answers, and not the updates since the answers were drawn. Without the bound, the mean of a token's
    gradient, given the tokens before, equals the mean over draws of pi_old. Where both have the same bits the weight is
    exactly 1.

    Args:
        who: function, for the error.
        old_logprobs_BT: log probabilities by the weights before the first update by these answers.
        sampling_logprobs_BT: log probabilities by the weights that drew the answers, or None if the weights are the
            same.
        lengths_B: tokens of each answer.
        importance_sampling_clip_max: largest weight.

    Returns:
        Weights [B, T], 0 from each answer's end on, or 1.

    Raises:
        ValueError: `importance_sampling_clip_max` is not positive, or without effect.
    """
    if not importance_sampling_clip_max > 0:
        raise ValueError(
            f"{who}: importance_sampling_clip_max must be positive, for example {CLIP_MAX}, got"
            f" {importance_sampling_clip_max}."
        )
    if sampling_logprobs_BT is None:
        if importance_sampling_clip_max != CLIP_MAX:
            raise ValueError(
                f"{who}: importance_sampling_clip_max={importance_sampling_clip_max} has no effect without"
                " sampling_logprobs_BT. Pass both, or remove it."
            )
        return old_logprobs_BT.new_ones(())
    mask_BT = completion_mask(lengths_B, old_logprobs_BT.shape[1])
    # Padding is left out before exp, so that its numbers never overflow.
    return masked(
        masked((old_logprobs_BT - sampling_logprobs_BT).detach(), mask_BT)
        .exp()
        .clamp(max=importance_sampling_clip_max),
        mask_BT,
    )


def drawn_ratios(
    logprobs_BT: Float[Tensor, "b t"],
    old_logprobs_BT: Float[Tensor, "b t"],
    sampling_logprobs_BT: Float[Tensor, "b t"] | None,
    lengths_B: Int[Tensor, " b"],
) -> Float[Tensor, "b t"]:
    """Returns the ratios pi / pi_behaviour, with a gradient and without a bound. 1 from each answer's end on."""
    drawn_BT = old_logprobs_BT if sampling_logprobs_BT is None else sampling_logprobs_BT
    return masked(logprobs_BT - drawn_BT, completion_mask(lengths_B, old_logprobs_BT.shape[1])).exp()
