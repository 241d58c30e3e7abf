"""Losses of pairs of answers, by the names of TRL's `DPOConfig(loss_type=)`: the rows of a table.

c and r are log pi - log ref of the better and of the rejected answer, sums over tokens. B pairs.
"""

import math
from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from shardfn.collectives import all_gather, axis_index
from shardfn.core import Axes, did_you_mean, raise_all

from ._shapes import check_numbers

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
    axis: Axes

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


def _sort_rows(x_B: Tensor, axis: Axes) -> Tensor:
    """Returns this rank's part of the sorted rows of all ranks."""
    if axis is None:
        return x_B.sort().values
    start = int(axis_index(axis)) * len(x_B)
    return all_gather(x_B, axis).sort().values[start : start + len(x_B)]


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
    raise_all(ValueError, "dpo:", problems)
    check_numbers("dpo", "from 0 to 1", label_smoothing=smoothing)
    check_numbers("dpo", discopop_tau=tau)


def _explain(name: str) -> str:
    if name == "sft":
        return " Add the cross entropy of the chosen answers as a second loss of the step."
    return did_you_mean(name, LOSSES)
