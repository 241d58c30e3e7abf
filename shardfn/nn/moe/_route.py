"""Routers: functions from logits to the experts of each token, by the published rules.

    top_k         the k most probable experts (Mixtral, Qwen3-MoE, OLMoE)
    switch_top1   the most probable expert, the probability as weight (Switch Transformer)
    gshard_top2   the most probable expert, and a second expert by noise (GShard)

Where scores are equal, the lower index wins. A token's experts depend only on the token's logits.

S tokens of the rank, K choices of a token, E experts.
"""

from typing import Literal

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from ._choice import choice, scaled, softmax_of, taken, where_chosen
from ._logits import check_k, wide_logits
from ._noise import check_index, gumbel
from ._routing import Routing


def top_k(
    logits: Float[Tensor, "s e"],
    k: int,
    *,
    softmax: Literal["before", "after"] = "before",
    renormalise: bool = True,
    scale: float = 1.0,
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
        softmax: whether weights are probabilities among all experts, or among the chosen ones.
        renormalise: whether a token's weights are divided by the sum of the weights.
        scale: a factor of the weights.
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
    check_k(k, logits.shape[-1], name)
    if softmax not in ("before", "after"):
        raise ValueError(f'{name}: softmax={softmax!r}. Take "before" the choice (Mixtral), or "after" it.')
    wide = wide_logits(logits, mask, name)
    probs = softmax_of(wide, batch_invariant)
    experts = choice(wide, k, mask, chosen, name)
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
