"""Routers: functions from logits to the experts of each token, by the published rules, and their noise.

S tokens of the rank, N numbers of a token.

    top_k         the k most probable experts (Mixtral, Qwen3-MoE, OLMoE)
    switch_top1   the most probable expert, the probability as weight (Switch Transformer)
    gshard_top2   the most probable expert, and a second expert by noise (GShard)

Where scores are equal, the lower index wins. A token's experts depend only on the token's logits.

S tokens of the rank, K choices of a token, E experts.
"""

from collections.abc import Sequence
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int64, Num
from torch import Tensor

from shardfn.core import fold_in, threefry2x32
from shardfn.nn import batch_invariant_sigmoid

from ._routing import Routing, best, check_k, choice, scaled, softmax_of, taken, where_chosen, wide_logits


def token_numbers(
    index_B: Int64[Tensor, " b"], length: int, own: Sequence[tuple[int, int]] | None = None
) -> Int64[Tensor, " s"]:
    """Returns the number of each token of a rank among the tokens of all samples, in the order of `x.flatten(0, 1)`.

    Args:
        index_B: global number of each sample.
        length: tokens of a whole sequence.
        own: range (start, stop) of each stretch of the sequence on the rank, in order, from `nn.shard_rows`. None: all
            tokens.

    Example:
        >>> token_numbers(torch.tensor([4, 5]), 10, own=[(0, 1), (8, 10)]).tolist()
        [40, 48, 49, 50, 58, 59]
    """
    stretches = [(0, length)] if own is None else own
    at_T = torch.cat([torch.arange(start, stop, device=index_B.device) for start, stop in stretches])
    return (index_B[:, None] * length + at_T).flatten()


def jitter(
    key: Int64[Tensor, "2"], x: Float[Tensor, "s d"], rate: float, index: Int64[Tensor, " s"]
) -> Float[Tensor, "s d"]:
    """Multiplies each element by a uniform number in [1 - rate, 1 + rate): the noise of a router's input.

    Args:
        key: key for the layer and step.
        x: tokens of the rank, before the router's product.
        rate: rate in [0, 1), such as 0.01.
        index: global number of each token, from `token_numbers`.

    Raises:
        ValueError: the rate does not lie in [0, 1), or `index` has another number of tokens.

    Example:
        >>> from shardfn.core import key
        >>> x, index = torch.ones(4, 3), torch.arange(4)
        >>> torch.equal(jitter(key(0), x, 0.01, index)[2:], jitter(key(0), x[2:], 0.01, index[2:]))
        True

    References:
        Fedus et al., Switch Transformers, 2021, https://arxiv.org/abs/2101.03961
    """
    if not 0 <= rate < 1:
        raise ValueError(f"jitter: the rate must be in [0, 1), got rate={rate}. Factors are in [1 - rate, 1 + rate).")
    check_index("jitter", key, index, len(x))
    words = words_of(key, index, torch.arange(x.shape[1], device=x.device))
    return x * (1 - rate + 2 * rate * _unit_uniform(words)).to(x.dtype)


def gumbel(key: Tensor, index: Tensor, num: int) -> Tensor:
    """Returns [S, N] of float32: Gumbel noise, finite everywhere."""
    # Half a step from both ends, so neither logarithm is infinite.
    unit = _unit_uniform(words_of(key, index, torch.arange(num, device=index.device))) + 2.0**-24
    return -(-unit.log()).log()


def words_of(key: Tensor, index: Tensor, counter: Tensor) -> Tensor:
    """Returns [S, N] of int64 in [0, 2**24): random words of each token's counters, [N] or [S, N]."""
    hi, lo = threefry2x32(fold_in(key.to(index.device), index)[:, None], counter)
    return ((hi ^ lo) >> 8).long() & 0xFFFFFF


def check_index(who: str, key: Tensor | None, index: Tensor | None, size: int) -> None:
    """Raises for noise for tokens without numbers, and for numbers without matching tokens.

    Raises:
        ValueError: a key is given without an index, or the index has another shape.
    """
    if key is not None and index is None:
        raise ValueError(
            f"{who}: noise of a key needs the tokens' global numbers, or ranks would draw the same for different"
            " tokens: pass index=moe.token_numbers(index_B, T)."
        )
    if index is not None and index.shape != (size,):
        raise ValueError(f"{who}: index must have a number for each of {size} tokens, got shape {tuple(index.shape)}.")


def _unit_uniform(words: Tensor) -> Tensor:
    """Returns numbers in [0, 1) in float32, of 23 bits."""
    return (words >> 1).to(torch.float32) * 2.0**-23


def top_k(
    logits: Float[Tensor, "s e"],
    k: int,
    *,
    softmax: Literal["before", "after"] = "before",
    renormalise: bool = True,
    scale: float = 1.0,
    groups: int = 1,
    groups_kept: int = 1,
    mask: Bool[Tensor, " s"] | None = None,
    chosen: Int64[Tensor, "s k"] | None = None,
    batch_invariant: bool = False,
    name: str = "moe",
) -> Routing:
    """Returns the k experts of highest probability, in order.

    Mixtral is the default. Qwen3-MoE with `norm_topk_prob=False` and OLMoE have `renormalise=False`. With
    `softmax="after"` weights are probabilities among the chosen experts, with the sum 1 anyway. With k = 1 a weight of
    sum 1 is constant, and the router has no gradient through the weight: take `switch_top1`.

    Args:
        logits: logits of any floating dtype, computed in float32, or in float64.
        k: experts of a token.
        softmax: whether weights are probabilities among all experts, or among the chosen experts.
        renormalise: whether a token's weights are divided by the sum of the weights.
        scale: a factor of the weights.
        groups: number of groups of neighbouring experts, as in DeepSeek-V2.
        groups_kept: groups of a token's experts: the groups with the best experts.
        mask: False for padding, without an expert.
        chosen: experts in place of the best, such as from an earlier routing (routing replay). Gradients reach the
            router through the weights as before. -1 is a choice without an expert.
        batch_invariant: whether a token's weights have the same bits next to any other tokens, on every processor, for
            float32 or float64.
        name: the layer, in errors.

    Raises:
        ValueError: k does not lie in 1 .. E, logits of a token are not finite, or `mask` or `chosen` do not fit.

    Example:
        >>> routing = top_k(torch.tensor([[2.0, 1, 0, -1], [3, 0, 0, 0.5]]), 2)
        >>> routing.experts.tolist()
        [[0, 1], [0, 3]]
        >>> routing.weights
        tensor([[0.7311, 0.2689],
                [0.9241, 0.0759]])

    References:
        Jiang et al., Mixtral of Experts, 2024, https://arxiv.org/abs/2401.04088
    """
    _check_groups(k, logits.shape[-1], groups, groups_kept, name)
    if softmax not in ("before", "after"):
        raise ValueError(f'{name}: softmax={softmax!r}. Use "before" the choice (Mixtral), or "after" it.')
    wide = wide_logits(logits, mask, name)
    probs = softmax_of(wide, batch_invariant)
    experts = choice(_keep_best_groups(wide, groups, groups_kept, best_of=1), k, mask, chosen, name)
    if softmax == "after":
        weights = where_chosen(experts, softmax_of(taken(wide, experts, torch.finfo(wide.dtype).min), batch_invariant))
        renormalise = False  # with sum 1
    else:
        weights = taken(probs, experts)
    return Routing(experts, scaled(weights, renormalise, scale, batch_invariant), probs, wide)


def switch_top1(
    logits: Float[Tensor, "s e"],
    *,
    key: Int64[Tensor, "2"] | None = None,
    index: Int64[Tensor, " s"] | None = None,
    mask: Bool[Tensor, " s"] | None = None,
    chosen: Int64[Tensor, "s 1"] | None = None,
    batch_invariant: bool = False,
    name: str = "moe",
) -> Routing:
    """Returns the most probable expert, with the probability as weight. The router has a gradient through the weight.

    With a key the expert is drawn by probability (DeepSpeed's "RSample": the largest logit with Gumbel noise). The
    weight comes from the logits without noise.

    Args:
        logits: see `top_k`.
        key: key for the layer and step. None: no noise.
        index: global number of each token, for the noise, from `token_numbers`.
        mask: see `top_k`.
        chosen: see `top_k`.
        batch_invariant: see `top_k`.
        name: the layer, in errors.

    Raises:
        ValueError: as `top_k`, or a key without an index.

    Example:
        >>> routing = switch_top1(torch.tensor([[2.0, 1, 0], [0, 0, 4]]))
        >>> routing.experts.tolist(), routing.weights
        ([[0], [2]], tensor([[0.6652],
                [0.9647]]))

    References:
        Fedus et al., Switch Transformers, 2021, https://arxiv.org/abs/2101.03961
    """
    check_index(name, key, index, len(logits))
    wide = wide_logits(logits, mask, name)
    experts = choice(_add_noise(wide, key, index), 1, mask, chosen, name)
    probs = softmax_of(wide, batch_invariant)
    return Routing(experts, taken(probs, experts), probs, wide)


def gshard_top2(
    logits: Float[Tensor, "s e"],
    *,
    key: Int64[Tensor, "2"] | None = None,
    index: Int64[Tensor, " s"] | None = None,
    mask: Bool[Tensor, " s"] | None = None,
    chosen: Int64[Tensor, "s 2"] | None = None,
    batch_invariant: bool = False,
    name: str = "moe",
) -> Routing:
    """Returns the most probable expert and a second expert. Weights are probabilities, divided by their sum.

    With a key the second is drawn among the other experts by probability. Without a key the second is the next best
    expert.

    Args:
        logits: see `top_k`, of at least two experts.
        key: key for the layer and step. None: no noise.
        index: global number of each token, for the noise, from `token_numbers`.
        mask: see `top_k`.
        chosen: see `top_k`.
        batch_invariant: see `top_k`.
        name: the layer, in errors.

    Raises:
        ValueError: as `top_k`, or a key without an index.

    Example:
        >>> from shardfn.core import key
        >>> logits = torch.tensor([[2.0, 1, 0], [0, 0, 4]])
        >>> gshard_top2(logits).experts.tolist()
        [[0, 1], [2, 0]]
        >>> gshard_top2(logits, key=key(0), index=torch.arange(2)).experts[:, 0].tolist()
        [0, 2]

    References:
        Lepikhin et al., GShard, 2020, https://arxiv.org/abs/2006.16668
    """
    check_k(2, logits.shape[-1], name)
    check_index(name, key, index, len(logits))
    wide = wide_logits(logits, mask, name)
    first = choice(wide, 1, None, None, name)
    # The first has the highest score of all, so noise does not change the first.
    scores = _add_noise(wide, key, index).scatter(-1, first, torch.inf)
    experts = choice(scores, 2, mask, chosen, name)
    probs = softmax_of(wide, batch_invariant)
    return Routing(experts, scaled(taken(probs, experts), True, 1.0, batch_invariant), probs, wide)


def _add_noise(logits: Tensor, key: Tensor | None, index: Tensor | None) -> Tensor:
    if key is None:
        return logits
    assert index is not None  # checked
    return logits.detach() + gumbel(key, index, logits.shape[-1])


def sigmoid_groups(
    logits: Float[Tensor, "s e"],
    k: int,
    bias: Float[Tensor, " e"] | None = None,
    groups: int = 1,
    groups_kept: int = 1,
    scale: float = 1.0,
    *,
    renormalise: bool = True,
    mask: Bool[Tensor, " s"] | None = None,
    chosen: Int64[Tensor, "s k"] | None = None,
    batch_invariant: bool = False,
    name: str = "moe",
) -> Routing:
    """Returns the k experts of highest sigmoid(logit) + bias, among the experts of the best groups.

    The bias takes part in the choice and never in a weight, and has no gradient: `bias_update` moves the bias. A group
    is E / groups neighbouring experts, for example 256 / 8 = 32, and the group's score is the sum of the two best
    scores.

    Args:
        logits: see `top_k`.
        k: experts of a token.
        bias: added to the scores for the choice. None: 0.
        groups: number of groups.
        groups_kept: groups of a token's experts.
        scale: factor of the weights, such as 2.5 in DeepSeek-V3.
        renormalise: whether a token's weights are divided by the sum of the weights.
        mask: see `top_k`.
        chosen: see `top_k`.
        batch_invariant: see `top_k`.
        name: the layer, in errors.

    Raises:
        ValueError: as `top_k`, or the groups do not divide the experts, or the kept groups have fewer than k experts.

    Example:
        >>> logits = torch.tensor([[0.0, 2, 1, -2], [1, 0.5, 0, 2]])
        >>> sigmoid_groups(logits, 2, bias=torch.tensor([0, 0.3, 0, -0.1])).experts.tolist()
        [[1, 2], [1, 3]]

    References:
        DeepSeek-AI, DeepSeek-V3 Technical Report, 2024, https://arxiv.org/abs/2412.19437
    """
    E = logits.shape[-1]
    _check_groups(k, E, groups, groups_kept, name)
    if bias is not None and bias.shape != (E,):
        raise ValueError(f"{name}: bias must have a number for each of {E} experts, got shape {tuple(bias.shape)}.")
    wide = wide_logits(logits, mask, name)
    scores = batch_invariant_sigmoid(wide) if batch_invariant else wide.sigmoid()
    biased = scores.detach() if bias is None else scores.detach() + bias.detach().to(scores.dtype)
    experts = choice(_keep_best_groups(biased, groups, groups_kept), k, mask, chosen, name)
    return Routing(experts, scaled(taken(scores, experts), renormalise, scale, batch_invariant), scores, wide)


def _keep_best_groups(scores: Tensor, groups: int, kept: int, best_of: int = 2) -> Tensor:
    """Returns the scores, and -inf for experts outside of each token's best groups."""
    if kept == groups:
        return scores
    grouped = scores.unflatten(-1, (groups, -1))
    sums = grouped.detach().topk(min(best_of, grouped.shape[-1]), -1).values.sum(-1)
    inside = torch.zeros_like(sums, dtype=torch.bool).scatter(-1, best(sums, kept), True)
    return torch.where(inside[..., None], grouped, -torch.inf).flatten(1)


def _check_groups(k: int, num_experts: int, groups: int, kept: int, name: str) -> None:
    check_k(k, num_experts, name)
    if groups < 1 or num_experts % groups or not 1 <= kept <= groups:
        raise ValueError(
            f"{name}: groups={groups}, groups_kept={kept} for {num_experts} experts. Groups are of one size:"
            " choose a divisor of the experts, and keep one group or more."
        )
    if kept * num_experts // groups < k:
        raise ValueError(
            f"{name}: k={k} choices, but {kept} of {groups} groups have {kept * num_experts // groups} of the"
            f" {num_experts} experts. Keep more groups, or choose fewer experts."
        )


def bias_update(
    bias: Float[Tensor, "*layers e"], counts: Num[Tensor, "*layers e"], rate: float, *, centred: bool = False
) -> Float[Tensor, "*layers e"]:
    """Moves each bias by `rate`, up where the expert has fewer choices than the mean, down where it has more.

    The result is bias + rate * sign(mean count - count). For example counts [3, 1, 2] move the biases by -rate, +rate
    and 0.

    Call `bias_update` once a step with the counts of the whole batch: sums over ranks and microbatches.

    Args:
        bias: biases of `sigmoid_groups`, of a layer or several layers. Biases are part of the model's state, and no
            parameters.
        counts: choices of each expert.
        rate: 0.001 in DeepSeek-V3.
        centred: whether the mean of the moves is subtracted, so that the mean of the biases stays (torchtitan).

    Example:
        >>> import torch
        >>> bias_update(torch.zeros(4), torch.tensor([2, 4, 1, 1]), 0.5)
        tensor([ 0.0000, -0.5000,  0.5000,  0.5000])

    References:
        Wang et al., Auxiliary-Loss-Free Load Balancing Strategy, 2024, https://arxiv.org/abs/2408.15664
    """
    # In whole numbers, so a count equal to the mean is found equal.
    move = (counts.sum(-1, keepdim=True) - counts.shape[-1] * counts).sign().to(bias.dtype)
    return bias + rate * (move - move.mean(-1, keepdim=True) if centred else move)
