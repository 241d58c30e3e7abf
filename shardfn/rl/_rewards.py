"""Rewards of tokens, and the loss of a model of rewards.

B rows, T tokens.
"""

import warnings
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from shardfn.core import explains_keywords
from shardfn.engine import WeightedMean

from ._completions import completion_mask, masked, row_mean
from ._shapes import ADVANTAGES, check_lengths, check_numbers, check_shapes


@explains_keywords(**ADVANTAGES)
def kl_rewards(
    logprobs_BT: Float[Tensor, "b t"],
    ref_logprobs_BT: Float[Tensor, "b t"],
    scores_B: Float[Tensor, " b"],
    lengths_B: Int[Tensor, " b"],
    *,
    kl_coef: float = 0.1,
    clip_reward_value: float | None = 5.0,
    after_end: bool = False,
) -> Float[Tensor, "b t"]:
    """Returns the reward of each token: -beta times k1, and at the last token the answer's clipped score.

    A score that is NaN, of a reward function that failed, or infinite counts as 0. An empty answer has no token for its
    score.

    Args:
        logprobs_BT: log probabilities of the policy that drew the answers.
        ref_logprobs_BT: log probabilities of the reference.
        scores_B: scores of the answers.
        lengths_B: tokens of each answer.
        kl_coef: weight of the divergence.
        clip_reward_value: bound of scores, which are clipped to [-clip, clip]. None leaves scores unchanged.
        after_end: whether the score goes to the place after the last token where the row has such a place, as in
            DeepSpeed-Chat. Then pass `(lengths + 1).clamp(max=T)` to `gae` as lengths, and the lengths themselves to
            the losses.

    Raises:
        ValueError: shapes do not fit. A length is not from 0 to T. `kl_coef` is negative, or `clip_reward_value` not
            above 0.

    Example:
        >>> policy, reference = torch.tensor([[-1.0, -2.0]]), torch.tensor([[-1.0, -1.0]])
        >>> kl_rewards(policy, reference, torch.tensor([7.0]), torch.tensor([2]))
        tensor([[0.0000, 5.1000]])

    References:
        Yao et al., DeepSpeed-Chat, 2023, https://arxiv.org/abs/2308.01320
    """
    check_shapes(
        "kl_rewards", logprobs_BT=logprobs_BT, ref_logprobs_BT=ref_logprobs_BT, scores_B=scores_B, lengths_B=lengths_B
    )
    check_numbers("kl_rewards", "0 or more", kl_coef=kl_coef)
    if clip_reward_value is not None:
        check_numbers("kl_rewards", clip_reward_value=clip_reward_value)
    width = logprobs_BT.shape[1]
    check_lengths("kl_rewards", width, lengths_B=lengths_B)
    drift_BT = masked((logprobs_BT - ref_logprobs_BT).detach(), completion_mask(lengths_B, width))
    scores_B = scores_B.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
    scores_B = scores_B if clip_reward_value is None else scores_B.clamp(-clip_reward_value, clip_reward_value)
    at_B = lengths_B.clamp(max=width - 1) if after_end else lengths_B - 1
    last_BT = torch.arange(width, device=lengths_B.device) == at_B[:, None]
    return -kl_coef * drift_BT + torch.where(last_BT, scores_B[:, None].to(drift_BT.dtype), 0.0)


def last_values(values_BT: Float[Tensor, "b t"], lengths_B: Int[Tensor, " b"]) -> Float[Tensor, " b"]:
    """Returns a reward model's score of each row: its value at the last token, or 0 for an empty row.

    Args:
        values_BT: values of each token.
        lengths_B: tokens of each row.

    Raises:
        ValueError: shapes do not fit, or a length is not from 0 to T.

    Example:
        >>> last_values(torch.tensor([[1.0, 2.0, 3.0]]), torch.tensor([2]))
        tensor([2.])
    """
    check_shapes("last_values", values_BT=values_BT, lengths_B=lengths_B)
    check_lengths("last_values", values_BT.shape[1], lengths_B=lengths_B)
    return torch.where(lengths_B > 0, values_BT.gather(1, (lengths_B - 1).clamp(min=0)[:, None])[:, 0], 0.0)


def bradley_terry(
    chosen_B: Float[Tensor, " b"],
    rejected_B: Float[Tensor, " b"],
    *,
    margin_B: Float[Tensor, " b"] | None = None,
    center_rewards_coefficient: float = 0.0,
) -> WeightedMean:
    """Returns the loss of a reward model: -log sigmoid(chosen - rejected - margin), a mean over pairs.

    With `center_rewards_coefficient` the loss has coefficient * (chosen + rejected)^2 in addition, which holds the mean
    of rewards near 0. Equals the loss of TRL's `RewardTrainer`.

    Args:
        chosen_B: rewards of the better answers, for example `last_values(values, lengths)`.
        rejected_B: rewards of the rejected answers.
        margin_B: difference that each pair of rewards has to have at least, for example by degrees of preference. None
            is 0.
        center_rewards_coefficient: weight of the square, 0 or more.

    Raises:
        ValueError: shapes do not fit, or the coefficient is negative.

    Example:
        >>> chosen, rejected = torch.tensor([2.0]), torch.tensor([1.0])
        >>> bradley_terry(chosen, rejected).mean()
        tensor(0.3133)
        >>> bradley_terry(chosen, rejected, margin_B=torch.tensor([1.0]), center_rewards_coefficient=0.01).mean()
        tensor(0.7831)

    References:
        Ouyang et al., InstructGPT, 2022, https://arxiv.org/abs/2203.02155
        Touvron et al., Llama 2, 2023 (`margin_B`), https://arxiv.org/abs/2307.09288
        Eisenstein et al., Helping or Herding?, 2023 (`center_rewards_coefficient`), https://arxiv.org/abs/2312.09244
    """
    check_shapes("bradley_terry", chosen_B=chosen_B, rejected_B=rejected_B, margin_B=margin_B)
    check_numbers("bradley_terry", "0 or more", center_rewards_coefficient=center_rewards_coefficient)
    h_B = chosen_B - rejected_B if margin_B is None else chosen_B - rejected_B - margin_B
    return row_mean(-F.logsigmoid(h_B) + center_rewards_coefficient * (chosen_B + rejected_B) ** 2)


def pairwise(
    chosen_BT: Float[Tensor, "b t"],
    rejected_BT: Float[Tensor, "b t"],
    chosen_ids_BT: Int[Tensor, "b t"],
    rejected_ids_BT: Int[Tensor, "b t"],
    chosen_lengths_B: Int[Tensor, " b"],
    rejected_lengths_B: Int[Tensor, " b"],
) -> WeightedMean:
    """Returns the loss of a reward model: -log sigmoid(chosen - rejected), a mean over tokens, and over pairs.

    The tokens go from the first difference of a pair to the longer row's end. Beyond the shorter row's end its values
    are the values of its padding, so pad with one id. A pair without a difference counts its last token.

    Args:
        chosen_BT: values of the better rows, prompt and answer.
        rejected_BT: values of the rejected rows.
        chosen_ids_BT: tokens.
        rejected_ids_BT: tokens.
        chosen_lengths_B: tokens of each row.
        rejected_lengths_B: tokens of each row.

    Raises:
        ValueError: shapes do not fit, or a length is not from 0 to T.

    Example:
        >>> c, r = torch.tensor([[0.2, 0.5, 1.0]]), torch.tensor([[0.1, 0.7, -0.2]])
        >>> ids, others, three = torch.tensor([[1, 2, 3]]), torch.tensor([[4, 5, 6]]), torch.tensor([3])
        >>> pairwise(c, r, ids, others, three, three).mean()
        tensor(0.5686)

    References:
        Yao et al., DeepSpeed-Chat, 2023, https://arxiv.org/abs/2308.01320
    """
    tensors = {"chosen_BT": chosen_BT, "rejected_BT": rejected_BT}
    tensors |= {"chosen_ids_BT": chosen_ids_BT, "rejected_ids_BT": rejected_ids_BT}
    lengths = {"chosen_lengths_B": chosen_lengths_B, "rejected_lengths_B": rejected_lengths_B}
    check_shapes("pairwise", **tensors, **lengths)
    check_lengths("pairwise", chosen_BT.shape[1], **lengths)
    place_T = torch.arange(chosen_BT.shape[1], device=chosen_BT.device)
    ends_B = torch.maximum(chosen_lengths_B, rejected_lengths_B)
    shorter_B = torch.minimum(chosen_lengths_B, rejected_lengths_B)
    differ_BT = (chosen_ids_BT != rejected_ids_BT) | (place_T >= shorter_B[:, None])
    first_B = torch.where(differ_BT, place_T, len(place_T)).amin(1)
    first_B = torch.minimum(first_B, ends_B - 1)
    mask_BT = (place_T >= first_B[:, None]) & (place_T < ends_B[:, None])
    loss_BT = masked(-F.logsigmoid(masked(chosen_BT - rejected_BT, mask_BT)), mask_BT)
    return row_mean(loss_BT.sum(1) / mask_BT.sum(1).clamp(min=1))


class RewardSignal(NamedTuple):
    """Announcer of rollouts that teach nothing: a pure value that each rollout turns into the next value.

    If all advantages of all ranks are 0, for example where the answers to each prompt have equal rewards, the loss of a
    policy has no gradient. A single rollout of this kind is common. `patience` of them in a row are announced by a
    warning.

    Attributes:
        patience: number of rollouts in a row without a signal after which there is a warning, and again after as many.
        waited: number of rollouts since the last signal.

    Example:
        >>> signal = RewardSignal(patience=3)
        >>> for flat in (1.0, 1.0, 0.75, 1.0):  # "flat" of `rollout_metrics`
        ...     signal = signal.update(flat)
        >>> signal.waited
        1
    """

    patience: int = 5
    waited: int = 0

    def update(self, flat: Any) -> "RewardSignal":
        """Returns the value after a further rollout.

        Args:
            flat: part of answers whose advantage is 0, a number or a 0-d tensor that all ranks have.

        Raises:
            ValueError: patience is not 1 or more.
        """
        if self.patience < 1:
            raise ValueError(f"RewardSignal: patience must be 1 or more, got {self.patience}.")
        waited = self.waited + 1 if float(flat) >= 1 else 0
        if waited and waited % self.patience == 0:
            warnings.warn(
                f"{waited} rollouts in a row had only advantages of 0, so nothing was learnt from them: the answers to"
                " each prompt had equal rewards, or none. Look at the rewards (rl.score counts failures); take prompts"
                " that are sometimes answered well, more answers to each, or a reward with more than two values.",
                stacklevel=2,
            )
        return self._replace(waited=waited)
