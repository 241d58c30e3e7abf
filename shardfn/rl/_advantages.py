"""Advantages: of answers among the answers to their prompt, and of tokens by the values of a critic.

B rows, T tokens of an answer.
"""

import warnings
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from shardfn.collectives import all_gather, axis_index
from shardfn.core import Axes, explains_keywords
from shardfn.inference import widen_floats

from ._answers import answer_mask, masked
from ._meant import ADVANTAGES
from ._shapes import check_lengths, check_numbers, check_shapes, has_values


@explains_keywords(**ADVANTAGES)
def group_advantages(
    rewards_B: Float[Tensor, " b"],
    size: int,
    *,
    baseline: Literal["mean", "others"] = "mean",
    deviation: bool = True,
    eps: float = 1e-4,
    axis: Axes = None,
) -> Float[Tensor, " b"]:
    """Returns each reward less the rewards of the answers to the same prompt.

    | | baseline | deviation |
    |---|---|---|
    | GRPO | "mean" of the group | divides by the group's sample deviation + eps |
    | Dr. GRPO | "mean" | False |
    | RLOO | mean of the "others" | False |

    A group of equal rewards has advantages 0. A reward that is NaN or infinite is missing: its answer has advantage 0,
    and the remaining answers are a group. A group of a single answer has advantage 0. If all rewards are missing, for
    example where `score` was not called, there is a warning, except in a captured step.

    Args:
        rewards_B: rewards. Rows `size * i` to `size * (i + 1) - 1` are group i.
        size: number of answers to a prompt.
        baseline: see above.
        deviation: see above.
        eps: term added to the deviation. Above 0, as the deviation of equal rewards is 0.
        axis: mesh axes that cut the rows, also within groups. All ranks have equal numbers of rows. Only a loss, or
            another function that a mesh runs, knows its axes. Elsewhere the rows are only this rank's.

    Returns:
        The advantages of this rank's rows, as constants.

    Raises:
        ValueError: rewards are not one dim, `size` does not divide the number of rows, or `eps` is not above 0.

    Example:
        >>> group_advantages(torch.tensor([1.0, 0.0, 2.0, 2.0]), 2, deviation=False).tolist()
        [0.5, -0.5, 0.0, 0.0]

    References:
        Shao et al., DeepSeekMath, 2024, https://arxiv.org/abs/2402.03300
        Liu et al., Understanding R1-Zero-Like Training, 2025, https://arxiv.org/abs/2503.20783
        Ahmadian et al., Back to Basics, 2024, https://arxiv.org/abs/2402.14740
    """
    check_shapes("group_advantages", rewards_B=rewards_B)
    check_numbers("group_advantages", eps=eps)
    whole = rewards_B.detach() if axis is None else all_gather(rewards_B.detach(), axis)
    if size < 1 or len(whole) % size:
        raise ValueError(f"group_advantages: {len(whole)} rewards and groups of {size}. Pass whole groups.")
    if baseline not in ("mean", "others"):
        raise ValueError(f'baseline must be "mean" or "others", got {baseline!r}.')
    _warn_without_rewards(whole)
    # In float64 the square of no reward in float32 overflows.
    of_all = _compare_groups(whole.double().view(-1, size), baseline == "others", eps if deviation else None).flatten()
    start = 0 if axis is None else int(axis_index(axis)) * len(rewards_B)
    return of_all[start : start + len(rewards_B)].to(widen_floats(rewards_B).dtype)


def _warn_without_rewards(rewards: Tensor) -> None:
    if has_values(rewards) and len(rewards) and not rewards.isfinite().any():
        warnings.warn(
            f"group_advantages: all {len(rewards)} rewards are missing (NaN or infinite), so all advantages are 0 and"
            " nothing is learnt. Fill in rewards by rollout = rl.score(reward, rollout).rollout, or by"
            " rollout._replace(rewards=...); rl.score counts the failures of a reward function.",
            stacklevel=3,
        )


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
    discount: float = 1.0,
    decay: float = 0.95,
) -> tuple[Float[Tensor, "b t"], Float[Tensor, "b t"]]:
    """Returns generalised advantages, and the returns that a critic learns.

    delta_t = r_t + discount V_{t+1} - V_t,  A_t = delta_t + discount decay A_{t+1},  R_t = A_t + V_t. V is 0 from the
    answer's end on.

    Args:
        rewards_BT: rewards of each token.
        values_BT: values of the critic, before each token.
        lengths_B: tokens of each answer.
        discount: gamma.
        decay: lambda.

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
    check_numbers("gae", "from 0 to 1", discount=discount, decay=decay)
    check_lengths("gae", rewards_BT.shape[1], lengths_B=lengths_B)
    mask_BT = answer_mask(lengths_B, rewards_BT.shape[1])
    r_BT, v_BT = (masked(x.detach(), mask_BT) for x in (rewards_BT, values_BT))
    after_BT = torch.cat((v_BT[:, 1:], torch.zeros_like(v_BT[:, :1])), 1)
    delta_BT = r_BT + discount * after_BT - v_BT
    columns, last_B = [], v_BT.new_zeros(len(v_BT))
    for delta_B in reversed(delta_BT.unbind(1)):
        last_B = delta_B + discount * decay * last_B
        columns.append(last_B)
    a_BT = torch.stack(columns[::-1], 1) if columns else delta_BT
    return masked(a_BT, mask_BT), masked(a_BT + v_BT, mask_BT)
