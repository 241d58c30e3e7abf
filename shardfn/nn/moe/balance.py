"""Losses that keep the experts of a router equally busy, and its logits small.

Of the whole batch by `axes`, or of a rank's own rows without. They are functions of a routing before a capacity drops
any of its choices.

S tokens of this rank, K choices of a token, E experts.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from shardfn.core import Axes

from ._ranks import summed_over
from ._routing import Routing, counts_of


def switch(routing: Routing, *, axes: Axes = None, mask: Bool[Tensor, " s"] | None = None) -> Float[Tensor, ""]:
    """E sum_e f_e p_e: 1 where experts are equally busy.

    f_e is the share of the choices that fall on expert e, a constant; p_e its mean score, which has the gradient.

    Args:
        routing: of this rank's tokens, before a capacity.
        axes: axes of the batch: f and p are those of all ranks' tokens, in one message of 2 E + 1 numbers. None: those
            of this rank's own tokens, whose loss a step then averages over the ranks.
        mask: the tokens that count. None: those that have an expert, so all but padding.

    Example:
        >>> from shardfn.nn import moe
        >>> logits = torch.tensor([[2.0, 1, 0, -1], [3, 0, 0, 0.5], [0, 2, 1, -2], [1, 0.5, 0, 2]])
        >>> round(moe.balance.switch(moe.top_k(logits, 2)).item(), 6)
        1.167847

    References:
        Fedus et al., Switch Transformers, 2021, https://arxiv.org/abs/2101.03961
    """
    return _product(routing, routing.experts, axes, mask)


def _product(routing: Routing, experts: Tensor, axes: Axes, mask: Tensor | None) -> Tensor:
    """E sum_e f_e p_e with the shares f of the given choices."""
    f, p = _shares(routing, experts, axes, mask)
    return routing.num_experts * (f * p).sum()


def _shares(routing: Routing, experts: Tensor, axes: Axes, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """[E] and [E]: each expert's share of the choices, and its mean score, over the tokens that count."""
    E, probs = routing.num_experts, routing.probs
    counted = routing.routed() if mask is None else mask
    counts = counts_of(torch.where(counted[:, None], experts, -1), E).to(probs.dtype)
    sums = torch.where(counted[:, None], probs, 0.0).sum(0)
    counts, sums, tokens = summed_over(torch.cat([counts, sums, counted.sum()[None].to(probs.dtype)]), axes).split(
        [E, E, 1]
    )
    return counts / counts.sum().clamp(min=1), sums / tokens.clamp(min=1)
