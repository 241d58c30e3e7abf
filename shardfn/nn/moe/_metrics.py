"""Metrics of a router, as sums and weights for the average of a step's metrics."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from shardfn.collectives import psum
from shardfn.core import Axes

from ._routing import Routing, as_shares, counts_of


def load(
    routing: Routing,
    kept: Routing | None = None,
    *,
    axes: Axes = None,
    mask: Bool[Tensor, " s"] | None = None,
) -> dict[str, tuple[Float[Tensor, ""], Float[Tensor, ""]]]:
    """Returns how busy the experts are, as pairs of a sum and a weight.

        max_load   choices of the busiest expert, divided by the mean over experts
        dead       number of experts without a choice
        entropy    of the router's scores of a token, log E without a preference
        dropped    share of the choices dropped by a capacity

    A loss returns the metrics next to the value, as `{name: sf.WeightedMean(*pair) for name, pair in
    load(...).items()}`. The step adds up sums and weights over microbatches and ranks, in the message of the other
    metrics. So `entropy` and `dropped` hold for the whole batch. `max_load` and `dead` are not means: both are averages
    over the ranks' rows, or with `axes` hold for the whole microbatch.

    Args:
        routing: before a capacity.
        kept: routing after the capacity. None: without a capacity.
        axes: axes of the batch, for `max_load` and `dead`, in a message of E counts. None: the rank's rows.
        mask: counted tokens. None: the tokens with an expert.

    Example:
        >>> from shardfn.nn import moe
        >>> found = moe.load(moe.top_k(torch.tensor([[2.0, 1, 0], [0, 0, 4]]), 1))
        >>> {name: round((total / weight).item(), 3) for name, (total, weight) in found.items()}
        {'max_load': 1.5, 'dead': 1.0, 'entropy': 0.505, 'dropped': 0.0}
    """
    counted = routing.routed() if mask is None else mask
    experts = torch.where(counted[:, None], routing.experts, -1)
    counts = counts_of(experts, routing.num_experts)
    whole, made = psum(counts, axes), counts.sum()
    dropped = made * 0 if kept is None else made - (torch.where(counted[:, None], kept.experts, -1) >= 0).sum()
    tokens, one = counted.sum(), (whole.sum() > 0).to(made.dtype)  # a rank without tokens is not in the mean
    found = {
        "max_load": (whole.max() * routing.num_experts / whole.sum().clamp(min=1), one),
        "dead": ((whole == 0).sum(), one),
        "entropy": (torch.where(counted, _score_entropy(routing.probs.detach()), 0.0).sum(), tokens),
        "dropped": (dropped, made),
    }
    dtype = routing.probs.dtype
    return {name: (total.to(dtype), weight.to(dtype)) for name, (total, weight) in found.items()}


def other_choices(
    routing: Routing, other: Routing, *, mask: Bool[Tensor, " s"] | None = None
) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
    """Returns the share of choices missing in another routing of the same tokens, as a sum and a weight.

    The share measures a dtype, a kernel or an older router by the changed experts. The order of a token's choices does
    not count. For example experts [2, 5] and [5, 3] differ in half of the choices. A loss returns the share next to the
    value, as `sf.WeightedMean(*other_choices(...))`, and the step averages over the whole batch.

    Args:
        routing: routing of the rank's tokens.
        other: another routing of the same tokens, such as from bfloat16 logits, or from the choices of a rollout.
        mask: counted tokens. None: the tokens with an expert in `routing`.

    Raises:
        ValueError: the routings are of other numbers of tokens.

    Example:
        >>> from shardfn.nn import moe
        >>> logits = torch.tensor([[1.999, 2.0, 0], [0, 1, 4]])  # bfloat16 has 2 for both
        >>> total, weight = other_choices(moe.top_k(logits, 1), moe.top_k(logits.bfloat16(), 1))
        >>> (total / weight).item()
        0.5
    """
    if len(routing.experts) != len(other.experts):
        raise ValueError(
            f"other_choices: the routings are of {len(routing.experts)} and {len(other.experts)} tokens. Both must be"
            " of the same tokens."
        )
    counted = routing.routed() if mask is None else mask
    made = counted[:, None] & (routing.experts >= 0)
    kept = (routing.experts[:, :, None] == other.experts[:, None, :]).any(-1)
    dtype = routing.probs.dtype
    return (made & ~kept).sum().to(dtype), made.sum().to(dtype)


def _score_entropy(scores: Tensor) -> Tensor:
    """Returns [S]: the entropy of the scores as probabilities."""
    probs = as_shares(scores)
    return -torch.xlogy(probs, probs).sum(-1)
