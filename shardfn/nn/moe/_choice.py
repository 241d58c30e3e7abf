"""Choice of experts by scores, and the weights of the choices.

S tokens of the rank, K choices of a token, E experts.
"""

import torch
from torch import Tensor

from shardfn.nn._batch_invariant_scores import batch_invariant_softmax, batch_invariant_sum

from ._logits import check_chosen


def choice(scores: Tensor, k: int, mask: Tensor | None, chosen: Tensor | None, name: str) -> Tensor:
    """Returns [S, K]: the k experts of highest score, or the given experts, or -1 for padding."""
    if chosen is None:
        experts = best(scores.detach(), k)
    else:
        check_chosen(chosen, len(scores), k, scores.shape[-1], name)
        experts = chosen
    return experts if mask is None else torch.where(mask[:, None], experts, -1)


def best(scores: Tensor, k: int) -> Tensor:
    """Returns [S, K]: the k highest scores of each row, in falling order, and equal scores in the order of experts.

    At least k scores of a row are above -inf. torch's `topk` promises no order of equal scores. `argmax` takes the
    first of equal scores, so a round of `argmax` finds each choice. A stable sort gives the same. On a single core the
    sort costs about 4 log2(E) ns a score, and a round 2 ns.
    """
    if k > scores.shape[-1].bit_length() + 1:
        return scores.sort(stable=True, dim=-1, descending=True).indices[..., :k]
    found = list[Tensor]()
    for _ in range(k):
        found.append(scores.argmax(-1, keepdim=True))
        scores = scores.scatter(-1, found[-1], -torch.inf)
    return torch.cat(found, -1)


def softmax_of(logits: Tensor, batch_invariant: bool) -> Tensor:
    """Returns the softmax over the last dim. `batch_invariant` gives a row the same bits next to any other rows."""
    return batch_invariant_softmax(logits) if batch_invariant else logits.softmax(-1)


def scaled(weights: Tensor, renormalise: bool, scale: float, batch_invariant: bool = False) -> Tensor:
    """Returns weights with the sum `scale` in each nonempty row, or multiplied by `scale`."""
    if renormalise:
        # A row without an expert has the sum 0, and stays 0.
        total = batch_invariant_sum(weights) if batch_invariant else weights.sum(-1, keepdim=True)
        weights = weights / total.clamp(min=torch.finfo(weights.dtype).tiny)
    return weights if scale == 1 else weights * scale


def taken(scores: Tensor, experts: Tensor, otherwise: float = 0.0) -> Tensor:
    """Returns [S, K]: the scores of the experts, and a constant where a choice has no expert."""
    return where_chosen(experts, scores.gather(-1, experts.clamp(min=0)), otherwise)


def where_chosen(experts: Tensor, weights: Tensor, otherwise: float = 0.0) -> Tensor:
    """Returns the weights, and a constant where a choice has no expert."""
    return torch.where(experts >= 0, weights, otherwise)
