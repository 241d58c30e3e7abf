"""Losses of a policy by the ratio to the policy that drew the answers, and of its critic.

rho = exp(log pi - log pi_old). B rows, T tokens of an answer.
"""

import math
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from shardfn.core import explains_keywords
from shardfn.engine import WeightedMean

from ._completions import answer_mask, counted_mean, masked, row_mean
from ._kl import Estimator, kl
from ._meant import MEANT
from ._off_policy import TRUNCATE, drawn_ratios, truncated_weights
from ._shapes import check_lengths, check_numbers, check_shapes

Clip = float | tuple[float, float]


@explains_keywords(**MEANT)
def ppo_policy(
    logprobs_BT: Float[Tensor, "b t"],
    old_BT: Float[Tensor, "b t"],
    advantages_BT: Float[Tensor, "b t"],
    lengths_B: Int[Tensor, " b"],
    *,
    clip: Clip = 0.2,
    most: float | None = None,
    behaviour_BT: Float[Tensor, "b t"] | None = None,
    truncate: float = TRUNCATE,
) -> WeightedMean:
    """Returns PPO's loss: -min(rho A, clip(rho, 1 - clip, 1 + clip) A), a mean over all tokens.

    Args:
        logprobs_BT: log probabilities of the policy that learns.
        old_BT: log probabilities of the policy before the first update by these answers.
        advantages_BT: advantages of each token, as from `gae`.
        lengths_B: tokens of each answer.
        clip: distance that a ratio may have from 1, or a pair (below, above).
        most: largest ratio of tokens whose advantage is negative, which `clip` leaves unbounded. At least the largest
            ratio of `clip`. None is any, and a loss of inf where the ratio overflows.
        behaviour_BT: log probabilities of the policy that drew the answers, where it is older than the policy of
            `old_BT`: each token's loss then counts min(pi_old / pi_behaviour, truncate) times. None is the policy of
            `old_BT`.
        truncate: largest such factor.

    Raises:
        ValueError: shapes do not fit, or a length is not from 0 to T. `truncate` is not positive, or without
            `behaviour_BT`, or a clip is out of range.

    Example:
        >>> one = torch.ones(1, 1)
        >>> ppo_policy(-one, -2 * one, one, torch.tensor([1])).mean()
        tensor(-1.2000)

    References:
        Schulman et al., Proximal Policy Optimization Algorithms, 2017, https://arxiv.org/abs/1707.06347
        Ye et al., Mastering Complex Control in MOBA Games, 2019, https://arxiv.org/abs/1912.09729
    """
    tensors = {"old_BT": old_BT, "advantages_BT": advantages_BT, "lengths_B": lengths_B, "behaviour_BT": behaviour_BT}
    _check_clip("ppo_policy", clip, most)
    check_shapes("ppo_policy", logprobs_BT=logprobs_BT, **tensors)
    check_lengths("ppo_policy", logprobs_BT.shape[1], lengths_B=lengths_B)
    log_BT = masked(logprobs_BT - old_BT, answer_mask(lengths_B, logprobs_BT.shape[1]))
    weight_BT = truncated_weights("ppo_policy", old_BT, behaviour_BT, lengths_B, truncate)
    return counted_mean(_compute_surrogate(log_BT, advantages_BT, clip, most) * weight_BT, lengths_B)


@explains_keywords(**MEANT)
def ppo_value(
    values_BT: Float[Tensor, "b t"],
    old_BT: Float[Tensor, "b t"],
    returns_BT: Float[Tensor, "b t"],
    lengths_B: Int[Tensor, " b"],
    *,
    clip: float = 0.2,
) -> WeightedMean:
    """Returns a critic's loss: max((V - R)^2, (clip(V, V_old - clip, V_old + clip) - R)^2) / 2, a mean over all tokens.

    Args:
        values_BT: values of the critic that learns.
        old_BT: values when the answers were drawn.
        returns_BT: returns as from `gae`.
        lengths_B: tokens of each answer.
        clip: distance that a value may have from its old value.

    Raises:
        ValueError: shapes do not fit, a length is not from 0 to T, or the clip is not above 0.

    Example:
        >>> one = torch.ones(1, 1)
        >>> ppo_value(one, 0 * one, one, torch.tensor([1])).mean()
        tensor(0.3200)
    """
    check_numbers("ppo_value", clip=clip)
    check_shapes("ppo_value", values_BT=values_BT, old_BT=old_BT, returns_BT=returns_BT, lengths_B=lengths_B)
    check_lengths("ppo_value", values_BT.shape[1], lengths_B=lengths_B)
    mask_BT = answer_mask(lengths_B, values_BT.shape[1])
    v_BT, old_BT, r_BT = (masked(x, mask_BT) for x in (values_BT, old_BT, returns_BT))
    near_BT = torch.minimum(torch.maximum(v_BT, old_BT - clip), old_BT + clip)
    return counted_mean(torch.maximum((v_BT - r_BT) ** 2, (near_BT - r_BT) ** 2) / 2, lengths_B)


@explains_keywords(**MEANT)
def grpo(
    logprobs_BT: Float[Tensor, "b t"],
    old_BT: Float[Tensor, "b t"],
    advantages_B: Float[Tensor, " b"],
    lengths_B: Int[Tensor, " b"],
    *,
    clip: Clip = 0.2,
    most: float | None = None,
    normalise: Literal["sequence", "batch", "constant"] = "batch",
    constant: int | None = None,
    ratio: Literal["token", "sequence"] = "token",
    objective: Literal["clip", "weight"] = "clip",
    reference_BT: Float[Tensor, "b t"] | None = None,
    beta: float = 0.0,
    estimator: Estimator = "k3",
    corrected: bool = True,
    behaviour_BT: Float[Tensor, "b t"] | None = None,
    truncate: float = TRUNCATE,
) -> WeightedMean:
    """Returns the loss of answers whose tokens share an advantage.

    | | normalise | ratio | objective | clip |
    |---|---|---|---|---|
    | GRPO | "sequence" | "token" | "clip" | 0.2 |
    | DAPO | "batch" | "token" | "clip" | (0.2, 0.28) |
    | Dr. GRPO | "constant" | "token" | "clip" | 0.2 |
    | GSPO | "sequence" | "sequence" | "clip" | (0.0003, 0.0004) |
    | CISPO | "batch" | "token" | "weight" | (1.0, 4.0) |

    Means are over the rows and tokens of all ranks and microbatches. An empty answer counts as a row of loss 0.

    Args:
        logprobs_BT: log probabilities of the policy that learns.
        old_BT: log probabilities of the policy before the first update by these answers.
        advantages_B: advantages as from `group_advantages`.
        lengths_B: tokens of each answer.
        clip: distance that a ratio may have from 1, or a pair (below, above).
        most: largest ratio of answers whose advantage is negative, which the objective "clip" leaves unbounded. At
            least the largest ratio of `clip`. None is any, and a loss of inf where the ratio overflows.
        normalise: "sequence" is the mean over an answer's tokens, and over answers. "batch" is the mean over all
            tokens. "constant" is the sum over an answer's tokens by `constant`, and the mean over answers.
        constant: number of the longest answer's tokens, as a rule.
        ratio: "token", or "sequence": exp of the mean of an answer's log ratios.
        objective: "clip" is -min(rho A, clip(rho) A). "weight" is -clip(rho) A log pi, with clip(rho) a constant
            weight.
        reference_BT: log probabilities of the reference.
        beta: weight of `kl(logprobs, reference)`.
        estimator: estimator of the divergence.
        corrected: whether the divergence of a token has the weight pi / pi_behaviour, with the ratio's gradient, as in
            DeepSeek-V3.2 and by default in TRL (`use_bias_correction_kl`). Then k1 and k3 have the mean and the mean
            gradient of KL(pi, ref) in every epoch. Otherwise k3 has the gradient of KL(ref, pi), and a token that has
            become improbable since its draw has a k3 of ref / pi. The weight has no bound: a bound of 2 made the
            divergence of a run up to 15% too small. Clip the norm of gradients, as rare weights are large.
        behaviour_BT: log probabilities of the policy that drew the answers, where it is older than the policy of
            `old_BT`: each token's loss, without its divergence, then counts min(pi_old / pi_behaviour, truncate) times
            (truncated importance sampling). The clip bounds only the updates by these answers, and not the updates
            since the answers were drawn. None is the policy of `old_BT`. Where both have the same bits, so has the
            loss.
        truncate: largest such factor, which bounds the variance. Without the bound, the mean of a token's gradient,
            given the tokens before, would equal the mean over draws of `old_BT`.

    Raises:
        ValueError: shapes do not fit, or a length is not from 0 to T. A choice is unknown. `constant` is missing, or
            without effect. `beta` without a reference, or a reference without `beta`. `truncate` is not positive, or
            without `behaviour_BT`. A clip is out of range, `beta` negative, or `most` without effect.

    Example:
        >>> one = torch.ones(1, 1)
        >>> grpo(-one, -2 * one, torch.tensor([1.0]), torch.tensor([1])).mean()
        tensor(-1.2000)
        >>> grpo(-one, -2 * one, torch.tensor([1.0]), torch.tensor([1]), behaviour_BT=-2.5 * one).mean()
        tensor(-1.9785)

    References:
        Shao et al., DeepSeekMath, 2024, https://arxiv.org/abs/2402.03300
        Yu et al., DAPO, 2025, https://arxiv.org/abs/2503.14476
        Liu et al., Understanding R1-Zero-Like Training, 2025, https://arxiv.org/abs/2503.20783
        Zheng et al., Group Sequence Policy Optimization, 2025, https://arxiv.org/abs/2507.18071
        MiniMax, MiniMax-M1, 2025, https://arxiv.org/abs/2506.13585
        Espeholt et al., IMPALA, 2018 (`truncate`), https://arxiv.org/abs/1802.01561
        Hilton et al., Batch size-invariance for policy optimization, 2021, https://arxiv.org/abs/2110.00641
        Fu et al., AReaL, 2025, https://arxiv.org/abs/2505.24298
        DeepSeek-AI, DeepSeek-V3.2, 2025, section 3.1 (`corrected`), https://arxiv.org/abs/2512.02556
    """
    _check_choices(normalise, constant, ratio, objective, reference_BT, beta)
    _check_clip("grpo", clip, most)
    if most is not None and objective == "weight":
        raise ValueError(
            f'grpo: most is {most} with objective="weight", whose ratios are all within clip, so it has no effect;'
            " leave it out."
        )
    tensors = {"old_BT": old_BT, "advantages_B": advantages_B, "lengths_B": lengths_B, "reference_BT": reference_BT}
    check_shapes("grpo", logprobs_BT=logprobs_BT, **tensors, behaviour_BT=behaviour_BT)
    check_lengths("grpo", logprobs_BT.shape[1], lengths_B=lengths_B)
    mask_BT = answer_mask(lengths_B, logprobs_BT.shape[1])
    log_BT = masked(logprobs_BT - old_BT, mask_BT)
    if ratio == "sequence":
        log_BT = (log_BT.sum(1) / lengths_B.clamp(min=1))[:, None].expand_as(log_BT)
    a_BT = advantages_B[:, None].expand_as(log_BT)
    if objective == "clip":
        loss_BT = _compute_surrogate(log_BT, a_BT, clip, most)
    else:
        loss_BT = -_clip_ratio(log_BT.exp(), clip).detach() * a_BT * masked(logprobs_BT, mask_BT)
    loss_BT = loss_BT * truncated_weights("grpo", old_BT, behaviour_BT, lengths_B, truncate)
    if reference_BT is not None:
        kl_BT = kl(masked(logprobs_BT, mask_BT), masked(reference_BT, mask_BT), estimator=estimator)
        weight_BT = drawn_ratios(logprobs_BT, old_BT, behaviour_BT, lengths_B) if corrected else 1.0
        loss_BT = loss_BT + beta * weight_BT * kl_BT
    return _normalise_loss(loss_BT, lengths_B, normalise, constant)


@explains_keywords(**MEANT)
def rloo(
    logprobs_BT: Float[Tensor, "b t"],
    old_BT: Float[Tensor, "b t"],
    advantages_B: Float[Tensor, " b"],
    lengths_B: Int[Tensor, " b"],
    *,
    clip: Clip = 0.2,
) -> WeightedMean:
    """Returns the loss of whole answers as single actions, a mean over answers.

    The ratio is the ratio of the answers' probabilities. On the first epoch the gradient is REINFORCE's, of -A log
    pi(answer).

    Args:
        logprobs_BT: log probabilities of the policy that learns.
        old_BT: log probabilities of the policy that drew the answers.
        advantages_B: advantages as from `group_advantages(baseline="others", deviation=False)`.
        lengths_B: tokens of each answer.
        clip: distance that a ratio may have from 1, or a pair (below, above).

    Raises:
        ValueError: shapes do not fit, a length is not from 0 to T, or the clip is out of range.

    Example:
        >>> logprobs = torch.tensor([[-1.0, -2.0]])
        >>> rloo(logprobs, logprobs, torch.tensor([0.5]), torch.tensor([2])).mean()
        tensor(-0.5000)

    References:
        Ahmadian et al., Back to Basics, 2024, https://arxiv.org/abs/2402.14740
    """
    _check_clip("rloo", clip)
    check_shapes("rloo", logprobs_BT=logprobs_BT, old_BT=old_BT, advantages_B=advantages_B, lengths_B=lengths_B)
    check_lengths("rloo", logprobs_BT.shape[1], lengths_B=lengths_B)
    log_BT = masked(logprobs_BT - old_BT, answer_mask(lengths_B, logprobs_BT.shape[1]))
    return row_mean(_compute_surrogate(log_BT.sum(1), advantages_B, clip, None))


@explains_keywords(**MEANT)
def policy_metrics(
    logprobs_BT: Float[Tensor, "b t"],
    old_BT: Float[Tensor, "b t"],
    lengths_B: Int[Tensor, " b"],
    *,
    clip: Clip = 0.2,
    reference_BT: Float[Tensor, "b t"] | None = None,
    behaviour_BT: Float[Tensor, "b t"] | None = None,
    truncate: float = TRUNCATE,
) -> dict[str, WeightedMean]:
    """Returns metrics for a loss's aux: means over all tokens, without gradients.

    Args:
        logprobs_BT: log probabilities of the policy that learns.
        old_BT: log probabilities of the policy before the first update by these answers.
        lengths_B: tokens of each answer.
        clip: clip of the loss.
        reference_BT: log probabilities of the reference.
        behaviour_BT: log probabilities of the policy that drew the answers, where it is older than the policy of
            `old_BT`, or None.
        truncate: truncation of the loss.

    Returns:
        "ratio", pi / pi_old, "exact", the part of ratios that are 1 to the last bit, "clipped", the part outside of the
        clip, and "length", the mean over answers. With a reference "kl", by k3 with the weights pi / pi_behaviour: the
        divergence of the policy that learns, though an older policy has drawn the tokens. With `behaviour_BT` "weight",
        min(pi_old / pi_behaviour, truncate).

    Raises:
        ValueError: shapes do not fit, or a length is not from 0 to T. `truncate` is not positive, or without
            `behaviour_BT`, or the clip is out of range.

    Example:
        >>> one = torch.ones(1, 1)
        >>> {name: x.mean().item() for name, x in policy_metrics(-one, -one, torch.tensor([1])).items()}
        {'ratio': 1.0, 'exact': 1.0, 'clipped': 0.0, 'length': 1.0}
    """
    tensors = {"old_BT": old_BT, "lengths_B": lengths_B, "reference_BT": reference_BT}
    _check_clip("policy_metrics", clip)
    check_shapes("policy_metrics", logprobs_BT=logprobs_BT, **tensors, behaviour_BT=behaviour_BT)
    check_lengths("policy_metrics", logprobs_BT.shape[1], lengths_B=lengths_B)
    mask_BT, logprobs_BT = answer_mask(lengths_B, logprobs_BT.shape[1]), logprobs_BT.detach()
    rho_BT = masked(logprobs_BT - old_BT, mask_BT).exp()
    rows = {"ratio": rho_BT, "exact": rho_BT == 1, "clipped": rho_BT != _clip_ratio(rho_BT, clip)}
    if reference_BT is not None:
        kl_BT = kl(masked(logprobs_BT, mask_BT), masked(reference_BT, mask_BT))
        rows["kl"] = drawn_ratios(logprobs_BT, old_BT, behaviour_BT, lengths_B) * kl_BT
    weight_BT = truncated_weights("policy_metrics", old_BT, behaviour_BT, lengths_B, truncate)
    rows |= {} if behaviour_BT is None else {"weight": weight_BT}
    found = {name: counted_mean(x.to(rho_BT.dtype), lengths_B) for name, x in rows.items()}
    return found | {"length": row_mean(lengths_B.to(rho_BT.dtype))}


def _split_clip(clip: Clip) -> tuple[float, float]:
    return clip if isinstance(clip, tuple) else (clip, clip)


def _check_clip(who: str, clip: Clip, most: float | None = None) -> None:
    below, above = _split_clip(clip)
    if not (0 < below <= 1 and 0 < above < math.inf):
        raise ValueError(
            f"{who}: clip is {clip}; ratios are clipped to [1 - below, 1 + above], and below must be above 0 and at"
            " most 1, above positive and finite: clip=0.2, or clip=(0.2, 0.28)."
        )
    if most is not None and not 1 + above <= most < math.inf:
        raise ValueError(
            f"{who}: most is {most} and clip {clip}; it must be finite and at least {1 + above:g}, the largest ratio of"
            " clip, which it would otherwise cut for positive advantages."
        )


def _clip_ratio(rho: Tensor, clip: Clip) -> Tensor:
    below, above = _split_clip(clip)
    return rho.clamp(1 - below, 1 + above)


def _compute_surrogate(log: Tensor, a: Tensor, clip: Clip, most: float | None) -> Tensor:
    # Ratios beyond their bound have no gradient. Some way beyond the bound they stay there, so that exp does not
    # overflow: inf times an advantage or a gradient of 0 is NaN.
    beyond = 1.0
    above = log.clamp(max=math.log1p(_split_clip(clip)[1]) + beyond)
    below = log if most is None else log.clamp(max=math.log(most) + beyond)
    rho = torch.where(a < 0, below, above).exp()
    free = rho if most is None else rho.clamp(max=most)
    return -torch.minimum(free * a, _clip_ratio(rho, clip) * a)


def _normalise_loss(loss_BT: Tensor, lengths_B: Tensor, normalise: str, constant: int | None) -> WeightedMean:
    if normalise == "batch":
        return counted_mean(loss_BT, lengths_B)
    sums_B = masked(loss_BT, answer_mask(lengths_B, loss_BT.shape[1])).sum(1)
    return row_mean(sums_B / (lengths_B.clamp(min=1) if constant is None else constant))


def _check_choices(
    normalise: str, constant: int | None, ratio: str, objective: str, reference: Tensor | None, beta: float
) -> None:
    for name, value, known in (
        ("normalise", normalise, ("sequence", "batch", "constant")),
        ("ratio", ratio, ("token", "sequence")),
        ("objective", objective, ("clip", "weight")),
    ):
        if value not in known:
            raise ValueError(f"grpo: {name} is {value!r}; it must be one of {', '.join(map(repr, known))}.")
    if (constant is None) == (normalise == "constant") or (constant is not None and constant < 1):
        raise ValueError(
            f'grpo: constant is {constant!r} and normalise is {normalise!r}; "constant" takes the tokens of the longest'
            " answer, as in constant=256, and the others take None."
        )
    check_numbers("grpo", "0 or more", beta=beta)
    if (reference is None) != (beta == 0):
        raise ValueError(
            f"grpo: beta is {beta} {'without a' if reference is None else 'with a'} reference. Pass both or neither."
        )
