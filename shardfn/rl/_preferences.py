"""Losses of a policy by pairs of answers, or by answers that are wanted or not.

h = (log pi - log ref)(chosen) - (log pi - log ref)(rejected), of sums over an answer's tokens. B pairs.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from shardfn.core import explains_keywords
from shardfn.engine import WeightedMean

from ._completions import row_mean
from ._meant import PREFERENCES
from ._shapes import check_negative, check_numbers, check_shapes


@explains_keywords(**PREFERENCES)
def dpo(
    chosen_B: Float[Tensor, " b"],
    rejected_B: Float[Tensor, " b"],
    ref_chosen_B: Float[Tensor, " b"],
    ref_rejected_B: Float[Tensor, " b"],
    *,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
) -> WeightedMean:
    """Computes the loss of direct preference optimisation: -(1 - s) log sigmoid(beta h) - s log sigmoid(-beta h).

    With `label_smoothing` the loss is conservative DPO. TRL's `label_smoothing` belongs to another loss, `robust_dpo`.

    Args:
        chosen_B: log probabilities of the better answers: sums over their tokens.
        rejected_B: log probabilities of the rejected answers.
        ref_chosen_B: log probabilities of the better answers by the reference.
        ref_rejected_B: log probabilities of the rejected answers by the reference.
        beta: strength with which the policy is held to the reference.
        label_smoothing: s, the part of pairs that is expected to be the wrong way round.

    Raises:
        ValueError: a tensor has not one number for each answer (sum log probabilities of tokens first), or beta is not
            above 0, or the smoothing not from 0 to 1.

    Example:
        >>> x = torch.tensor
        >>> dpo(x([-5.0]), x([-7.0]), x([-5.5]), x([-6.8])).mean()
        tensor(0.6588)

    References:
        Rafailov et al., Direct Preference Optimization, 2023, https://arxiv.org/abs/2305.18290
        Mitchell, A note on DPO with noisy preferences, 2023 (`label_smoothing`), https://ericmitchell.ai/cdpo.pdf
    """
    check_numbers("dpo", "from 0 to 1", label_smoothing=label_smoothing)
    h_B = beta * _compute_margins("dpo", beta, chosen_B, rejected_B, ref_chosen_B, ref_rejected_B)
    return row_mean(-(1 - label_smoothing) * F.logsigmoid(h_B) - label_smoothing * F.logsigmoid(-h_B))


@explains_keywords(**PREFERENCES)
def robust_dpo(
    chosen_B: Float[Tensor, " b"],
    rejected_B: Float[Tensor, " b"],
    ref_chosen_B: Float[Tensor, " b"],
    ref_rejected_B: Float[Tensor, " b"],
    *,
    label_smoothing: float,
    beta: float = 0.1,
) -> WeightedMean:
    """Computes robust DPO: (-(1 - s) log sigmoid(beta h) + s log sigmoid(-beta h)) / (1 - 2 s).

    The mean over labels with a wrong part s is the mean of `dpo` over right labels. The loss equals TRL's
    `loss_type="robust"` with `label_smoothing=s`.

    Args:
        chosen_B: log probabilities as of `dpo`.
        rejected_B: log probabilities as of `dpo`.
        ref_chosen_B: log probabilities as of `dpo`.
        ref_rejected_B: log probabilities as of `dpo`.
        label_smoothing: s, the part of pairs that is the wrong way round.
        beta: strength with which the policy is held to the reference.

    Raises:
        ValueError: a tensor has not one number for each answer (sum log probabilities of tokens first), or beta is not
            above 0, or the smoothing is negative, or not below a half.

    Example:
        >>> x = torch.tensor
        >>> robust_dpo(x([-5.0]), x([-7.0]), x([-5.5]), x([-6.8]), smoothing=0.1).mean()
        tensor(0.6500)

    References:
        Chowdhury et al., Provably Robust DPO, 2024, https://arxiv.org/abs/2403.00409
    """
    if not 0 <= label_smoothing < 0.5:
        raise ValueError(f"robust_dpo: label_smoothing must be at least 0 and below 0.5, got {label_smoothing}.")
    h_B = beta * _compute_margins("robust_dpo", beta, chosen_B, rejected_B, ref_chosen_B, ref_rejected_B)
    return row_mean(
        (-(1 - label_smoothing) * F.logsigmoid(h_B) + label_smoothing * F.logsigmoid(-h_B)) / (1 - 2 * label_smoothing)
    )


@explains_keywords(**PREFERENCES)
def ipo(
    chosen_B: Float[Tensor, " b"],
    rejected_B: Float[Tensor, " b"],
    ref_chosen_B: Float[Tensor, " b"],
    ref_rejected_B: Float[Tensor, " b"],
    chosen_lengths_B: Int[Tensor, " b"],
    rejected_lengths_B: Int[Tensor, " b"],
    *,
    beta: float = 0.1,
) -> WeightedMean:
    """Computes identity preference optimisation: (h - 1 / (2 beta))^2, where h is of means over an answer's tokens.

    The optimum is finite for pairs without noise. Means over tokens are as in the paper's experiments and in TRL. For
    example, lengths of ones give the loss of sums.

    Args:
        chosen_B: log probabilities as of `dpo`: sums over an answer's tokens.
        rejected_B: log probabilities as of `dpo`.
        ref_chosen_B: log probabilities as of `dpo`.
        ref_rejected_B: log probabilities as of `dpo`.
        chosen_lengths_B: number of tokens of each better answer.
        rejected_lengths_B: number of tokens of each rejected answer.
        beta: strength with which the policy is held to the reference.

    Raises:
        ValueError: a tensor has not one number for each answer (sum log probabilities of tokens first), or beta is not
            above 0.

    Example:
        >>> x, n = torch.tensor, torch.tensor([2])
        >>> ipo(x([-5.0]), x([-7.0]), x([-5.5]), x([-6.8]), n, n).mean()
        tensor(21.6225)

    References:
        Azar et al., A General Theoretical Paradigm to Understand Learning from Human Preferences, 2023,
        https://arxiv.org/abs/2310.12036
    """
    check_numbers("ipo", beta=beta)
    references = {"ref_chosen_B": ref_chosen_B, "ref_rejected_B": ref_rejected_B}
    lengths = {"chosen_lengths_B": chosen_lengths_B, "rejected_lengths_B": rejected_lengths_B}
    check_shapes("ipo", chosen_B=chosen_B, rejected_B=rejected_B, **references, **lengths)
    chosen_B = (chosen_B - ref_chosen_B) / chosen_lengths_B.clamp(min=1)
    h_B = chosen_B - (rejected_B - ref_rejected_B) / rejected_lengths_B.clamp(min=1)
    return row_mean((h_B - 1 / (2 * beta)) ** 2)


@explains_keywords(**PREFERENCES)
def hinge(
    chosen_B: Float[Tensor, " b"],
    rejected_B: Float[Tensor, " b"],
    ref_chosen_B: Float[Tensor, " b"],
    ref_rejected_B: Float[Tensor, " b"],
    *,
    beta: float = 0.1,
) -> WeightedMean:
    """Computes the hinge loss of a pair: max(0, 1 - beta h).

    Args:
        chosen_B: log probabilities as of `dpo`.
        rejected_B: log probabilities as of `dpo`.
        ref_chosen_B: log probabilities as of `dpo`.
        ref_rejected_B: log probabilities as of `dpo`.
        beta: inverse of the margin, which is 1 / beta.

    Raises:
        ValueError: a tensor has not one number for each answer (sum log probabilities of tokens first), or beta is not
            above 0.

    Example:
        >>> x = torch.tensor
        >>> hinge(x([-5.0]), x([-7.0]), x([-5.5]), x([-6.8])).mean()
        tensor(0.9300)

    References:
        Zhao et al., SLiC-HF, 2023, https://arxiv.org/abs/2305.10425
    """
    h_B = _compute_margins("hinge", beta, chosen_B, rejected_B, ref_chosen_B, ref_rejected_B)
    return row_mean((1 - beta * h_B).relu())


@explains_keywords(**PREFERENCES)
def kto(
    logprobs_B: Float[Tensor, " b"],
    ref_logprobs_B: Float[Tensor, " b"],
    desirable_B: Bool[Tensor, " b"],
    kl: Float[Tensor, ""],
    *,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> WeightedMean:
    """Computes Kahneman-Tversky optimisation, of single answers: w sigmoid(s beta (log pi - log ref - z)).

    s is -1 for a desirable answer, and 1 for an undesirable answer.

    Args:
        logprobs_B: log probabilities of the answers: sums over their tokens.
        ref_logprobs_B: log probabilities of the answers by the reference.
        desirable_B: whether each answer is desirable.
        kl: mean of log pi - log ref over answers that belong to other prompts, of all ranks (`pmean`). z is
            this number, or 0 if it is negative, as a constant.
        beta: strength with which the policy is held to the reference.
        desirable_weight: w of desirable answers.
        undesirable_weight: w of undesirable answers.

    Raises:
        ValueError: a tensor has not one number for each answer (sum log probabilities of tokens first), or beta is not
            above 0, or a weight negative.

    Example:
        >>> x = torch.tensor
        >>> kto(x([-5.0]), x([-5.0]), x([True]), x(0.0)).mean()
        tensor(0.5000)

    References:
        Ethayarajh et al., KTO: Model Alignment as Prospect Theoretic Optimization, 2024,
            https://arxiv.org/abs/2402.01306
    """
    check_numbers("kto", beta=beta)
    check_numbers("kto", "0 or more", desirable_weight=desirable_weight, undesirable_weight=undesirable_weight)
    check_shapes("kto", logprobs_B=logprobs_B, ref_logprobs_B=ref_logprobs_B, desirable_B=desirable_B)
    ahead_B = beta * (logprobs_B - ref_logprobs_B - kl.detach().clamp(min=0))
    rows_B = torch.sigmoid(torch.where(desirable_B, -ahead_B, ahead_B))
    return row_mean(torch.where(desirable_B, desirable_weight * rows_B, undesirable_weight * rows_B))


@explains_keywords(**PREFERENCES)
def orpo(chosen_B: Float[Tensor, " b"], rejected_B: Float[Tensor, " b"], *, beta: float = 0.1) -> WeightedMean:
    """Returns the term of odds ratio preference optimisation: -beta log sigmoid(log odds(chosen) - log odds(rejected)).

    The whole loss is this term and the cross entropy of the chosen answers: two losses of a step, or a sum.

    Args:
        chosen_B: log probabilities of the better answers: means over their tokens, below 0.
        rejected_B: log probabilities of the rejected answers: means over their tokens, below 0.
        beta: weight of the term.

    Raises:
        ValueError: a tensor has not one number for each answer, or beta is not above 0, or a mean is not below 0, such
            as the mean of an empty answer.

    Example:
        >>> orpo(torch.tensor([-1.0]), torch.tensor([-1.0])).mean()
        tensor(0.0693)

    References:
        Hong et al., ORPO: Monolithic Preference Optimization without Reference Model, 2024,
            https://arxiv.org/abs/2403.07691
    """
    check_numbers("orpo", beta=beta)
    check_shapes("orpo", chosen_B=chosen_B, rejected_B=rejected_B)
    check_negative("orpo", chosen_B=chosen_B.detach(), rejected_B=rejected_B.detach())
    odds_B = [x_B - torch.log(-torch.expm1(x_B)) for x_B in (chosen_B, rejected_B)]
    return row_mean(-beta * F.logsigmoid(odds_B[0] - odds_B[1]))


def _compute_margins(
    who: str, beta: float, chosen: Tensor, rejected: Tensor, chosen_reference: Tensor, rejected_reference: Tensor
) -> Tensor:
    check_numbers(who, beta=beta)
    references = {"ref_chosen_B": chosen_reference, "ref_rejected_B": rejected_reference}
    check_shapes(who, chosen_B=chosen, rejected_B=rejected, **references)
    return (chosen - chosen_reference) - (rejected - rejected_reference)
