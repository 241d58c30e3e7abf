"""Capacities: experts with a limited number of tokens, and dropped choices.

Expert choice and Sinkhorn are routers with a choice that depends on the other tokens. During generation a model sees no
other tokens. So such routers are for training, and for encoders.

S tokens of the rank, K choices of a token, E experts, C capacity.
"""

import fractions
import math
from typing import Literal, overload

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from shardfn import collectives
from shardfn.collectives import axis_size, psum
from shardfn.core import Axes, explains_keywords

from ._route import check_index, words_of
from ._routing import Routing, check_k, choice, counts_of, taken, wide_logits

Priority = Literal["position", "choice", "probs", "random"]
# Bits of priorities compared at a time: a message has E counts for each value of such a digit.
_BITS = 8


@overload
def capacity(num_tokens: int, k: int, num_experts: int, factor: float = 1.0, minimum: int = 4) -> int: ...


@overload
def capacity(num_tokens: Tensor, k: int, num_experts: int, factor: float = 1.0, minimum: int = 4) -> Tensor: ...


def capacity(num_tokens: int | Tensor, k: int, num_experts: int, factor: float = 1.0, minimum: int = 4) -> int | Tensor:
    """Returns the number of choices of an expert: max(ceil(factor k S / E), minimum), by DeepSpeed's rule.

    Args:
        num_tokens: number S of tokens, of a rank where `apply_capacity` has no axes, else of the whole batch. An int64
            0-d tensor, such as the number of tokens without padding, has a tensor as the capacity.
        k: experts of a token.
        num_experts: E.
        factor: how many times the mean number of an expert's choices fits. The factor is read as a decimal number: 1.1
            is eleven tenths.
        minimum: the least capacity.

    Raises:
        ValueError: a number is not positive.

    Example:
        >>> capacity(100, 2, 8, 1.25)
        32
    """
    counted = num_tokens if isinstance(num_tokens, int) else 0
    if min(counted, minimum) < 0 or min(k, num_experts) < 1 or factor <= 0:
        raise ValueError(
            f"capacity(num_tokens={num_tokens}, k={k}, num_experts={num_experts}, factor={factor}, minimum={minimum}):"
            " a capacity needs choices, experts and a factor above 0."
        )
    each = fractions.Fraction(str(factor)) * k / num_experts
    if isinstance(num_tokens, int):
        return max(math.ceil(each * num_tokens), minimum)
    return (-(-num_tokens * each.numerator // each.denominator)).clamp(min=minimum)


@explains_keywords(by="priority={value!r}")
def apply_capacity(
    routing: Routing,
    capacity: int | Int64[Tensor, ""],
    *,
    priority: Priority = "position",
    axes: Axes = None,
    key: Int64[Tensor, "2"] | None = None,
    index: Int64[Tensor, " s"] | None = None,
    renormalise: bool = False,
) -> Routing:
    """Drops the choices of each expert past the capacity: dropped choices become -1, with weight 0.

        "position"   the first tokens stay
        "choice"     first choices stay before second choices, each in the order of tokens (GShard)
        "probs"      choices of higher probability stay
        "random"     each choice draws a number by token and expert (random token selection)

    Ties go to the earlier token. A dropped token adds nothing to the output of the layer.

    With `axes` the capacity holds for the whole batch, with tokens in the order of the ranks: the result equals a
    single device. Without `axes`, the capacity holds for each rank's rows, and another cut of the batch drops other
    tokens.

    Args:
        routing: routing of the rank's tokens. The balance loss takes this routing, before the capacity.
        capacity: C, from `capacity`. A tensor has the same value on all ranks of `axes`, and is at least 1.
        priority: rule by which choices stay.
        axes: axes of the batch. None: the rank's rows. The ranks compare counts, in a message for each 8 bits of the
            numbers by which choices are ordered, and a message for ties.
        key: key for the layer and step, for "random".
        index: global number of each token, from `token_numbers`, for "random".
        renormalise: whether weights of a token's remaining choices are scaled to the sum of all (GShard, and DeepSpeed
            for k of 2 and more).

    Raises:
        ValueError: the capacity is less than 1, `priority` is unknown, or `priority` is "random" without key and index.

    Example:
        >>> from shardfn.nn import moe
        >>> routing = moe.top_k(torch.tensor([[2.0, 1], [3, 0], [1, 0]]), 1)
        >>> apply_capacity(routing, 2).experts.flatten().tolist()
        [0, 0, -1]
        >>> apply_capacity(routing, 1, priority="probs").experts.flatten().tolist()
        [-1, 0, -1]

    References:
        Lepikhin et al., GShard, 2020, https://arxiv.org/abs/2006.16668
        Kim et al., Scalable and Efficient MoE Training for Multitask Multilingual Models, 2021,
        https://arxiv.org/abs/2109.10465 (random token selection)
    """
    if isinstance(capacity, int) and capacity < 1:
        raise ValueError(
            f"apply_capacity(capacity={capacity}): an expert takes one choice at least, or none can learn."
        )
    order, bits = _compute_order(routing, priority, key, index)
    stays = _find_staying(routing.experts, order, bits, routing.num_experts, capacity, axes)
    experts = torch.where(stays, routing.experts, -1)
    weights = torch.where(stays, routing.weights, 0.0)
    if renormalise:
        whole, rest = (w.sum(-1, keepdim=True) for w in (routing.weights, weights))
        # Where no choice is left, no weight is.
        weights = weights * (whole / rest.clamp(min=torch.finfo(rest.dtype).eps))
    return routing._replace(experts=experts, weights=weights)


def _compute_order(
    routing: Routing, priority: Priority, key: Tensor | None, index: Tensor | None
) -> tuple[Tensor, int]:
    """Returns priorities [S, K] of int64, larger numbers first, and the number of bits."""
    experts = routing.experts
    if (priority == "random") != (key is not None):
        raise ValueError(
            f'apply_capacity(priority="{priority}", key={"None" if key is None else "..."}): "random" draws by a key,'
            " the others do not. Pass key= and index= with it, and no key with another rule."
        )
    if priority == "position":
        return torch.zeros_like(experts), 0
    if priority == "choice":
        K = experts.shape[1]
        return (K - 1 - torch.arange(K, device=experts.device)).expand_as(experts), (K - 1).bit_length()
    if priority == "probs":
        probs = routing.probs.detach().gather(-1, experts.clamp(min=0))
        # Nonnegative numbers have the order of the bits.
        wide = probs.dtype == torch.float64
        return probs.view(torch.int64 if wide else torch.int32).long(), 64 if wide else 32
    if priority == "random":
        check_index("apply_capacity", key, index, len(experts))
        assert key is not None and index is not None  # checked
        return words_of(key, index, experts), 24
    raise ValueError(f'apply_capacity(priority="{priority}"): take "position", "choice", "probs" or "random".')


def _find_staying(
    experts: Tensor, priority: Tensor, bits: int, num_experts: int, capacity: int | Tensor, axes: Axes
) -> Tensor:
    """Returns the remaining choices [S, K]: above the expert's least priority, and the first choices equal to it."""
    chosen, safe = experts >= 0, experts.clamp(min=0)
    least, left = _find_least(experts, priority, bits, num_experts, capacity, axes)
    above, ties = chosen & (priority > least[safe]), chosen & (priority == least[safe])
    place = _count_earlier(torch.where(ties, experts, -1), num_experts, axes)
    return above | (ties & (place < left[safe]))


def _find_least(
    experts: Tensor, priority: Tensor, bits: int, num_experts: int, capacity: int | Tensor, axes: Axes
) -> tuple[Tensor, Tensor]:
    """Returns the least remaining priority [E], and how many such choices remain [E], digit by digit from the top."""
    E, size, safe = num_experts, 1 << _BITS, experts.clamp(min=0)
    least, left = experts.new_zeros(E), experts.new_zeros(E) + capacity
    for shift in range(-(-bits // _BITS) * _BITS - _BITS, -1, -_BITS):
        digit = (priority >> shift) & (size - 1)
        alike = (experts >= 0) & ((priority >> shift >> _BITS) == least[safe])
        counts = collectives.psum(counts_of(torch.where(alike, safe * size + digit, -1), E * size), axes).view(E, size)
        above = counts.flip(1).cumsum(1).flip(1) - counts
        # Falling along the digits: digits without room come first.
        found = (above >= left[:, None]).sum(1)
        left = left - above.gather(1, found[:, None])[:, 0]
        least = (least << _BITS) | found
    return least, left


def _count_earlier(experts: Tensor, num_experts: int, axes: Axes) -> Tensor:
    """Returns [S, K]: how many earlier choices in the batch have the same expert."""
    flat = experts.flatten()
    order = flat.sort(stable=True).indices
    counts = counts_of(flat, num_experts)
    n = collectives.axis_size(axes)
    of_all = collectives.all_gather(counts, axes).view(n, num_experts)
    ranks = torch.arange(n, device=flat.device)[:, None]
    before = torch.where(ranks < torch.tensor(collectives.axis_index(axes), device=flat.device), of_all, 0).sum(0)
    # In the order of experts a choice's place is the place less the expert's first place. -1 comes before all.
    first = (counts.cumsum(0) - counts) + (flat < 0).sum()
    own = torch.empty_like(flat).scatter(0, order, torch.arange(len(flat), device=flat.device))
    return (own + (before - first)[flat.clamp(min=0)]).view_as(experts)


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
