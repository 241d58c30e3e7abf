"""Estimators of the divergence between the policy and a reference, token by token.

x = log ref - log pi, of tokens that pi has drawn.

Schulman, Approximating KL Divergence, 2020, http://joschu.net/blog/kl-approx.html
"""

from typing import Literal

from jaxtyping import Float
from torch import Tensor

Estimator = Literal["k1", "k2", "k3"]


def kl(
    logprobs: Float[Tensor, "*b"], reference: Float[Tensor, "*b"], *, estimator: Estimator = "k3"
) -> Float[Tensor, "*b"]:
    """An estimate of KL(pi, ref) for each token.

    | | value | mean of the value | mean of the gradient |
    |---|---|---|---|
    | k1 | -x | KL(pi, ref) | 0 |
    | k2 | x^2 / 2 | neither divergence | that of KL(pi, ref) |
    | k3 | e^x - 1 - x | KL(pi, ref) | that of KL(ref, pi) |

    The means are over tokens that pi draws itself. Tokens of an older policy need the ratio of both as a weight. In a
    reward, where only the value counts, take k1 or k3; in a loss k2 or k3.

    Args:
        logprobs: of the policy.
        reference: of the reference, for the same tokens; a constant.
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
    raise ValueError(f'estimator is {estimator!r}; it must be "k1", "k2" or "k3".')
