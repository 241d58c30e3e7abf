"""Preferences: losses of a policy by pairs of answers, or by answers that are wanted or not.

Losses of pairs of answers, by the names of TRL's `DPOConfig(loss_type=)`: the rows of a table.

c and r are log pi - log ref of the better and of the rejected answer, sums over tokens. B pairs.

Losses of a policy by pairs of answers, or by answers that are wanted or not.

Log probabilities are sums over the tokens of an answer. B pairs.
"""

import functools
import math
from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from shardfn import collectives, core
from shardfn.engine import WeightedMean

from ._completions import row_mean
from ._shapes import PREFERENCES, check_negative, check_numbers, check_shapes

PairLoss = Literal[
    "sigmoid",
    "sigmoid_norm",
    "hinge",
    "ipo",
    "robust",
    "exo_pair",
    "nca_pair",
    "bco_pair",
    "sppo_hard",
    "aot",
    "aot_unpaired",
    "apo_zero",
    "apo_down",
    "discopop",
]
Divergence = Literal["reverse_kl", "forward_kl", "js_divergence", "alpha_divergence"]


class Pairs(NamedTuple):
    """Log ratios of pairs, with the numbers of a loss.

    Attributes:
        chosen_B: c.
        rejected_B: r.
        chosen_scores_B: f'(exp(c)), where f is the divergence. c for the reverse KL divergence.
        rejected_scores_B: f'(exp(r)).
        differences_B: log pi(chosen) - log pi(rejected), and the same of the reference.
        lengths_B: numbers of tokens of the better and of the rejected answers, or None.
        beta: strength with which the policy is held to the reference.
        smoothing: label smoothing.
        tau: temperature of "discopop".
        axis: mesh axes that cut the rows.
    """

    chosen_B: Tensor
    rejected_B: Tensor
    chosen_scores_B: Tensor
    rejected_scores_B: Tensor
    differences_B: tuple[Tensor, Tensor]
    lengths_B: tuple[Tensor, Tensor] | None
    beta: float
    smoothing: float
    tau: float
    axis: core.Axes

    @property
    def h_B(self) -> Tensor:
        """Returns the difference of the scores."""
        return self.chosen_scores_B - self.rejected_scores_B

    @property
    def mean_h_B(self) -> Tensor:
        """Returns the difference of the scores divided by numbers of tokens."""
        assert self.lengths_B is not None
        chosen, rejected = (n.clamp(min=1) for n in self.lengths_B)
        return self.chosen_scores_B / chosen - self.rejected_scores_B / rejected


def score_ratios(x_B: Tensor, divergence: Divergence, alpha: float) -> Tensor:
    """Returns f'(exp(x)) of log ratios x, up to a constant, for the divergence of f.

    Args:
        x_B: log pi - log ref.
        divergence: "reverse_kl" is x, "forward_kl" is 1 - exp(-x), "js_divergence" is log 2 + log sigmoid(x), and
            "alpha_divergence" is (exp((alpha - 1) x) - 1) / (alpha - 1).
        alpha: alpha. 1 is the reverse KL divergence.
    """
    match divergence:
        case "forward_kl":
            return -torch.expm1(-x_B)
        case "js_divergence":
            return math.log(2) + F.logsigmoid(x_B)
        case "alpha_divergence" if abs(alpha - 1) >= 1e-6:
            # exp overflows at 88 in float32.
            return torch.expm1(((alpha - 1) * x_B).clamp(max=80.0)) / (alpha - 1)
    return x_B


def smooth_sigmoid(h_B: Tensor, smoothing: float) -> Tensor:
    """Returns -(1 - s) log sigmoid(h) - s log sigmoid(-h)."""
    return -(1 - smoothing) * F.logsigmoid(h_B) - smoothing * F.logsigmoid(-h_B)


def _compute_exo(x: Pairs) -> Tensor:
    h_B, s = x.beta * x.h_B, x.smoothing
    won_B = torch.sigmoid(h_B) * (F.logsigmoid(h_B) - math.log1p(-s))
    return won_B + torch.sigmoid(-h_B) * (F.logsigmoid(-h_B) - math.log(s))


def _compute_nca(x: Pairs) -> Tensor:
    c_B, r_B = x.beta * x.chosen_B, x.beta * x.rejected_B
    return -F.logsigmoid(c_B) - 0.5 * F.logsigmoid(-c_B) - 0.5 * F.logsigmoid(-r_B)


def _compute_discopop(x: Pairs) -> Tensor:
    h_B = x.beta * x.h_B
    share_B = torch.sigmoid(h_B / x.tau)
    return -F.logsigmoid(h_B) * (1 - share_B) + torch.exp(-h_B) * share_B


def _sort_rows(x_B: Tensor, axis: core.Axes) -> Tensor:
    """Returns this rank's part of the sorted rows of all ranks."""
    if axis is None:
        return x_B.sort().values
    start = int(collectives.axis_index(axis)) * len(x_B)
    return collectives.all_gather(x_B, axis).sort().values[start : start + len(x_B)]


def _compute_transport(x: Pairs, better_B: Tensor, other_B: Tensor) -> Tensor:
    return smooth_sigmoid(x.beta * (_sort_rows(better_B, x.axis) - _sort_rows(other_B, x.axis)), x.smoothing)


LOSSES: dict[str, Callable[[Pairs], Tensor]] = {
    "sigmoid": lambda x: smooth_sigmoid(x.beta * x.h_B, x.smoothing),
    "sigmoid_norm": lambda x: -F.logsigmoid(x.beta * x.mean_h_B),
    "hinge": lambda x: (1 - x.beta * x.h_B).relu(),
    "ipo": lambda x: (x.mean_h_B - 1 / (2 * x.beta)) ** 2,
    "robust": lambda x: (
        (-(1 - x.smoothing) * F.logsigmoid(x.beta * x.h_B) + x.smoothing * F.logsigmoid(-x.beta * x.h_B))
        / (1 - 2 * x.smoothing)
    ),
    "exo_pair": _compute_exo,
    "nca_pair": _compute_nca,
    "bco_pair": lambda x: -F.logsigmoid(x.beta * x.chosen_B) - F.logsigmoid(-x.beta * x.rejected_B),
    "sppo_hard": lambda x: (x.chosen_B - 0.5 / x.beta) ** 2 + (x.rejected_B + 0.5 / x.beta) ** 2,
    "aot": lambda x: _compute_transport(x, *x.differences_B),
    "aot_unpaired": lambda x: _compute_transport(x, x.chosen_B, x.rejected_B),
    "apo_zero": lambda x: torch.sigmoid(-x.beta * x.chosen_B) + torch.sigmoid(x.beta * x.rejected_B),
    "apo_down": lambda x: torch.sigmoid(x.beta * x.chosen_B) + torch.sigmoid(-x.beta * (x.chosen_B - x.rejected_B)),
    "discopop": _compute_discopop,
}
_SMOOTHED = ("sigmoid", "robust", "exo_pair", "aot", "aot_unpaired")
_SCORED = ("sigmoid", "sigmoid_norm", "hinge", "ipo", "robust", "exo_pair", "discopop")


def check_losses(
    weights: Mapping[str, float], smoothing: float, divergence: str, alpha: float, tau: float, has_lengths: bool
) -> None:
    """Refuses unknown losses, and arguments that the losses do not use or lack.

    Args:
        weights: weights of the losses by name.
        smoothing: `label_smoothing`.
        divergence: `f_divergence_type`.
        alpha: `f_alpha_divergence_coef`.
        tau: `discopop_tau`.
        has_lengths: whether lengths are passed.

    Raises:
        ValueError: lists each problem.
    """
    known = ", ".join(map(repr, LOSSES))
    unknown = [name for name in weights if name not in LOSSES]
    problems = [f"loss_type must be one of {known}, got {name!r}.{_explain(name)}" for name in unknown]
    problems += [] if weights else ["loss_type must name at least one loss, got an empty mapping."]
    problems += [
        f"the weight of {name!r} must be finite and not 0, got {weight}. Remove the loss, or weigh it."
        for name, weight in weights.items()
        if not math.isfinite(weight) or weight == 0
    ]
    normed = [name for name in weights if name in ("ipo", "sigmoid_norm")]
    if has_lengths != bool(normed):
        problems.append(
            f"{' and '.join(map(repr, normed))} must have chosen_lengths_B and rejected_lengths_B, got None."
            if normed
            else f"lengths are only for 'ipo' and 'sigmoid_norm', got them for {', '.join(map(repr, weights))}."
        )
    if smoothing and not any(name in _SMOOTHED for name in weights):
        problems.append(f"label_smoothing is only for {', '.join(map(repr, _SMOOTHED))}, got {smoothing}.")
    if "exo_pair" in weights and not 0 < smoothing < 1:
        problems.append(
            f"label_smoothing of 'exo_pair' must be above 0 and below 1, for example 0.001, got {smoothing}."
        )
    if "robust" in weights and not 0 <= smoothing < 0.5:
        problems.append(f"label_smoothing of 'robust' must be at least 0 and below 0.5, got {smoothing}.")
    divergences = ("reverse_kl", "forward_kl", "js_divergence", "alpha_divergence")
    if divergence not in divergences:
        problems.append(f"f_divergence_type must be one of {', '.join(map(repr, divergences))}, got {divergence!r}.")
    elif divergence != "reverse_kl" and not any(name in _SCORED for name in weights):
        problems.append(f"f_divergence_type is only for {', '.join(map(repr, _SCORED))}, got {divergence!r}.")
    if alpha != 0.5 and divergence != "alpha_divergence":
        problems.append(f"f_alpha_divergence_coef={alpha} has no effect without f_divergence_type='alpha_divergence'.")
    core.raise_all(ValueError, "dpo:", problems)
    check_numbers("dpo", "from 0 to 1", label_smoothing=smoothing)
    check_numbers("dpo", discopop_tau=tau)


def _explain(name: str) -> str:
    if name == "sft":
        return " Add the cross entropy of the chosen answers as a second loss of the step."
    return core.did_you_mean(name, LOSSES)


@core.explains_keywords(**PREFERENCES)
def dpo(
    chosen_B: Float[Tensor, " b"],
    rejected_B: Float[Tensor, " b"],
    ref_chosen_B: Float[Tensor, " b"],
    ref_rejected_B: Float[Tensor, " b"],
    *,
    loss_type: PairLoss | Mapping[PairLoss, float] = "sigmoid",
    beta: float = 0.1,
    label_smoothing: float = 0.0,
    f_divergence_type: Divergence = "reverse_kl",
    f_alpha_divergence_coef: float = 0.5,
    discopop_tau: float = 0.05,
    chosen_lengths_B: Int[Tensor, " b"] | None = None,
    rejected_lengths_B: Int[Tensor, " b"] | None = None,
    axis: core.Axes = None,
) -> WeightedMean:
    """Computes a loss of direct preference optimisation, a mean over pairs.

    c and r are log pi - log ref of the better and of the rejected answer, h = c - r, and s is `label_smoothing`.

    | loss_type | loss of a pair |
    |---|---|
    | "sigmoid" | -(1 - s) log sigmoid(beta h) - s log sigmoid(-beta h): DPO, and conservative DPO with s > 0 |
    | "sigmoid_norm" | -log sigmoid(beta h), where c and r are means over tokens |
    | "hinge" | max(0, 1 - beta h), of SLiC |
    | "ipo" | (h - 1 / (2 beta))^2, where c and r are means over tokens |
    | "robust" | (-(1 - s) log sigmoid(beta h) + s log sigmoid(-beta h)) / (1 - 2 s) |
    | "exo_pair" | KL(p, q) of p = (sigmoid(beta h), sigmoid(-beta h)) and q = (1 - s, s), s > 0 |
    | "nca_pair" | -log sigmoid(beta c) - log sigmoid(-beta c) / 2 - log sigmoid(-beta r) / 2 |
    | "bco_pair" | -log sigmoid(beta c) - log sigmoid(-beta r) |
    | "sppo_hard" | (c - 1 / (2 beta))^2 + (r + 1 / (2 beta))^2 |
    | "aot" | "sigmoid" of sorted log pi differences less sorted log ref differences |
    | "aot_unpaired" | "sigmoid" of sorted c less sorted r |
    | "apo_zero" | 1 - sigmoid(beta c) + sigmoid(beta r) |
    | "apo_down" | sigmoid(beta c) + 1 - sigmoid(beta h) |
    | "discopop" | (1 - m) -log sigmoid(beta h) + m exp(-beta h), where m = sigmoid(beta h / discopop_tau) |

    Losses equal the losses of TRL's `DPOConfig(loss_type=)`, except that "sigmoid" uses `label_smoothing`.

    Args:
        chosen_B: log probabilities of the better answers: sums over their tokens.
        rejected_B: log probabilities of the rejected answers.
        ref_chosen_B: log probabilities of the better answers by the reference.
        ref_rejected_B: log probabilities of the rejected answers by the reference.
        loss_type: name of a loss, or a weight for each name. For example {"sigmoid": 0.8, "bco_pair": 0.2} is their
            weighted sum.
        beta: strength with which the policy is held to the reference.
        label_smoothing: s, the part of pairs that is expected to be the wrong way round.
        f_divergence_type: divergence that holds the policy to the reference. The losses of h, "ipo" and "sigmoid_norm"
            then have f'(pi / ref) in place of c and r: 1 - ref / pi for "forward_kl", log(2 pi / (pi + ref)) for
            "js_divergence", and ((pi / ref)^(a - 1) - 1) / (a - 1) for "alpha_divergence".
        f_alpha_divergence_coef: a.
        discopop_tau: temperature of "discopop".
        chosen_lengths_B: number of tokens of each better answer, for "ipo" and "sigmoid_norm".
        rejected_lengths_B: number of tokens of each rejected answer, for "ipo" and "sigmoid_norm".
        axis: mesh axes that cut the rows, for "aot" and "aot_unpaired", which sort the rows of all ranks. All ranks
            have equal numbers of rows. A microbatch is sorted separately.

    Raises:
        ValueError: a tensor has no number for each answer (sum log probabilities of tokens first). A loss is unknown,
            or an argument is out of range, missing or without effect for the losses.

    Example:
        >>> x = [torch.tensor([value]) for value in (-5.0, -7.0, -5.5, -6.8)]
        >>> dpo(*x).mean(), dpo(*x, loss_type="hinge").mean()
        (tensor(0.6588), tensor(0.9300))
        >>> dpo(*x, loss_type={"sigmoid": 0.5, "hinge": 0.5}).mean()
        tensor(0.7944)

    References:
        Rafailov et al., Direct Preference Optimization, 2023, https://arxiv.org/abs/2305.18290
        Mitchell, A note on DPO with noisy preferences, 2023 (`label_smoothing`), https://ericmitchell.ai/cdpo.pdf
        Zhao et al., SLiC-HF, 2023, https://arxiv.org/abs/2305.10425
        Azar et al., A General Theoretical Paradigm to Understand Learning from Human Preferences, 2023,
            https://arxiv.org/abs/2310.12036
        Chowdhury et al., Provably Robust DPO, 2024, https://arxiv.org/abs/2403.00409
        Ji et al., Towards Efficient Exact Optimization of Language Model Alignment, 2024,
            https://arxiv.org/abs/2402.00856
        Chen et al., Noise Contrastive Alignment of Language Models, 2024, https://arxiv.org/abs/2402.05369
        Jung et al., Binary Classifier Optimization, 2024, https://arxiv.org/abs/2404.04656
        Wu et al., Self-Play Preference Optimization, 2024, https://arxiv.org/abs/2405.00675
        Melnyk et al., Distributional Preference Alignment of LLMs via Optimal Transport, 2024,
            https://arxiv.org/abs/2406.05882
        D'Oosterlinck et al., Anchored Preference Optimization, 2024, https://arxiv.org/abs/2408.06266
        Lu et al., Discovering Preference Optimization Algorithms, 2024, https://arxiv.org/abs/2406.08414
        Wang et al., Beyond Reverse KL, 2023 (`f_divergence_type`), https://arxiv.org/abs/2309.16240
    """
    weights: dict[str, float] = {loss_type: 1.0} if isinstance(loss_type, str) else {**loss_type}
    lengths = {"chosen_lengths_B": chosen_lengths_B, "rejected_lengths_B": rejected_lengths_B}
    both = chosen_lengths_B is not None and rejected_lengths_B is not None
    check_losses(weights, label_smoothing, f_divergence_type, f_alpha_divergence_coef, discopop_tau, both)
    check_numbers("dpo", beta=beta)
    references = {"ref_chosen_B": ref_chosen_B, "ref_rejected_B": ref_rejected_B}
    check_shapes("dpo", chosen_B=chosen_B, rejected_B=rejected_B, **references, **lengths)
    ratios = chosen_B - ref_chosen_B, rejected_B - ref_rejected_B
    c_B, r_B = (score_ratios(x_B, f_divergence_type, f_alpha_divergence_coef) for x_B in ratios)
    differences = chosen_B - rejected_B, ref_chosen_B - ref_rejected_B
    n_B = None
    if chosen_lengths_B is not None and rejected_lengths_B is not None:
        n_B = chosen_lengths_B, rejected_lengths_B
    pairs = Pairs(*ratios, c_B, r_B, differences, n_B, beta, label_smoothing, discopop_tau, axis)
    rows = [weight * LOSSES[name](pairs) for name, weight in weights.items()]
    return row_mean(functools.reduce(torch.add, rows))


@core.explains_keywords(**PREFERENCES)
def cpo(
    chosen_B: Float[Tensor, " b"],
    rejected_B: Float[Tensor, " b"],
    *,
    loss_type: Literal["sigmoid", "hinge", "ipo", "simpo"] = "sigmoid",
    beta: float = 0.1,
    label_smoothing: float = 0.0,
    simpo_gamma: float = 0.5,
    alpha: float = 0.0,
) -> WeightedMean:
    """Computes a loss of contrastive preference optimisation, of pairs without a reference, a mean over pairs.

    h is log pi(chosen) - log pi(rejected), and s is `label_smoothing`.

    | loss_type | loss of a pair |
    |---|---|
    | "sigmoid" | -(1 - s) log sigmoid(beta h) - s log sigmoid(-beta h) |
    | "simpo" | "sigmoid" of h - simpo_gamma / beta: SimPO, of means over tokens |
    | "hinge" | max(0, 1 - beta h) |
    | "ipo" | (h - 1 / (2 beta))^2 |

    The whole loss of CPO is this loss and the cross entropy of the chosen answers: two losses of a step, or a sum.
    Losses equal the losses of TRL's `CPOConfig(loss_type=)`.

    Args:
        chosen_B: log probabilities of the better answers: sums over their tokens, or means for "simpo".
        rejected_B: log probabilities of the rejected answers: sums or means.
        loss_type: name of the loss.
        beta: scale of h.
        label_smoothing: s, the part of pairs that is expected to be the wrong way round.
        simpo_gamma: margin of "simpo".
        alpha: exponent of AlphaPO, which has (1 - pi^-alpha) / alpha in place of log pi. 0 is log pi.

    Raises:
        ValueError: a tensor has no number for each answer. The loss is unknown, or an argument is out of range or
            without effect for the loss.

    Example:
        >>> x = torch.tensor([-1.0]), torch.tensor([-2.0])
        >>> cpo(*x).mean(), cpo(*x, loss_type="simpo", beta=2.0).mean()
        (tensor(0.6444), tensor(0.2014))

    References:
        Xu et al., Contrastive Preference Optimization, 2024, https://arxiv.org/abs/2401.08417
        Meng et al., SimPO, 2024, https://arxiv.org/abs/2405.14734
        Gupta et al., AlphaPO, 2025, https://arxiv.org/abs/2501.03884
    """
    check_numbers("cpo", beta=beta)
    check_numbers("cpo", "from 0 to 1", label_smoothing=label_smoothing)
    check_numbers("cpo", "0 or more", simpo_gamma=simpo_gamma)
    if not math.isfinite(alpha):
        raise ValueError(f"cpo: alpha must be finite, got {alpha}.")
    known = ("sigmoid", "simpo", "hinge", "ipo")
    if loss_type not in known:
        raise ValueError(f"cpo: loss_type must be one of {', '.join(map(repr, known))}, got {loss_type!r}.")
    if label_smoothing and loss_type in ("hinge", "ipo"):
        raise ValueError(f"cpo: label_smoothing has no effect on {loss_type!r}, got {label_smoothing}. Remove it.")
    check_shapes("cpo", chosen_B=chosen_B, rejected_B=rejected_B)
    rewards = [x_B if alpha == 0 else -torch.expm1(-alpha * x_B) / alpha for x_B in (chosen_B, rejected_B)]
    h_B = beta * (rewards[0] - rewards[1])
    match loss_type:
        case "hinge":
            return row_mean((1 - h_B).relu())
        case "ipo":
            return row_mean((h_B / beta - 1 / (2 * beta)) ** 2)
        case "simpo":
            h_B = h_B - simpo_gamma
    return row_mean(smooth_sigmoid(h_B, label_smoothing))


@core.explains_keywords(**PREFERENCES)
def kto(
    logprobs_B: Float[Tensor, " b"],
    ref_logprobs_B: Float[Tensor, " b"],
    desirable_B: Bool[Tensor, " b"],
    kl: Float[Tensor, ""] | None = None,
    *,
    loss_type: Literal["kto", "apo_zero_unpaired"] = "kto",
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> WeightedMean:
    """Computes the loss of Kahneman-Tversky optimisation, for unpaired answers.

    The loss of an answer is w sigmoid(s beta (log pi - log ref - z)), where s is -1 for a desirable answer, and 1 for
    an undesirable answer.

    Args:
        logprobs_B: log probabilities of the answers: sums over their tokens.
        ref_logprobs_B: log probabilities of the answers by the reference.
        desirable_B: whether each answer is desirable.
        kl: mean of log pi - log ref over answers that belong to other prompts, of all ranks (`pmean`). z is
            this number, or 0 if it is negative, as a constant. None for "apo_zero_unpaired".
        loss_type: "kto", or "apo_zero_unpaired" for z = 0.
        beta: strength with which the policy is held to the reference.
        desirable_weight: w of desirable answers.
        undesirable_weight: w of undesirable answers.

    Raises:
        ValueError: a tensor does not have one number per answer (sum the log probabilities of tokens first), `beta` is
            not above 0, a weight is negative, `kl` is missing for "kto", or `kl` is passed for "apo_zero_unpaired".

    Example:
        >>> x = torch.tensor
        >>> kto(x([-5.0]), x([-5.0]), x([True]), x(0.0)).mean()
        tensor(0.5000)

    References:
        Ethayarajh et al., KTO: Model Alignment as Prospect Theoretic Optimization, 2024,
            https://arxiv.org/abs/2402.01306
        D'Oosterlinck et al., Anchored Preference Optimization, 2024 ("apo_zero_unpaired"),
            https://arxiv.org/abs/2408.06266
    """
    check_numbers("kto", beta=beta)
    check_numbers("kto", "0 or more", desirable_weight=desirable_weight, undesirable_weight=undesirable_weight)
    check_shapes("kto", logprobs_B=logprobs_B, ref_logprobs_B=ref_logprobs_B, desirable_B=desirable_B)
    if loss_type not in ("kto", "apo_zero_unpaired"):
        raise ValueError(f"kto: loss_type must be 'kto' or 'apo_zero_unpaired', got {loss_type!r}.")
    if (kl is None) != (loss_type == "apo_zero_unpaired"):
        raise ValueError(
            f"kto: kl must be passed for loss_type='kto', and not for 'apo_zero_unpaired', got kl={kl} for"
            f" {loss_type!r}."
        )
    z = 0.0 if kl is None else kl.detach().clamp(min=0)
    ahead_B = beta * (logprobs_B - ref_logprobs_B - z)
    rows_B = torch.sigmoid(torch.where(desirable_B, -ahead_B, ahead_B))
    return row_mean(torch.where(desirable_B, desirable_weight * rows_B, undesirable_weight * rows_B))


@core.explains_keywords(**PREFERENCES)
def orpo(chosen_B: Float[Tensor, " b"], rejected_B: Float[Tensor, " b"], *, beta: float = 0.1) -> WeightedMean:
    """Returns the term of odds ratio preference optimisation: -beta log sigmoid(log odds(chosen) - log odds(rejected)).

    The whole loss is this term and the cross entropy of the chosen answers: two losses of a step, or a sum.

    Args:
        chosen_B: log probabilities of the better answers: means over their tokens, below 0.
        rejected_B: log probabilities of the rejected answers: means over their tokens, below 0.
        beta: weight of the term.

    Raises:
        ValueError: a tensor has no number for each answer, or beta is not above 0, or a mean is not below 0, such as
            the mean of an empty answer.

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
