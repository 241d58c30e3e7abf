"""Losses for equally busy experts of a router, and for small logits.

With `axes` the losses are over the whole batch, without `axes` over a rank's rows. Pass a routing before a capacity
drops choices.

S tokens of the rank, K choices of a token, E experts.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from shardfn.collectives import psum, pvary
from shardfn.core import Axes

from ._routing import Routing, as_shares, counts_of


def switch(routing: Routing, *, axes: Axes = None, mask: Bool[Tensor, " s"] | None = None) -> Float[Tensor, ""]:
    """Returns E sum_e f_e p_e: 1 where experts are equally busy.

    f_e is the share of the choices of expert e, a constant, and p_e the expert's mean score, with the gradient. For
    example all tokens on a single expert of 8 with probability 1 give 8. A token's scores are divided by their sum,
    equal to 1 except for sigmoids.

    Args:
        routing: routing of the rank's tokens, before a capacity.
        axes: axes of the batch: f and p cover all ranks' tokens, in a message of 2 E + 1 numbers. None: f and p cover
            the rank's tokens, and a step averages the losses over the ranks.
        mask: counted tokens. None: the tokens with an expert, so all except padding.

    Example:
        >>> from shardfn.nn import moe
        >>> logits = torch.tensor([[2.0, 1, 0, -1], [3, 0, 0, 0.5], [0, 2, 1, -2], [1, 0.5, 0, 2]])
        >>> round(moe.balance.switch(moe.top_k(logits, 2)).item(), 6)
        1.167847

    References:
        Fedus et al., Switch Transformers, 2021, https://arxiv.org/abs/2101.03961
    """
    return _balance_products(routing, routing.experts, axes, mask).mean()


def gshard(routing: Routing, *, axes: Axes = None, mask: Bool[Tensor, " s"] | None = None) -> Float[Tensor, ""]:
    """Returns the loss `switch` with the shares of only each token's first choice.

    Args:
        routing: see `switch`, with choices in order.
        axes: see `switch`.
        mask: see `switch`.

    Example:
        >>> from shardfn.nn import moe
        >>> logits = torch.tensor([[2.0, 1, 0], [3, 0, 0], [0, 2, 1], [1, 0.5, 0], [0, 0, 4], [2, 2.5, 0]])
        >>> round(gshard(moe.gshard_top2(logits)).item(), 6)
        1.080701

    References:
        Lepikhin et al., GShard, 2020, https://arxiv.org/abs/2006.16668
    """
    return _balance_products(routing, routing.experts[:, :1], axes, mask).mean()


def mixtral(
    routing: Routing | Sequence[Routing], *, axes: Axes = None, mask: Bool[Tensor, " s"] | None = None
) -> Float[Tensor, ""]:
    """Returns the loss of `transformers`: k times the loss `switch`, so k where experts are equally busy.

    The tokens of several layers are joined before the product. So the loss is not the mean of the layers' losses:
    experts of the same number in different layers even each other out.

    Args:
        routing: routing of a layer as in `switch`, or routings of several layers, with equal numbers of tokens, experts
            and choices.
        axes: see `switch`.
        mask: mask of a layer as in `switch`.

    Example:
        >>> from shardfn.nn import moe
        >>> logits = torch.tensor([[2.0, 1, 0, -1], [3, 0, 0, 0.5], [0, 2, 1, -2], [1, 0.5, 0, 2]])
        >>> layers = [moe.top_k(logits, 2), moe.top_k(logits.flip(1), 2)]
        >>> round(mixtral(layers[0]).item(), 4), round(mixtral(layers).item(), 4)
        (2.3357, 2.1213)
    """
    layers = [routing] if isinstance(routing, Routing) else list(routing)
    joined = Routing(*(torch.cat(x) for x in zip(*layers, strict=True)))
    return joined.experts.shape[1] * switch(joined, axes=axes, mask=None if mask is None else mask.repeat(len(layers)))


def sequence(
    routing: Routing,
    num_sequences: int,
    *,
    axes: Axes = None,
    batch_axes: Axes = None,
    mask: Bool[Tensor, " s"] | None = None,
) -> Float[Tensor, ""]:
    """Returns the mean over sequences of E sum_e f_e p_e, with f and p of the tokens of a single sequence.

    Args:
        routing: routing of the tokens of sequences of equal length, in order, before a capacity.
        num_sequences: number of sequences, 0 on a rank without rows.
        axes: axes along which sequences are cut, not the batch. None: the rank has whole sequences.
        batch_axes: axes along which the batch is cut: the mean is over the sequences of all ranks. Ranks may have
            different numbers of sequences, for example 4 and 2. None: the rank's sequences, and 0 without sequences.
        mask: counted tokens, as in `switch`. A sequence without a counted token has the loss 0, and counts in the mean.

    Raises:
        ValueError: the tokens are not `num_sequences` sequences of equal length.

    Example:
        >>> from shardfn.nn import moe
        >>> logits = torch.tensor([[2.0, 1, 0, -1], [3, 0, 0, 0.5], [0, 2, 1, -2], [1, 0.5, 0, 2]])
        >>> routing = moe.sigmoid_groups(logits, 2, bias=torch.tensor([0, 0.3, 0, -0.1]))
        >>> round(sequence(routing, 1).item(), 6)
        1.075297

    References:
        DeepSeek-AI, DeepSeek-V3 Technical Report, 2024, https://arxiv.org/abs/2412.19437
    """
    S = len(routing.experts)
    if S % num_sequences if num_sequences > 0 else S or num_sequences:
        raise ValueError(
            f"sequence: {S} tokens are not those of num_sequences={num_sequences} sequences of one length. Pass the"
            " number of rows of the batch that was flattened to tokens."
        )
    each = _balance_products(routing, routing.experts, axes, mask, num_sequences)
    total, number = summed_over(torch.stack([each.sum(), each.new_tensor(num_sequences)]), batch_axes).unbind()
    return total / number.clamp(min=1)


def z(routing: Routing, *, axes: Axes = None, mask: Bool[Tensor, " s"] | None = None) -> Float[Tensor, ""]:
    """Returns the mean over tokens of logsumexp(logits)^2, a loss for small logits.

    Args:
        routing: see `switch`.
        axes: axes of the batch, as in `switch`. The mean of the rank's rows is the same where ranks have equal numbers
            of tokens.
        mask: see `switch`.

    Example:
        >>> from shardfn.nn import moe
        >>> logits = torch.tensor([[2.0, 1, 0, -1], [3, 0, 0, 0.5], [0, 2, 1, -2], [1, 0.5, 0, 2]])
        >>> round(z(moe.top_k(logits, 2)).item(), 5)
        7.08027

    References:
        Zoph et al., ST-MoE, 2022, https://arxiv.org/abs/2202.08906
    """
    counted = _count_mask(routing, mask)
    squares = torch.where(counted, routing.logits.logsumexp(-1).square(), 0.0)
    total, tokens = summed_over(torch.stack([squares.sum(), counted.sum().to(squares.dtype)]), axes).unbind()
    return total / tokens.clamp(min=1)


def _balance_products(routing: Routing, experts: Tensor, axes: Axes, mask: Tensor | None, parts: int = 1) -> Tensor:
    """Returns [parts]: E sum_e f_e p_e of equal parts of the tokens, with the shares f of the given choices."""
    f, p = _expert_shares(routing, experts, _count_mask(routing, mask), axes, parts)
    return routing.num_experts * (f * p).sum(-1)


def _expert_shares(routing: Routing, experts: Tensor, counted: Tensor, axes: Axes, parts: int) -> tuple[Tensor, Tensor]:
    """Returns [parts, E] twice: each expert's share of the choices, and mean score, over the counted tokens."""
    E, scores = routing.num_experts, as_shares(routing.probs)
    shape = parts, len(experts) // max(parts, 1)  # in numbers: torch finds no size of 0 rows
    part = torch.arange(parts, device=experts.device).repeat_interleave(shape[1])
    numbers = torch.where(counted[:, None] & (experts >= 0), part[:, None] * E + experts, -1)
    counts = counts_of(numbers, parts * E).view(parts, E).to(scores.dtype)
    sums = torch.where(counted[:, None], scores, 0.0).unflatten(0, shape).sum(1)
    tokens = counted.view(shape).sum(1, keepdim=True).to(scores.dtype)
    counts, sums, tokens = summed_over(torch.cat([counts, sums, tokens], 1), axes).split([E, E, 1], 1)
    return counts / counts.sum(1, keepdim=True).clamp(min=1), sums / tokens.clamp(min=1)


def _count_mask(routing: Routing, mask: Tensor | None) -> Tensor:
    """Returns [S]: the counted tokens."""
    if mask is not None and mask.shape != routing.experts.shape[:1]:
        raise ValueError(
            f"mask must have a bool for each of {len(routing.experts)} tokens, got shape {tuple(mask.shape)}."
        )
    return routing.routed() if mask is None else mask


def summed_over(x: Tensor, axes: Axes) -> Tensor:
    """Returns the sum over the ranks, as a part of each rank's own loss."""
    # The transpose sums the ranks' cotangents. The step's mean of the losses divides the cotangents by the number of
    # ranks: with only the sum a loss with other terms would have a gradient n times too small.
    return pvary(psum(x, axes), axes)
