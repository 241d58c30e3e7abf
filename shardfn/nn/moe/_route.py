"""Routers: functions from logits to the experts of each token, by the published rules.

    top_k            the k most probable experts (Mixtral, Qwen3-MoE, OLMoE)
    switch_top1      the most probable one, its probability as weight (Switch Transformer)
    gshard_top2      the most probable one, and a second one by noise (GShard)
    sigmoid_groups   scores of each expert alone, a bias in the choice, the best groups (DeepSeek-V3)

Where scores are equal, the lower index wins. A token's experts depend on its own logits alone.

S tokens of this rank, K choices of a token, E experts.
"""

from typing import Literal

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from ._logits import check_chosen, check_k, wide_logits
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
    name: str = "moe",
) -> Routing:
    """The k experts of highest probability, in order.

    Mixtral is the default; Qwen3-MoE with `norm_topk_prob=False` and OLMoE have `renormalise=False`. With
    `softmax="after"` the probabilities are those among the chosen experts, which sum to 1 by themselves. With k = 1 a
    weight that sums to 1 is constant, and the router has no gradient through it: take `switch_top1`.

    Args:
        logits: of any floating dtype; computed with in float32, or in float64.
        k: experts of a token.
        softmax: whether weights are probabilities among all experts, or among the chosen ones.
        renormalise: whether a token's weights are divided by their sum.
        scale: a factor of the weights.
        mask: False for padding, which gets no expert.
        chosen: experts to use in place of the best, such as those of an earlier routing; gradients reach the router
            through the weights as before. -1 is a choice without an expert.
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
    probs = wide.softmax(-1)
    experts = choice(wide, k, mask, chosen, name)
    if softmax == "after":
        weights = _zero_without(experts, _taken(wide, experts, torch.finfo(wide.dtype).min).softmax(-1))
    else:
        weights = _taken(probs, experts)
    return Routing(experts, scaled(weights, renormalise, scale), probs, wide)


def choice(scores: Tensor, k: int, mask: Tensor | None, chosen: Tensor | None, name: str) -> Tensor:
    """[S, K]: the k experts of highest score, or the given ones; -1 for padding."""
    if chosen is None:
        # A stable sort keeps equal scores in the order of their experts; topk promises no order.
        experts = scores.detach().sort(stable=True, dim=-1, descending=True).indices[:, :k]
    else:
        check_chosen(chosen, len(scores), k, scores.shape[-1], name)
        experts = chosen
    return experts if mask is None else torch.where(mask[:, None], experts, -1)


def scaled(weights: Tensor, renormalise: bool, scale: float) -> Tensor:
    """Weights that sum to `scale` in each row that has any, or that are multiplied by it."""
    if renormalise:
        # A row without an expert has the sum 0, and stays 0.
        weights = weights / weights.sum(-1, keepdim=True).clamp(min=torch.finfo(weights.dtype).tiny)
    return weights if scale == 1 else weights * scale


def _taken(scores: Tensor, experts: Tensor, otherwise: float = 0.0) -> Tensor:
    """[S, K]: the scores of the experts, and a constant where there is none."""
    return _zero_without(experts, scores.gather(-1, experts.clamp(min=0)), otherwise)


def _zero_without(experts: Tensor, weights: Tensor, otherwise: float = 0.0) -> Tensor:
    return torch.where(experts >= 0, weights, otherwise)
