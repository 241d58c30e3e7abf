"""Rewards of tokens, the loss of a model of rewards, and advantages.

An answer has an advantage among the answers to its prompt, and a token by the values of a critic.

B rows, T tokens of an answer.
"""

import functools
import math
import warnings
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from shardfn import collectives
from shardfn.core import Axes, explains_keywords
from shardfn.engine import WeightedMean
from shardfn.inference import widen_floats

from ._completions import completion_mask, masked, row_mean
from ._shapes import ADVANTAGES, check_lengths, check_numbers, check_shapes, has_values


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


def process_reward(
    logits_BTC: Float[Tensor, "b t c"], labels_BT: Int[Tensor, "b t"], *, ignore_index: int = -100
) -> WeightedMean:
    """Returns the loss of a model of the steps of an answer (a process reward model): a mean over steps.

    The value of a step is read at the last token of the step, for example at a line's end. The loss is the cross
    entropy of the step's label. Equals the loss of TRL's `PRMTrainer`.

    Args:
        logits_BTC: logits of the labels at each token, for example 2 of a wrong and of a right step.
        labels_BT: label at the last token of each step, and `ignore_index` at all other tokens.
        ignore_index: label of tokens that do not count.

    Raises:
        ValueError: shapes do not fit, or a label is out of range.

    Example:
        >>> logits = torch.tensor([[[0.0, 2.0], [9.0, 0.0], [1.0, 1.0]]])
        >>> process_reward(logits, torch.tensor([[1, -100, 0]])).mean()
        tensor(0.4100)

    References:
        Uesato et al., Solving math word problems with process- and outcome-based feedback, 2022,
            https://arxiv.org/abs/2211.14275
        Lightman et al., Let's verify step by step, 2023, https://arxiv.org/abs/2305.20050
    """
    if logits_BTC.shape[:2] != labels_BT.shape:
        raise ValueError(
            "process_reward: logits_BTC must have a row for each of labels_BT, got shapes"
            f" {(*logits_BTC.shape,)} and {(*labels_BT.shape,)}."
        )
    counts_BT, num = labels_BT != ignore_index, logits_BTC.shape[2]
    wrong_BT = counts_BT & ((labels_BT < 0) | (labels_BT >= num))
    if has_values(labels_BT) and bool(wrong_BT.any()):
        text = f"process_reward: labels_BT must be from 0 to {num - 1}, or {ignore_index}, got"
        raise ValueError(f"{text} {int(labels_BT[wrong_BT][0])}.")
    logits_BTC = widen_floats(logits_BTC)
    found_BT = logits_BTC.log_softmax(-1).gather(-1, labels_BT.long().masked_fill(~counts_BT, 0)[..., None])[..., 0]
    return WeightedMean(-masked(found_BT, counts_BT).sum(), counts_BT.sum().to(logits_BTC.dtype))


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
        patience: number of rollouts in a row without a signal before a warning, and before each further warning.
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


@explains_keywords(**ADVANTAGES)
def group_advantages(
    rewards_B: Float[Tensor, " b"],
    num_generations: int,
    *,
    baseline: Literal["mean", "others"] = "mean",
    scale_rewards: Literal["group", "batch", "none"] = "group",
    eps: float = 1e-4,
    axis: Axes = None,
) -> Float[Tensor, " b"]:
    """Returns each reward less the rewards of the answers to the same prompt.

    | | baseline | scale_rewards |
    |---|---|---|
    | GRPO | "mean" of the group | "group": divides by the group's sample deviation + eps |
    | REINFORCE++ with a baseline | "mean" | "batch": divides by the sample deviation of all rewards + eps |
    | Dr. GRPO | "mean" | "none" |
    | RLOO | mean of the "others" | "none" |

    A group of equal rewards has advantages 0. A reward that is NaN or infinite is missing: its answer has advantage 0,
    and the remaining answers are a group. A group of a single answer has advantage 0. If all rewards are missing, for
    example where `score` was not called, there is a warning, except in a captured step.

    Args:
        rewards_B: rewards. Rows `num_generations * i` to `num_generations * (i + 1) - 1` are group i.
        num_generations: number of answers to a prompt.
        baseline: see above.
        scale_rewards: see above.
        eps: term added to the deviation. Above 0, as the deviation of equal rewards is 0.
        axis: mesh axes that cut the rows, also within groups. All ranks have equal numbers of rows. Only a loss, or
            another function that a mesh runs, knows its axes. Elsewhere the rows are only this rank's.

    Returns:
        The advantages of this rank's rows, as constants.

    Raises:
        ValueError: rewards are not one dim, `num_generations` does not divide the number of rows, or `eps` is not above
            0.

    Example:
        >>> group_advantages(torch.tensor([1.0, 0.0, 2.0, 2.0]), 2, scale_rewards="none").tolist()
        [0.5, -0.5, 0.0, 0.0]

    References:
        Shao et al., DeepSeekMath, 2024, https://arxiv.org/abs/2402.03300
        Liu et al., Understanding R1-Zero-Like Training, 2025, https://arxiv.org/abs/2503.20783
        Ahmadian et al., Back to Basics, 2024, https://arxiv.org/abs/2402.14740
    """
    check_shapes("group_advantages", rewards_B=rewards_B)
    check_numbers("group_advantages", eps=eps)
    whole = rewards_B.detach() if axis is None else collectives.all_gather(rewards_B.detach(), axis)
    if num_generations < 1 or len(whole) % num_generations:
        raise ValueError(f"group_advantages: {len(whole)} rewards and groups of {num_generations}. Pass whole groups.")
    if baseline not in ("mean", "others"):
        raise ValueError(f'baseline must be "mean" or "others", got {baseline!r}.')
    if scale_rewards not in ("group", "batch", "none"):
        raise ValueError(f'scale_rewards must be "group", "batch" or "none", got {scale_rewards!r}.')
    _warn_without_rewards(whole)
    # In float64 the square of no reward in float32 overflows.
    grouped = whole.double().view(-1, num_generations)
    of_all = _compare_groups(grouped, baseline == "others", eps if scale_rewards == "group" else None).flatten()
    if scale_rewards == "batch":
        of_all = of_all / (_deviate(whole.double()) + eps)
    start = 0 if axis is None else int(collectives.axis_index(axis)) * len(rewards_B)
    return of_all[start : start + len(rewards_B)].to(widen_floats(rewards_B).dtype)


@explains_keywords(**ADVANTAGES)
def decoupled_advantages(
    rewards_BR: Float[Tensor, "b r"],
    num_generations: int,
    *,
    reward_weights: Sequence[float] | None = None,
    eps: float = 1e-4,
    axis: Axes = None,
) -> Float[Tensor, " b"]:
    """Returns advantages of several rewards, each normalised among the answers to the same prompt, and then summed.

    A_r = (x_r - mean_group(x_r)) / (deviation_group(x_r) + eps),  S = sum_r w_r A_r,  A = (S - mean(S)) / (deviation(S)
    + eps). So a reward of small range is not lost beside a reward of large range. Equals TRL's
    `multi_objective_aggregation="normalize_then_sum"`.

    A reward that is NaN or infinite is missing, and counts 0 in the sum. An answer without any reward has advantage 0.

    Args:
        rewards_BR: rewards, a column for each reward function. Rows `num_generations * i` to
            `num_generations * (i + 1) - 1` are group i.
        num_generations: number of answers to a prompt.
        reward_weights: weight of each column. None is 1.
        eps: term added to the deviations, above 0.
        axis: mesh axes that cut the rows, as in `group_advantages`.

    Returns:
        The advantages of this rank's rows, as constants.

    Raises:
        ValueError: rewards are not two dims, `num_generations` does not divide the number of rows, `eps` is not above
            0, or there is not a finite weight for each column.

    Example:
        >>> rewards = torch.tensor([[1.0, 0.01], [0.0, 0.02], [0.0, 0.01], [0.0, 0.02]])
        >>> [round(x, 2) for x in decoupled_advantages(rewards, 4).tolist()]
        [0.71, 0.39, -1.48, 0.39]

    References:
        Liu et al., GDPO, 2026, https://arxiv.org/abs/2601.05242
    """
    check_shapes("decoupled_advantages", rewards_BR=rewards_BR)
    check_numbers("decoupled_advantages", eps=eps)
    weights = [1.0] * rewards_BR.shape[1] if reward_weights is None else list(reward_weights)
    if len(weights) != rewards_BR.shape[1] or not all(math.isfinite(w) for w in weights):
        raise ValueError(
            f"decoupled_advantages: reward_weights must have a finite number for each of {rewards_BR.shape[1]} columns,"
            f" got {weights}."
        )
    whole = rewards_BR.detach() if axis is None else collectives.all_gather(rewards_BR.detach(), axis)
    if num_generations < 1 or len(whole) % num_generations:
        raise ValueError(
            f"decoupled_advantages: {len(whole)} rewards and groups of {num_generations}. Pass whole groups."
        )
    _warn_without_rewards(whole)
    columns = [_compare_groups(x.view(-1, num_generations), False, eps).flatten() for x in whole.double().unbind(1)]
    known = whole.isfinite().any(1)
    sums = functools.reduce(torch.add, [w * x for w, x in zip(weights, columns, strict=True)])
    sums = torch.where(known, sums, torch.nan)
    of_all = _compare_groups(sums[None], False, eps).flatten()
    start = 0 if axis is None else int(collectives.axis_index(axis)) * len(rewards_BR)
    return of_all[start : start + len(rewards_BR)].to(widen_floats(rewards_BR).dtype)


@explains_keywords(**ADVANTAGES)
def whiten(
    x_BT: Float[Tensor, "b t"],
    lengths_B: Int[Tensor, " b"],
    *,
    shift_mean: bool = True,
    eps: float = 1e-8,
    axis: Axes = None,
) -> Float[Tensor, "b t"]:
    """Returns advantages or rewards of mean 0 and variance 1 over the tokens of all ranks.

    (x - mean) / sqrt(var + eps).

    The variance is the sample variance, with n - 1. A single token has variance 0.

    Args:
        x_BT: advantages as from `gae`, or rewards.
        lengths_B: tokens of each answer. Ranks may have different numbers of tokens.
        shift_mean: whether the mean becomes 0. Otherwise it stays.
        eps: term added to the variance, above 0.
        axis: mesh axes that cut the rows. Only a loss, or another function that a mesh runs, knows its axes.

    Returns:
        The values of this rank's rows, as constants. 0 from each answer's end on.

    Raises:
        ValueError: shapes do not fit, a length is not from 0 to T, or `eps` is not above 0.

    Example:
        >>> whiten(torch.tensor([[1.0, 3.0, 9.0]]), torch.tensor([2]))
        tensor([[-0.7071,  0.7071,  0.0000]])
    """
    check_shapes("whiten", x_BT=x_BT, lengths_B=lengths_B)
    check_lengths("whiten", x_BT.shape[1], lengths_B=lengths_B)
    check_numbers("whiten", eps=eps)
    mask_BT = completion_mask(lengths_B, x_BT.shape[1])
    x = masked(widen_floats(x_BT).detach(), mask_BT).double()

    def sum_all(value: Tensor) -> Tensor:
        return value if axis is None else collectives.psum(value, axis)

    num = sum_all(mask_BT.sum().double())
    mean = sum_all(x.sum()) / num.clamp(min=1)
    centred = masked(x - mean, mask_BT)
    variance = sum_all(centred.square().sum()) / (num - 1).clamp(min=1)
    out = centred * (variance + eps).rsqrt()
    return masked(out if shift_mean else out + mean, mask_BT).to(widen_floats(x_BT).dtype)


def _warn_without_rewards(rewards: Tensor) -> None:
    if has_values(rewards) and len(rewards) and not rewards.isfinite().any():
        warnings.warn(
            f"group_advantages: all {len(rewards)} rewards are missing (NaN or infinite), so all advantages are 0 and"
            " nothing is learnt. Fill in rewards by rollout = rl.score(reward, rollout).rollout, or by"
            " rollout._replace(rewards=...); rl.score counts the failures of a reward function.",
            stacklevel=3,
        )


def _deviate(rewards: Tensor) -> Tensor:
    """Returns the sample deviation of the rewards that are finite."""
    known = rewards.isfinite()
    num = known.sum().to(rewards.dtype)
    centred = masked(rewards - masked(rewards, known).sum() / num.clamp(min=1), known)
    return (centred.square().sum() / (num - 1).clamp(min=1)).sqrt()


def _compare_groups(rewards: Tensor, others: bool, eps: float | None) -> Tensor:
    known = rewards.isfinite()
    num = known.sum(1, keepdim=True).to(rewards.dtype)
    # Less the largest of the group first: the mean of equal rewards is then exactly theirs.
    shifted = masked(rewards - torch.where(known, rewards, -torch.inf).amax(1, keepdim=True), known)
    centred = masked(shifted - shifted.sum(1, keepdim=True) / num.clamp(min=1), known)
    fewer = (num - 1).clamp(min=1)
    if others:
        centred = centred * (num / fewer)
    if eps is not None:
        centred = centred / ((centred.square().sum(1, keepdim=True) / fewer).sqrt() + eps)
    return torch.where(num > 1, centred, 0.0)


@explains_keywords(**ADVANTAGES)
def gae(
    rewards_BT: Float[Tensor, "b t"],
    values_BT: Float[Tensor, "b t"],
    lengths_B: Int[Tensor, " b"],
    *,
    gamma: float = 1.0,
    lam: float = 0.95,
) -> tuple[Float[Tensor, "b t"], Float[Tensor, "b t"]]:
    """Returns generalised advantages, and the returns that a critic learns.

    delta_t = r_t + gamma V_{t+1} - V_t,  A_t = delta_t + gamma lam A_{t+1},  R_t = A_t + V_t. V is 0 from the
    answer's end on.

    Args:
        rewards_BT: rewards of each token.
        values_BT: values of the critic, before each token.
        lengths_B: tokens of each answer.
        gamma: factor of the next value.
        lam: lambda, the factor of the next advantage.

    Returns:
        (advantages, returns), as constants. 0 from each answer's end on.

    Raises:
        ValueError: shapes do not fit, a length is not from 0 to T, or a factor not from 0 to 1.

    Example:
        >>> advantages, returns = gae(torch.tensor([[0.0, 1.0]]), torch.tensor([[0.5, 0.5]]), torch.tensor([2]))
        >>> advantages, returns
        (tensor([[0.4750, 0.5000]]), tensor([[0.9750, 1.0000]]))

    References:
        Schulman et al., High-Dimensional Continuous Control Using Generalized Advantage Estimation, 2015,
        https://arxiv.org/abs/1506.02438
    """
    check_shapes("gae", rewards_BT=rewards_BT, values_BT=values_BT, lengths_B=lengths_B)
    check_numbers("gae", "from 0 to 1", gamma=gamma, lam=lam)
    check_lengths("gae", rewards_BT.shape[1], lengths_B=lengths_B)
    mask_BT = completion_mask(lengths_B, rewards_BT.shape[1])
    r_BT, v_BT = (masked(x.detach(), mask_BT) for x in (rewards_BT, values_BT))
    after_BT = torch.cat((v_BT[:, 1:], torch.zeros_like(v_BT[:, :1])), 1)
    delta_BT = r_BT + gamma * after_BT - v_BT
    columns, last_B = [], v_BT.new_zeros(len(v_BT))
    for delta_B in reversed(delta_BT.unbind(1)):
        last_B = delta_B + gamma * lam * last_B
        columns.append(last_B)
    a_BT = torch.stack(columns[::-1], 1) if columns else delta_BT
    return masked(a_BT, mask_BT), masked(a_BT + v_BT, mask_BT)
