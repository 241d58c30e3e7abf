"""Estimators of the divergence between the policy and a reference, token by token.

x = log ref - log pi, of tokens that pi has drawn.

Schulman, Approximating KL Divergence, 2020, http://joschu.net/blog/kl-approx.html
"""

import math
from typing import Literal

from jaxtyping import Float
from torch import Tensor

from ._shapes import check_numbers

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

    References:
        Ziegler et al., Fine-Tuning Language Models from Human Preferences, 2019, https://arxiv.org/abs/1909.08593
    """
    check_numbers("follow_divergence", beta=beta, target=target, rate=rate, most=most)
    if rate * most >= 1:
        raise ValueError(
            f"follow_divergence: rate is {rate} and most {most}; their product must be below 1, or beta would not stay"
            " above 0."
        )
    if not math.isfinite(divergence):
        raise ValueError(
            f"follow_divergence: divergence is {divergence}, of a target of {target}; it must be finite: look at the"
            " parameters of the iteration before."
        )
    return beta * (1 + rate * min(max(divergence / target - 1, -most), most))
