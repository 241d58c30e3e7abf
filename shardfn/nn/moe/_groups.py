"""Router of DeepSeek-V3: each expert has a separate score, and a token's experts are in the token's best groups.

S tokens of the rank, K choices of a token, E experts.
"""

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from shardfn.nn._batch_invariant_scores import batch_invariant_sigmoid

from ._choice import best, choice, scaled, taken
from ._logits import check_k, wide_logits
from ._routing import Routing


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


def _keep_best_groups(scores: Tensor, groups: int, kept: int) -> Tensor:
    """Returns the scores, and -inf for experts outside of each token's best groups."""
    if kept == groups:
        return scores
    grouped = scores.unflatten(-1, (groups, -1))
    sums = grouped.topk(min(2, grouped.shape[-1]), -1).values.sum(-1)
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
