"""Routers with a choice that depends on the other tokens: expert choice and Sinkhorn.

During generation a model sees no other tokens. So such routers are for training, and for encoders.

S tokens of the rank, K choices of a token, E experts.
"""

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from shardfn.collectives import axis_size, psum
from shardfn.core import Axes

from ._capacity import apply_capacity
from ._choice import choice, taken
from ._logits import check_k, wide_logits
from ._routing import Routing


def expert_choice(
    logits: Float[Tensor, "s e"],
    capacity: int,
    *,
    axes: Axes = None,
    mask: Bool[Tensor, " s"] | None = None,
    name: str = "moe",
) -> Routing:
    """Gives each expert the `capacity` tokens with the highest probability for the expert.

    All experts are equally busy.

    A token has between no expert and all experts, so the routing has K = E choices, choice e being expert e or -1, for
    example [0, -1, 2]. Ties go to the earlier token.

    Args:
        logits: see `top_k`.
        capacity: tokens of an expert, at most S. `capacity(S, k, E)` gives k experts to a token on average.
        axes: axes of the batch: experts choose among the tokens of all ranks, in the order of the ranks, as on a single
            device, and the capacity holds for the whole batch. Scores stay in place: the ranks compare counts, in four
            messages of 256 E integers (eight in float64) and a message of E, for any number of tokens. None: experts
            choose among the rank's tokens.
        mask: False for padding, never taken by an expert.
        name: the layer, in errors.

    Raises:
        ValueError: the capacity does not lie in 1 .. S (with `axes`, is less than 1), or logits of a token are not
            finite.

    Example:
        >>> expert_choice(torch.tensor([[2.0, 1, 0], [3, 0, 0], [0, 2, 1]]), 1).experts.tolist()
        [[-1, -1, -1], [0, -1, -1], [-1, 1, 2]]

    References:
        Zhou et al., Mixture-of-Experts with Expert Choice Routing, 2022, https://arxiv.org/abs/2202.09368
    """
    # With axes all tokens come from several ranks, with maybe unequal numbers, and experts may take all.
    if capacity < 1 or (axis_size(axes) == 1 and capacity > max(len(logits), 1)):
        raise ValueError(
            f"{name}: each expert is to take capacity={capacity} of {len(logits)} tokens, and takes a token once at"
            f" most: choose a capacity in 1 .. {len(logits)}."
        )
    wide = wide_logits(logits, mask, name)
    probs = wide.softmax(-1)
    numbers = torch.arange(wide.shape[-1], device=wide.device).expand_as(probs)
    experts = numbers if mask is None else torch.where(mask[:, None], numbers, -1)
    if axis_size(axes) > 1:
        every = Routing(experts, probs, probs, wide)
        return apply_capacity(every, capacity, priority="probs", axes=axes)
    scores = torch.where(experts >= 0, probs.detach(), -1.0)
    # The place of each token in the order of an expert is the inverse of the order.
    places = scores.sort(stable=True, dim=0, descending=True).indices.argsort(0)
    experts = torch.where(places < capacity, experts, -1)
    return Routing(experts, torch.where(experts >= 0, probs, 0.0), probs, wide)


def sinkhorn(
    logits: Float[Tensor, "s e"],
    k: int = 1,
    *,
    iterations: int = 10,
    axes: Axes = None,
    mask: Bool[Tensor, " s"] | None = None,
    chosen: Int64[Tensor, "s k"] | None = None,
    name: str = "moe",
) -> Routing:
    """Returns the k best experts, after a shift of logits such that all experts have the same total probability.

    Each iteration moves a shift of each expert: b <- b - log(E mean_s softmax(logits + b)). Weights come from the
    logits without shifts: sigmoids for k = 1, else probabilities.

    Args:
        logits: see `top_k`.
        k: experts of a token.
        iterations: number of moves of the shifts. Large logits need more.
        axes: axes of the batch. Tokens of all ranks are balanced together. None: only the rank's tokens.
        mask: see `top_k`.
        chosen: see `top_k`.
        name: the layer, in errors.

    Raises:
        ValueError: as `top_k`.

    Example:
        >>> logits = torch.tensor([[2.0, 1.9], [2, 1.8], [2, 1.7], [2, 1.6]])
        >>> sinkhorn(logits).experts.flatten().tolist()
        [1, 1, 0, 0]

    References:
        Clark et al., Unified Scaling Laws for Routed Language Models, 2022, https://arxiv.org/abs/2202.01169
    """
    check_k(k, logits.shape[-1], name)
    wide = wide_logits(logits, mask, name)
    experts = choice(wide.detach() + _compute_shifts(wide.detach(), iterations, axes, mask), k, mask, chosen, name)
    probs = wide.sigmoid() if k == 1 else wide.softmax(-1)
    return Routing(experts, taken(probs, experts), probs, wide)


def _compute_shifts(logits: Tensor, iterations: int, axes: Axes, mask: Tensor | None) -> Tensor:
    """Returns [E]: the logarithms of the experts' factors."""
    counted = torch.ones_like(logits[:, :1]) if mask is None else mask[:, None].to(logits)
    tokens, shifts = psum(counted.sum(), axes).clamp(min=1), torch.zeros_like(logits.sum(0))
    for _ in range(iterations):
        share = psum((counted * (logits + shifts).softmax(-1)).sum(0), axes) / tokens
        shifts = shifts - (logits.shape[-1] * share).clamp(min=torch.finfo(logits.dtype).tiny).log()
    return shifts
