"""Result of a router: the experts of each token, with the weights of outputs.

S tokens of the rank, K choices of a token, E experts.
"""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor


class Routing(NamedTuple):
    """Experts of each token. A tree of tensors, to be saved, cut along S or passed to other ranks.

    Attributes:
        experts: [S, K] of int64, or -1 where a choice has no expert: of a padding token, or dropped by a capacity.
        weights: factors of the outputs of experts, [S, K], or 0 where there is no expert.
        probs: [S, E], the router's scores of all experts.
        logits: logits [S, E] of the computation, in float32 or float64, and 0 in rows of padding.

    Example:
        >>> from shardfn.nn import moe
        >>> routing = moe.top_k(torch.tensor([[2.0, 1, 0], [0, 0, 4]]), 1)
        >>> routing.experts.tolist(), routing.counts().tolist(), routing.num_experts
        ([[0], [2]], [1, 0, 1], 3)
    """

    experts: Int64[Tensor, "s k"]
    weights: Float[Tensor, "s k"]
    probs: Float[Tensor, "s e"]
    logits: Float[Tensor, "s e"]

    @property
    def num_experts(self) -> int:
        """Returns E, including experts without a token."""
        return self.probs.shape[-1]

    def counts(self) -> Int64[Tensor, " e"]:
        """Returns the number of choices of each expert."""
        return counts_of(self.experts, self.num_experts)

    def routed(self) -> Bool[Tensor, " s"]:
        """Returns the tokens with an expert: before a capacity drops choices, all except padding."""
        return (self.experts >= 0).any(-1)


def counts_of(experts: Tensor, num_experts: int) -> Tensor:
    """Returns [E] of int64: how often each expert occurs among indices of any shape. -1 is not counted."""
    flat = experts.flatten()
    # Indices of no expert fall in a last place that is cut off: shapes then do not depend on the data.
    place = torch.where(flat < 0, num_experts, flat)
    return place.new_zeros(num_experts + 1).scatter_add(0, place, torch.ones_like(place))[:num_experts]


def as_shares(scores: Tensor) -> Tensor:
    """Returns [S, E]: scores divided by the sum, as sigmoids do not sum to 1."""
    return scores / scores.sum(-1, keepdim=True).clamp(min=torch.finfo(scores.dtype).tiny)
