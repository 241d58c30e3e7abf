"""Advantages: of answers among the answers to their prompt, and of tokens by the values of a critic.

B rows, T tokens of an answer.
"""

import functools
import math
import warnings
from collections.abc import Sequence
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from shardfn import collectives
from shardfn.core import Axes, explains_keywords
from shardfn.inference import widen_floats

from ._completions import completion_mask, masked
from ._shapes import ADVANTAGES, check_lengths, check_numbers, check_shapes, has_values


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
