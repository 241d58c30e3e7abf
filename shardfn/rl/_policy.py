"""Losses of a policy by the ratio to the policy that drew the answers, and of its critic.

Estimators of the divergence between the policy and a reference, token by token.

x = log ref - log pi, of tokens that pi has drawn.

Schulman, Approximating KL Divergence, 2020, http://joschu.net/blog/kl-approx.html

Answers of older weights (off-policy): the factors by which their tokens count.

rho = exp(log pi - log pi_old). B rows, T tokens of an answer.
"""

import math
from typing import Literal, NamedTuple, get_args

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from shardfn.core import explains_keywords
from shardfn.engine import WeightedMean

from ._completions import completion_mask, masked, mean_of_tokens, row_mean
from ._shapes import MEANT, check_lengths, check_numbers, check_shapes

Estimator = Literal["k1", "k2", "k3"]


def kl(
    logprobs: Float[Tensor, "*b"], reference: Float[Tensor, "*b"], *, estimator: Estimator = "k3"
) -> Float[Tensor, "*b"]:
    """Returns an estimate of KL(pi, ref) for each token.

    | | value | mean of the value | mean of the gradient |
    |---|---|---|---|
    | k1 | -x | KL(pi, ref) | 0 |
    | k2 | x^2 / 2 | neither divergence | gradient of KL(pi, ref) |
    | k3 | e^x - 1 - x | KL(pi, ref) | gradient of KL(ref, pi) |

    The means are over tokens that pi draws. Tokens of an older policy need the ratio to the older policy as a weight:
    with the ratio's gradient, too, k1 and k3 have the mean gradient of KL(pi, ref) (`grpo` does so by default). In a
    reward, where only the value counts, take k1 or k3. In a loss without ratios take k2 or k3.

    Args:
        logprobs: log probabilities of the policy.
        reference: log probabilities of the reference, for the same tokens, as a constant.
        estimator: see above.

    Raises:
        ValueError: an unknown estimator.

    Example:
        >>> import torch
        >>> kl(torch.tensor([-1.0]), torch.tensor([-1.5]), estimator="k1")
        tensor([0.5000])
    """
    x = reference - logprobs
    match estimator:
        case "k1":
            return -x
        case "k2":
            return x * x / 2
        case "k3":
            return x.expm1() - x
    raise ValueError(f'estimator must be "k1", "k2" or "k3", got {estimator!r}.')


def follow_divergence(beta: float, divergence: float, target: float, *, rate: float = 0.1, most: float = 0.2) -> float:
    """Returns the weight of the divergence in the next iteration.

    Beta (1 + rate clip(divergence / target - 1, -most, most)).

    A fixed beta bounds no divergence: it is too weak for one seed and too strong for the next. With this rule beta
    grows while the divergence is above its target, by up to `rate * most` an iteration, and shrinks below its target.
    Beta is a part of the state of a run: save it with the checkpoint.

    Args:
        beta: beta of this iteration, above 0.
        divergence: divergence of this iteration, the same on all ranks, such as the mean of `completion_divergences`.
        target: target of the divergence, above 0.
        rate: rate of change. The paper's rate suits thousands of iterations. Runs of a hundred take more.
        most: bound of the relative error.

    Raises:
        ValueError: a number is not above 0 and finite, or `rate * most` is not below 1, so that beta would not stay
            above 0.

    Example:
        >>> follow_divergence(0.5, 0.3, 0.1), follow_divergence(0.5, 0.1, 0.1), follow_divergence(0.5, 0.0, 0.1)
        (0.51, 0.5, 0.49)

    References: Ziegler et al., Fine-Tuning Language Models from Human Preferences, 2019,
        https://arxiv.org/abs/1909.08593
    """
    check_numbers("follow_divergence", beta=beta, target=target, rate=rate, most=most)
    if rate * most >= 1:
        raise ValueError(
            f"follow_divergence: rate times most must be below 1, so that beta stays above 0, got {rate} and {most}."
        )
    if not math.isfinite(divergence):
        raise ValueError(
            f"follow_divergence: divergence must be finite, got {divergence} for a target of {target}. Look at the"
            " parameters of the iteration before."
        )
    return beta * (1 + rate * min(max(divergence / target - 1, -most), most))


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

    Returns: Weights [B, T], 0 from each answer's end on, or 1.

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


def behavior_ratios(
    logprobs_BT: Float[Tensor, "b t"],
    old_logprobs_BT: Float[Tensor, "b t"],
    sampling_logprobs_BT: Float[Tensor, "b t"] | None,
    lengths_B: Int[Tensor, " b"],
) -> Float[Tensor, "b t"]:
    """Returns the ratios pi / pi_behaviour, with a gradient and without a bound. 1 from each answer's end on."""
    drawn_BT = old_logprobs_BT if sampling_logprobs_BT is None else sampling_logprobs_BT
    return masked(logprobs_BT - drawn_BT, completion_mask(lengths_B, old_logprobs_BT.shape[1])).exp()


LossType = Literal["grpo", "dapo", "dr_grpo", "luspo", "cispo", "sapo", "vespo"]


class Sapo(NamedTuple):
    """Temperatures of the soft gate of "sapo".

    Attributes:
        temperature_pos: temperature of positive advantages.
        temperature_neg: temperature of the other advantages. A larger number gives less weight to distant ratios.
    """

    temperature_pos: float = 1.0
    temperature_neg: float = 1.05


class Vespo(NamedTuple):
    """Numbers of the weight of "vespo", exp(l) w^k exp(-l w), where w is the ratio of an answer's probabilities.

    Attributes:
        k_pos: k of advantages of 0 or more.
        lambda_pos: l of advantages of 0 or more.
        k_neg: k of negative advantages.
        lambda_neg: l of negative advantages.
    """

    k_pos: float = 2.0
    lambda_pos: float = 3.0
    k_neg: float = 3.0
    lambda_neg: float = 2.0


@explains_keywords(**MEANT)
def ppo_policy(
    logprobs_BT: Float[Tensor, "b t"],
    old_logprobs_BT: Float[Tensor, "b t"],
    advantages_BT: Float[Tensor, "b t"],
    lengths_B: Int[Tensor, " b"],
    *,
    epsilon: float = 0.2,
    epsilon_high: float | None = None,
    delta: float | None = None,
    sampling_logprobs_BT: Float[Tensor, "b t"] | None = None,
    importance_sampling_clip_max: float = CLIP_MAX,
) -> WeightedMean:
    """Returns PPO's loss: -min(rho A, clip(rho, 1 - epsilon, 1 + epsilon_high) A), a mean over all tokens.

    Args:
        logprobs_BT: log probabilities of the policy that learns.
        old_logprobs_BT: log probabilities of the policy before the first update by these answers.
        advantages_BT: advantages of each token, as from `gae`.
        lengths_B: tokens of each answer.
        epsilon: distance that a ratio may have from 1, such as 0.2 for ratios from 0.8 to 1.2.
        epsilon_high: distance above 1, if it differs from the distance below. None is `epsilon`.
        delta: largest ratio of tokens whose advantage is negative, which `epsilon_high` leaves unbounded. At least
            1 + epsilon_high. None is any ratio, and a loss of inf where the ratio overflows.
        sampling_logprobs_BT: log probabilities of the policy that drew the answers, where it is older than the policy
            of `old_logprobs_BT`: each token's loss then counts min(pi_old / pi_behaviour, importance_sampling_clip_max)
            times. None is the policy of `old_logprobs_BT`.
        importance_sampling_clip_max: largest such factor.

    Raises:
        ValueError: shapes do not fit, or a length is not from 0 to T. `importance_sampling_clip_max` is not positive,
            or without `sampling_logprobs_BT`, or an epsilon is out of range.

    Example:
        >>> one = torch.ones(1, 1)
        >>> ppo_policy(-one, -2 * one, one, torch.tensor([1])).mean()
        tensor(-1.2000)

    References:
        Schulman et al., Proximal Policy Optimization Algorithms, 2017, https://arxiv.org/abs/1707.06347
        Ye et al., Mastering Complex Control in MOBA Games, 2019, https://arxiv.org/abs/1912.09729
    """
    tensors = {
        "old_logprobs_BT": old_logprobs_BT,
        "advantages_BT": advantages_BT,
        "lengths_B": lengths_B,
        "sampling_logprobs_BT": sampling_logprobs_BT,
    }
    clip = _check_clip("ppo_policy", epsilon, epsilon_high, delta)
    check_shapes("ppo_policy", logprobs_BT=logprobs_BT, **tensors)
    check_lengths("ppo_policy", logprobs_BT.shape[1], lengths_B=lengths_B)
    log_BT = masked(logprobs_BT - old_logprobs_BT, completion_mask(lengths_B, logprobs_BT.shape[1]))
    weight_BT = truncated_weights(
        "ppo_policy", old_logprobs_BT, sampling_logprobs_BT, lengths_B, importance_sampling_clip_max
    )
    return mean_of_tokens(_compute_surrogate(log_BT, advantages_BT, clip, delta) * weight_BT, lengths_B)


@explains_keywords(**MEANT)
def ppo_value(
    values_BT: Float[Tensor, "b t"],
    old_values_BT: Float[Tensor, "b t"],
    returns_BT: Float[Tensor, "b t"],
    lengths_B: Int[Tensor, " b"],
    *,
    cliprange: float = 0.2,
) -> WeightedMean:
    """Returns a critic's loss: max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2) / 2, a mean over all tokens.

    Args:
        values_BT: values of the critic that learns.
        old_values_BT: values when the answers were drawn.
        returns_BT: returns as from `gae`.
        lengths_B: tokens of each answer.
        cliprange: c, the distance that a value may have from its old value.

    Raises:
        ValueError: shapes do not fit, a length is not from 0 to T, or `cliprange` is not above 0.

    Example:
        >>> one = torch.ones(1, 1)
        >>> ppo_value(one, 0 * one, one, torch.tensor([1])).mean()
        tensor(0.3200)
    """
    check_numbers("ppo_value", cliprange=cliprange)
    check_shapes(
        "ppo_value", values_BT=values_BT, old_values_BT=old_values_BT, returns_BT=returns_BT, lengths_B=lengths_B
    )
    check_lengths("ppo_value", values_BT.shape[1], lengths_B=lengths_B)
    mask_BT = completion_mask(lengths_B, values_BT.shape[1])
    v_BT, old_values_BT, r_BT = (masked(x, mask_BT) for x in (values_BT, old_values_BT, returns_BT))
    near_BT = torch.minimum(torch.maximum(v_BT, old_values_BT - cliprange), old_values_BT + cliprange)
    return mean_of_tokens(torch.maximum((v_BT - r_BT) ** 2, (near_BT - r_BT) ** 2) / 2, lengths_B)


@explains_keywords(**MEANT)
def grpo(
    logprobs_BT: Float[Tensor, "b t"],
    old_logprobs_BT: Float[Tensor, "b t"],
    advantages_B: Float[Tensor, " b"],
    lengths_B: Int[Tensor, " b"],
    *,
    epsilon: float = 0.2,
    epsilon_high: float | None = None,
    delta: float | None = None,
    loss_type: LossType | Sapo | Vespo = "dapo",
    max_completion_length: int | None = None,
    importance_sampling_level: Literal["token", "sequence"] = "token",
    ref_logprobs_BT: Float[Tensor, "b t"] | None = None,
    beta: float = 0.0,
    estimator: Estimator = "k3",
    use_bias_correction_kl: bool = True,
    sampling_logprobs_BT: Float[Tensor, "b t"] | None = None,
    importance_sampling_clip_max: float = CLIP_MAX,
    loss_mask_BT: Shaped[Tensor, "b t"] | None = None,
    entropies_BT: Float[Tensor, "b t"] | None = None,
    entropy_coef: float = 0.0,
) -> WeightedMean:
    """Returns the loss of answers whose tokens share an advantage.

    | | loss_type | mean | importance_sampling_level | epsilon, epsilon_high |
    |---|---|---|---|---|
    | GRPO | "grpo" | of an answer's tokens, then of answers | "token" | 0.2 |
    | DAPO | "dapo" | of all tokens | "token" | 0.2, 0.28 |
    | Dr. GRPO | "dr_grpo" | of answers, sums over tokens / max_completion_length | "token" | 0.2 |
    | GSPO | "grpo" | of an answer's tokens, then of answers | "sequence" | 0.0003, 0.0004 |
    | LUSPO | "luspo" | of answers, sums over tokens | "sequence" | 0.2 |
    | CISPO | "cispo" | of all tokens | "token" | 1.0, 4.0 |
    | SAPO | "sapo" | of an answer's tokens, then of answers | "token" | |
    | VESPO | "vespo" | of all tokens | | |

    Means are over the rows and tokens of all ranks and microbatches. An empty answer counts as a row of loss 0.

    Args:
        logprobs_BT: log probabilities of the policy that learns.
        old_logprobs_BT: log probabilities of the policy before the first update by these answers.
        advantages_B: advantages as from `group_advantages`.
        lengths_B: tokens of each answer.
        epsilon: distance that a ratio may have from 1, such as 0.2 for ratios from 0.8 to 1.2.
        epsilon_high: distance above 1, if it differs from the distance below. None is `epsilon`.
        delta: largest ratio of answers whose advantage is negative, which `epsilon_high` leaves unbounded, except in
            "cispo". At least 1 + epsilon_high. None is any ratio, and a loss of inf where the ratio overflows.
        loss_type: "grpo", "dapo", "dr_grpo" and "luspo" have the loss -min(rho A, clip(rho) A). "cispo" has
            -clip(rho) A log pi, where clip(rho) is a constant weight. "sapo", or `Sapo(...)`, has
            -4 sigmoid(t (rho - 1)) A / t. "vespo", or `Vespo(...)`, has -phi A log pi, where phi is a constant weight
            of the whole answer's ratio to the policy that drew it.
        max_completion_length: divisor of "dr_grpo", as a rule the number of tokens of the longest possible answer.
        importance_sampling_level: "token", or "sequence" for exp of the mean of an answer's log ratios.
        ref_logprobs_BT: log probabilities of the reference.
        beta: weight of `kl(logprobs, reference)`.
        estimator: estimator of the divergence.
        use_bias_correction_kl: whether the divergence of a token has the weight pi / pi_behaviour, with the ratio's
            gradient, as in DeepSeek-V3.2 and by default in TRL (`use_bias_correction_kl`). Then k1 and k3 have the mean
            and the mean gradient of KL(pi, ref) in every epoch. Otherwise k3 has the gradient of KL(ref, pi), and a
            token that has become improbable since its draw has a k3 of ref / pi. The weight has no bound: a bound of 2
            made the divergence of a run up to 15% too small. Clip the norm of gradients, as rare weights are large.
        sampling_logprobs_BT: log probabilities of the policy that drew the answers, where it is older than the policy
            of `old_logprobs_BT`: each token's loss, without its divergence, then counts min(pi_old / pi_behaviour,
            importance_sampling_clip_max) times (truncated importance sampling). The clip bounds only the updates by
            these answers, and not the updates since the answers were drawn. None is the policy of `old_logprobs_BT`.
            Where both have the same bits, so has the loss.
        importance_sampling_clip_max: largest such factor, which bounds the variance. Without the bound, the mean of a
            token's gradient, given the tokens before, would equal the mean over draws of `old_logprobs_BT`.
        loss_mask_BT: weights of the tokens' losses, for example from `high_entropy_mask` or `off_policy_mask`. The
            divergence and the divisor of the mean do not change. None is 1.
        entropies_BT: entropies of the policy as from `completion_entropies`, with a gradient.
        entropy_coef: weight of the entropies, which are subtracted from the losses of tokens. In "dapo", "cispo" and
            "vespo" the result is the loss less `entropy_coef` times the mean entropy, as in TRL.

    Raises:
        ValueError: shapes do not fit, or a length is not from 0 to T. A choice is unknown. `max_completion_length` is
            missing, or without effect. `beta` without a reference, or a reference without `beta`.
            `importance_sampling_clip_max` is not positive, or without `sampling_logprobs_BT`. An epsilon is out of
            range, `beta` negative, or `delta` without effect.

    Example:
        >>> one = torch.ones(1, 1)
        >>> grpo(-one, -2 * one, torch.tensor([1.0]), torch.tensor([1])).mean()
        tensor(-1.2000)
        >>> grpo(-one, -2 * one, torch.tensor([1.0]), torch.tensor([1]), sampling_logprobs_BT=-2.5 * one).mean()
        tensor(-1.9785)

    References:
        Shao et al., DeepSeekMath, 2024, https://arxiv.org/abs/2402.03300
        Yu et al., DAPO, 2025, https://arxiv.org/abs/2503.14476
        Liu et al., Understanding R1-Zero-Like Training, 2025, https://arxiv.org/abs/2503.20783
        Zheng et al., Group Sequence Policy Optimization, 2025, https://arxiv.org/abs/2507.18071
        MiniMax, MiniMax-M1, 2025, https://arxiv.org/abs/2506.13585
        Espeholt et al., IMPALA, 2018 (`importance_sampling_clip_max`), https://arxiv.org/abs/1802.01561
        Hilton et al., Batch size-invariance for policy optimization, 2021, https://arxiv.org/abs/2110.00641
        Fu et al., AReaL, 2025, https://arxiv.org/abs/2505.24298
        Gao et al., Soft Adaptive Policy Optimization, 2025, https://arxiv.org/abs/2511.20347
        Shen et al., VESPO, 2026, https://arxiv.org/abs/2602.10693
        DeepSeek-AI, DeepSeek-V3.2, 2025, section 3.1 (`use_bias_correction_kl`), https://arxiv.org/abs/2512.02556
    """
    kind, shape = _loss_shape(loss_type)
    _check_choices(kind, shape, max_completion_length, importance_sampling_level, ref_logprobs_BT, beta)
    _check_entropy(entropies_BT, entropy_coef)
    clip = _check_clip("grpo", epsilon, epsilon_high, delta)
    _check_effect(kind, epsilon, epsilon_high, delta)
    tensors = {"old_logprobs_BT": old_logprobs_BT, "advantages_B": advantages_B, "lengths_B": lengths_B}
    tensors |= {"ref_logprobs_BT": ref_logprobs_BT, "sampling_logprobs_BT": sampling_logprobs_BT}
    tensors |= {"loss_mask_BT": loss_mask_BT, "entropies_BT": entropies_BT}
    check_shapes("grpo", logprobs_BT=logprobs_BT, **tensors)
    check_lengths("grpo", logprobs_BT.shape[1], lengths_B=lengths_B)
    mask_BT = completion_mask(lengths_B, logprobs_BT.shape[1])
    log_BT, own_BT = masked(logprobs_BT - old_logprobs_BT, mask_BT), masked(logprobs_BT, mask_BT)
    weights_BT = truncated_weights(
        "grpo", old_logprobs_BT, sampling_logprobs_BT, lengths_B, importance_sampling_clip_max
    )
    a_BT = advantages_B[:, None].expand_as(log_BT)
    if isinstance(shape, Vespo):
        loss_BT = -_weigh_answers(log_BT, weights_BT, mask_BT, advantages_B, shape) * a_BT * own_BT
    else:
        if importance_sampling_level == "sequence":
            log_BT = (log_BT.sum(1) / lengths_B.clamp(min=1))[:, None].expand_as(log_BT)
        if isinstance(shape, Sapo):
            loss_BT = _gate_ratios(log_BT, a_BT, shape)
        elif kind == "cispo":
            loss_BT = -log_BT.exp().clamp(*clip).detach() * a_BT * own_BT
        else:
            loss_BT = _compute_surrogate(log_BT, a_BT, clip, delta)
        loss_BT = loss_BT * weights_BT
    if loss_mask_BT is not None:
        loss_BT = loss_BT * masked(loss_mask_BT.to(loss_BT.dtype), mask_BT)
    if entropies_BT is not None:
        loss_BT = loss_BT - entropy_coef * masked(entropies_BT, mask_BT)
    if ref_logprobs_BT is not None:
        kl_BT = kl(own_BT, masked(ref_logprobs_BT, mask_BT), estimator=estimator)
        if use_bias_correction_kl:
            kl_BT = behavior_ratios(logprobs_BT, old_logprobs_BT, sampling_logprobs_BT, lengths_B) * kl_BT
        loss_BT = loss_BT + beta * kl_BT
    return _reduce_loss(loss_BT, lengths_B, kind, max_completion_length)


@explains_keywords(**MEANT)
def rloo(
    logprobs_BT: Float[Tensor, "b t"],
    old_logprobs_BT: Float[Tensor, "b t"],
    advantages_B: Float[Tensor, " b"],
    lengths_B: Int[Tensor, " b"],
    *,
    epsilon: float = 0.2,
    epsilon_high: float | None = None,
) -> WeightedMean:
    """Returns the loss of whole answers as single actions, a mean over answers.

    The ratio is the ratio of the answers' probabilities. On the first epoch the gradient is REINFORCE's, of -A log
    pi(answer).

    Args:
        logprobs_BT: log probabilities of the policy that learns.
        old_logprobs_BT: log probabilities of the policy that drew the answers.
        advantages_B: advantages as from `group_advantages(baseline="others", scale_rewards="none")`.
        lengths_B: tokens of each answer.
        epsilon: distance that a ratio may have from 1, such as 0.2 for ratios from 0.8 to 1.2.
        epsilon_high: distance above 1, if it differs from the distance below. None is `epsilon`.

    Raises:
        ValueError: shapes do not fit, a length is not from 0 to T, or an epsilon is out of range.

    Example:
        >>> logprobs = torch.tensor([[-1.0, -2.0]])
        >>> rloo(logprobs, logprobs, torch.tensor([0.5]), torch.tensor([2])).mean()
        tensor(-0.5000)

    References:
        Ahmadian et al., Back to Basics, 2024, https://arxiv.org/abs/2402.14740
    """
    clip = _check_clip("rloo", epsilon, epsilon_high)
    check_shapes(
        "rloo", logprobs_BT=logprobs_BT, old_logprobs_BT=old_logprobs_BT, advantages_B=advantages_B, lengths_B=lengths_B
    )
    check_lengths("rloo", logprobs_BT.shape[1], lengths_B=lengths_B)
    log_BT = masked(logprobs_BT - old_logprobs_BT, completion_mask(lengths_B, logprobs_BT.shape[1]))
    return row_mean(_compute_surrogate(log_BT.sum(1), advantages_B, clip, None))


@explains_keywords(**MEANT)
def policy_metrics(
    logprobs_BT: Float[Tensor, "b t"],
    old_logprobs_BT: Float[Tensor, "b t"],
    lengths_B: Int[Tensor, " b"],
    *,
    epsilon: float = 0.2,
    epsilon_high: float | None = None,
    ref_logprobs_BT: Float[Tensor, "b t"] | None = None,
    sampling_logprobs_BT: Float[Tensor, "b t"] | None = None,
    importance_sampling_clip_max: float = CLIP_MAX,
) -> dict[str, WeightedMean]:
    """Returns metrics for a loss's aux: means over all tokens, without gradients.

    Args:
        logprobs_BT: log probabilities of the policy that learns.
        old_logprobs_BT: log probabilities of the policy before the first update by these answers.
        lengths_B: tokens of each answer.
        epsilon: `epsilon` of the loss.
        epsilon_high: `epsilon_high` of the loss.
        ref_logprobs_BT: log probabilities of the reference.
        sampling_logprobs_BT: log probabilities of the policy that drew the answers, where it is older than the policy
            of `old_logprobs_BT`, or None.
        importance_sampling_clip_max: truncation of the loss.

    Returns:
        "ratio", pi / pi_old, "exact", the part of ratios that are 1 to the last bit, "clipped", the part outside of the
        clip, and "length", the mean over answers. With a reference "kl", by k3 with the weights pi / pi_behaviour: the
        divergence of the policy that learns, though an older policy has drawn the tokens. With `sampling_logprobs_BT`
        "weight", min(pi_old / pi_behaviour, importance_sampling_clip_max).

    Raises:
        ValueError: shapes do not fit, or a length is not from 0 to T. `importance_sampling_clip_max` is not positive,
            or without `sampling_logprobs_BT`, or an epsilon is out of range.

    Example:
        >>> one = torch.ones(1, 1)
        >>> {name: x.mean().item() for name, x in policy_metrics(-one, -one, torch.tensor([1])).items()}
        {'ratio': 1.0, 'exact': 1.0, 'clipped': 0.0, 'length': 1.0}
    """
    tensors = {"old_logprobs_BT": old_logprobs_BT, "lengths_B": lengths_B, "ref_logprobs_BT": ref_logprobs_BT}
    clip = _check_clip("policy_metrics", epsilon, epsilon_high)
    check_shapes("policy_metrics", logprobs_BT=logprobs_BT, **tensors, sampling_logprobs_BT=sampling_logprobs_BT)
    check_lengths("policy_metrics", logprobs_BT.shape[1], lengths_B=lengths_B)
    mask_BT, logprobs_BT = completion_mask(lengths_B, logprobs_BT.shape[1]), logprobs_BT.detach()
    rho_BT = masked(logprobs_BT - old_logprobs_BT, mask_BT).exp()
    rows = {"ratio": rho_BT, "exact": rho_BT == 1, "clipped": rho_BT != rho_BT.clamp(*clip)}
    if ref_logprobs_BT is not None:
        kl_BT = kl(masked(logprobs_BT, mask_BT), masked(ref_logprobs_BT, mask_BT))
        rows["kl"] = behavior_ratios(logprobs_BT, old_logprobs_BT, sampling_logprobs_BT, lengths_B) * kl_BT
    weight_BT = truncated_weights(
        "policy_metrics", old_logprobs_BT, sampling_logprobs_BT, lengths_B, importance_sampling_clip_max
    )
    rows |= {} if sampling_logprobs_BT is None else {"weight": weight_BT}
    found = {name: mean_of_tokens(x.to(rho_BT.dtype), lengths_B) for name, x in rows.items()}
    return found | {"length": row_mean(lengths_B.to(rho_BT.dtype))}


def _check_clip(
    who: str, epsilon: float, epsilon_high: float | None, delta: float | None = None
) -> tuple[float, float]:
    """Returns the smallest and the largest clipped ratio."""
    high = epsilon if epsilon_high is None else epsilon_high
    if not (0 < epsilon <= 1 and 0 < high < math.inf):
        raise ValueError(
            f"{who}: epsilon must be above 0 and at most 1, and epsilon_high positive and finite, got epsilon={epsilon}"
            f" and epsilon_high={epsilon_high}. Ratios are clipped to [1 - epsilon, 1 + epsilon_high], for example by"
            " epsilon=0.2, epsilon_high=0.28."
        )
    if delta is not None and not 1 + high <= delta < math.inf:
        raise ValueError(
            f"{who}: delta must be finite and at least {1 + high:g}, the largest clipped ratio, got {delta}. A smaller"
            " delta would cut ratios of positive advantages."
        )
    return 1 - epsilon, 1 + high


def _compute_surrogate(log: Tensor, a: Tensor, clip: tuple[float, float], delta: float | None) -> Tensor:
    # Ratios beyond their bound have no gradient. Some way beyond the bound they stay there, so that exp does not
    # overflow: inf times an advantage or a gradient of 0 is NaN.
    beyond = 1.0
    above = log.clamp(max=math.log(clip[1]) + beyond)
    below = log if delta is None else log.clamp(max=math.log(delta) + beyond)
    rho = torch.where(a < 0, below, above).exp()
    free = rho if delta is None else rho.clamp(max=delta)
    return -torch.minimum(free * a, rho.clamp(*clip) * a)


def _gate_ratios(log: Tensor, a: Tensor, gate: Sapo) -> Tensor:
    # The gate of e^20 is 1 to the last bit, and has no gradient. Beyond, exp would overflow: inf times 0 is NaN.
    t = torch.where(a > 0, gate.temperature_pos, gate.temperature_neg).to(log.dtype)
    return -torch.sigmoid(t * (log.clamp(max=20.0).exp() - 1)) * 4 / t * a


def _weigh_answers(log_BT: Tensor, weights_BT: Tensor, mask_BT: Tensor, a_B: Tensor, gate: Vespo) -> Tensor:
    """Returns the constant weight of each answer, [B, 1], of its bounded ratio to the policy that drew it."""
    least, most = math.log(1e-8), 20.0
    drawn_BT = masked(weights_BT.expand_as(log_BT), mask_BT).log().clamp(least, most)
    log_B = log_BT.detach().clamp(-most, most).sum(1) + masked(drawn_BT, mask_BT).sum(1)
    log_B = log_B.clamp(least, most)
    k_B = torch.where(a_B >= 0, gate.k_pos, gate.k_neg).to(log_B.dtype)
    l_B = torch.where(a_B >= 0, gate.lambda_pos, gate.lambda_neg).to(log_B.dtype)
    return (l_B + k_B * log_B - l_B * log_B.exp()).exp()[:, None]


def _reduce_loss(loss_BT: Tensor, lengths_B: Tensor, kind: str, constant: int | None) -> WeightedMean:
    if kind in ("dapo", "cispo", "vespo"):
        return mean_of_tokens(loss_BT, lengths_B)
    sums_B = masked(loss_BT, completion_mask(lengths_B, loss_BT.shape[1])).sum(1)
    divisors = {"dr_grpo": constant, "luspo": 1}
    return row_mean(sums_B / (divisors[kind] if kind in divisors else lengths_B.clamp(min=1)))


def _loss_shape(loss_type: LossType | Sapo | Vespo) -> tuple[str, Sapo | Vespo | None]:
    match loss_type:
        case Sapo():
            return "sapo", loss_type
        case Vespo():
            return "vespo", loss_type
    return loss_type, {"sapo": Sapo(), "vespo": Vespo()}.get(loss_type)


def _check_choices(
    kind: str,
    shape: Sapo | Vespo | None,
    constant: int | None,
    level: str,
    reference: Tensor | None,
    beta: float,
) -> None:
    for name, value, known in (
        ("loss_type", kind, get_args(LossType)),
        ("importance_sampling_level", level, ("token", "sequence")),
    ):
        if value not in known:
            hint = '. TRL\'s "bnpo" is "dapo" here: its mean is over the tokens of all ranks' * (value == "bnpo")
            raise ValueError(f"grpo: {name} must be one of {', '.join(map(repr, known))}, got {value!r}{hint}.")
    if (constant is None) == (kind == "dr_grpo") or (constant is not None and constant < 1):
        raise ValueError(
            f'grpo: loss_type="dr_grpo" must have max_completion_length, for example 256, and other losses must not,'
            f" got max_completion_length={constant!r} and loss_type={kind!r}."
        )
    if kind == "vespo" and level == "sequence":
        raise ValueError(
            'grpo: importance_sampling_level has no effect on "vespo", whose ratio is always of the whole answer, got'
            " 'sequence'. Remove it."
        )
    for name, value in {} if shape is None else shape._asdict().items():
        check_numbers("grpo", **{f"{kind} {name}": value})
    check_numbers("grpo", "0 or more", beta=beta)
    if (reference is None) != (beta == 0):
        raise ValueError(
            f"grpo: beta and ref_logprobs_BT must be passed together, got beta={beta}"
            f" {'without' if reference is None else 'with'} ref_logprobs_BT."
        )


def _check_effect(kind: str, epsilon: float, epsilon_high: float | None, delta: float | None) -> None:
    if delta is not None and kind in ("cispo", "sapo", "vespo"):
        raise ValueError(
            f'grpo: delta is {delta} with loss_type="{kind}", whose ratios are all bounded, so it has no effect. Remove'
            " delta."
        )
    if kind in ("sapo", "vespo") and (epsilon != 0.2 or epsilon_high is not None):
        raise ValueError(
            f'grpo: epsilon has no effect on "{kind}", got epsilon={epsilon} and epsilon_high={epsilon_high}. Remove'
            " them."
        )


def _check_entropy(entropies: Tensor | None, coef: float) -> None:
    check_numbers("grpo", "0 or more", entropy_coef=coef)
    if (entropies is None) != (coef == 0):
        raise ValueError(
            f"grpo: entropy_coef and entropies_BT must be passed together, got entropy_coef={coef}"
            f" {'without' if entropies is None else 'with'} entropies_BT."
        )
