"""Masks of tokens for `grpo(loss_mask_BT=)`, and the entropy's coefficient of the next iteration.

B rows, T tokens of an answer.
"""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from shardfn.collectives import all_gather
from shardfn.core import Axes

from ._completions import completion_mask, masked
from ._shapes import check_lengths, check_numbers, check_shapes


def high_entropy_mask(
    entropies_BT: Float[Tensor, "b t"], lengths_B: Int[Tensor, " b"], quantile: float, *, axis: Axes = None
) -> Bool[Tensor, "b t"]:
    """Returns the mask of the tokens with the highest entropies: TRL's `top_entropy_quantile`.

    Args:
        entropies_BT: entropies of the policy as from `completion_entropies`.
        lengths_B: tokens of each answer.
        quantile: part of the tokens of all rows that the mask has, for example 0.2. Tokens at the threshold count.
        axis: mesh axes that cut the rows. All ranks have equal numbers of rows and T.

    Raises:
        ValueError: shapes do not fit, a length is not from 0 to T, or the quantile not above 0 and at most 1.

    Example:
        >>> high_entropy_mask(torch.tensor([[0.1, 0.9, 0.5]]), torch.tensor([3]), 0.5).tolist()
        [[False, True, True]]

    References:
        Wang et al., Beyond the 80/20 Rule, 2025, https://arxiv.org/abs/2506.01939
    """
    check_shapes("high_entropy_mask", entropies_BT=entropies_BT, lengths_B=lengths_B)
    check_lengths("high_entropy_mask", entropies_BT.shape[1], lengths_B=lengths_B)
    check_numbers("high_entropy_mask", "from 0 to 1", quantile=quantile)
    check_numbers("high_entropy_mask", quantile=quantile)
    mask_BT = completion_mask(lengths_B, entropies_BT.shape[1])
    own = torch.where(mask_BT, entropies_BT.detach(), torch.inf)
    whole = (own if axis is None else all_gather(own, axis)).flatten().sort().values
    at = (1 - quantile) * (whole.isfinite().sum() - 1).clamp(min=0).double()
    low, high = whole[at.floor().long()], whole[at.ceil().long()]
    threshold = torch.where(high.isfinite(), torch.lerp(low, high, (at - at.floor()).to(low.dtype)), torch.inf)
    return mask_BT & (entropies_BT.detach() >= threshold)


def off_policy_mask(
    logprobs_BT: Float[Tensor, "b t"],
    sampling_logprobs_BT: Float[Tensor, "b t"],
    advantages_B: Float[Tensor, " b"],
    lengths_B: Int[Tensor, " b"],
    *,
    threshold: float,
) -> Bool[Tensor, "b t"]:
    """Returns the mask without the answers that are worse than the baseline and improbable by now.

    An answer of negative advantage is left out if the mean of log pi_sampling - log pi over its tokens is above the
    threshold: TRL's `off_policy_mask_threshold`.

    Args:
        logprobs_BT: log probabilities of the policy that learns.
        sampling_logprobs_BT: log probabilities of the policy that drew the answers. NaN counts 0.
        advantages_B: advantages as from `group_advantages`.
        lengths_B: tokens of each answer.
        threshold: largest mean, above 0, for example 0.5.

    Raises:
        ValueError: shapes do not fit, a length is not from 0 to T, or the threshold is not above 0.

    Example:
        >>> new, drawn = torch.full((2, 1), -3.0), torch.full((2, 1), -1.0)
        >>> off_policy_mask(new, drawn, torch.tensor([1.0, -1.0]), torch.tensor([1, 1]), threshold=0.5).tolist()
        [[True], [False]]

    References:
        DeepSeek-AI, DeepSeek-V3.2, 2025, section 3.1, https://arxiv.org/abs/2512.02556
    """
    given = {"sampling_logprobs_BT": sampling_logprobs_BT, "advantages_B": advantages_B, "lengths_B": lengths_B}
    check_shapes("off_policy_mask", logprobs_BT=logprobs_BT, **given)
    check_lengths("off_policy_mask", logprobs_BT.shape[1], lengths_B=lengths_B)
    check_numbers("off_policy_mask", threshold=threshold)
    mask_BT = completion_mask(lengths_B, logprobs_BT.shape[1])
    drift_BT = masked((sampling_logprobs_BT - logprobs_BT).detach(), mask_BT).nan_to_num(nan=0.0)
    near_B = drift_BT.sum(1) / lengths_B.clamp(min=1) <= threshold
    return mask_BT & ((advantages_B >= 0) | near_B)[:, None]


def adapt_entropy_coef(
    coef: float, entropy: float, target: float, *, delta: float = 0.005, least: float = 0.0, most: float = 1.0
) -> float:
    """Returns the weight of the entropies in the next iteration: more by `delta` if the entropy is low, else less.

    The weight is a part of the state of a run: save it with the checkpoint. TRL's `use_adaptive_entropy`.

    Args:
        coef: `entropy_coef` of this iteration.
        entropy: mean entropy of this iteration, the same on all ranks.
        target: entropy above which the weight decreases.
        delta: change of the weight.
        least: smallest weight.
        most: largest weight.

    Raises:
        ValueError: a number is out of range.

    Example:
        >>> adapt_entropy_coef(0.01, 0.2, 0.5), adapt_entropy_coef(0.01, 0.9, 0.5)
        (0.015, 0.005)

    References:
        He et al., Skywork Open Reasoner 1, 2025, https://arxiv.org/abs/2505.22312
    """
    check_numbers("adapt_entropy_coef", "0 or more", coef=coef, entropy=entropy, target=target, least=least)
    check_numbers("adapt_entropy_coef", delta=delta, most=most)
    if least > most:
        raise ValueError(f"adapt_entropy_coef: least must be at most {most}, the largest weight, got {least}.")
    return min(coef + delta, most) if entropy <= target else max(coef - delta, least)
