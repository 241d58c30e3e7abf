"""What routers share: the result, the checks of logits, the choice of the best experts, and weights of the choices.

S tokens, k choices of each, E experts.
"""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from shardfn._torch import FakeTensor, check_tensor_all, is_batched
from shardfn.collectives import current_mesh
from shardfn.nn import batch_invariant_softmax, batch_invariant_sum


class Routing(NamedTuple):
    """Experts of each token. A tree of tensors, to be saved, cut along S or passed to other ranks.

    Attributes:
        experts: [S, K] of int64, or -1 where a choice has no expert: of a padding token, or dropped by a capacity.
        weights: factors of the outputs of experts, [S, K], or 0 where there is no expert.
        probs: [S, E], the router's scores of all experts.
        logits: logits [S, E] of the computation, in float32 or float64, and 0 in rows of padding.

    Example:
        >>> from shardfn.nn import moe
        >>> routing = moe.top_k(torch.tensor([[2.0, 1, 0], [0, 0, 4]]), 1)
        >>> routing.experts.tolist(), routing.counts().tolist(), routing.num_experts
        ([[0], [2]], [1, 0, 1], 3)
    """

    experts: Int64[Tensor, "s k"]
    weights: Float[Tensor, "s k"]
    probs: Float[Tensor, "s e"]
    logits: Float[Tensor, "s e"]

    @property
    def num_experts(self) -> int:
        """Returns E, including experts without a token."""
        return self.probs.shape[-1]

    def counts(self) -> Int64[Tensor, " e"]:
        """Returns the number of choices of each expert."""
        return counts_of(self.experts, self.num_experts)

    def routed(self) -> Bool[Tensor, " s"]:
        """Returns the tokens with an expert: before a capacity drops choices, all except padding."""
        return (self.experts >= 0).any(-1)


def counts_of(experts: Tensor, num_experts: int) -> Tensor:
    """Returns [E] of int64: how often each expert occurs among indices of any shape. -1 is not counted."""
    flat = experts.flatten()
    # Indices of no expert fall in a last place that is cut off: shapes then do not depend on the data.
    place = torch.where(flat < 0, num_experts, flat)
    return place.new_zeros(num_experts + 1).scatter_add(0, place, torch.ones_like(place))[:num_experts]


def as_shares(scores: Tensor) -> Tensor:
    """Returns [S, E]: scores divided by the sum, as sigmoids do not sum to 1."""
    return scores / scores.sum(-1, keepdim=True).clamp(min=torch.finfo(scores.dtype).tiny)


def wide_logits(logits: Tensor, mask: Tensor | None, name: str) -> Tensor:
    """Returns the logits in float32, or float64 logits in float64.

    Rows of padding become 0, whatever the numbers.

    Raises:
        ValueError: the logits are not [tokens, experts], a counted row is not finite, or the mask does not fit.
    """
    if logits.ndim != 2:
        raise ValueError(
            f"{name}: logits must be [S, E], a row for each token, got shape {tuple(logits.shape)}. Pass"
            " logits.flatten(0, -2), and route the tokens x.flatten(0, -2)."
        )
    wide = logits if logits.dtype == torch.float64 else logits.float()
    if mask is not None:
        _check_mask(mask, logits, name)
        wide = torch.where(mask[:, None], wide, 0.0)
    check_finite(wide, name, "logits")
    return wide


def check_finite(x: Tensor, name: str, noun: str = "weights") -> None:
    """Raises for infinite or NaN numbers of a router, also in a captured step, but not under vmap.

    Args:
        x: [S, ...] of tokens.
        name: the layer.
        noun: the numbers.

    Raises:
        ValueError: some numbers are not finite. The message has the layer, the rank and the number of tokens.

    Example:
        >>> check_finite(torch.ones(3, 2), "layers.0")
    """
    rows = (~x.detach().isfinite()).any(-1).sum()
    if is_batched(rows):
        return  # vmap has no branch on a value
    if isinstance(rows, FakeTensor):
        # Each rank captures a separate graph. In a graph a message is a constant, without a number of rows.
        check_tensor_all(rows == 0, lambda: _not_finite(noun, "some", name + _describe_rank()))
        return
    if rows != 0:
        raise ValueError(_not_finite(noun, f"{int(rows)} of {len(x)}", name + _describe_rank()))


def refuse(wrong: Tensor, text: str) -> None:
    """Raises where a number is not 0, also in a captured step, but not under vmap: vmap has no branch on a value.

    Raises:
        ValueError: with the text.
    """
    if isinstance(wrong, FakeTensor):
        check_tensor_all(wrong == 0, lambda: text)
    elif not is_batched(wrong) and wrong != 0:
        raise ValueError(text)


def _not_finite(noun: str, rows: str, where: str) -> str:
    return (
        f"{where}: the router's {noun} are not finite in {rows} tokens, so that their experts would be arbitrary. Look"
        " for the first activation or parameter that is not finite: a learning rate that is too high, or activations"
        " beyond the range of float16."
    )


def _describe_rank() -> str:
    mesh = current_mesh()
    at = ", ".join(f"{axis} {i}" for axis, i in mesh.coords.items()) if mesh.size > 1 else ""
    return f" (on the rank at {at})" if at else ""


def _check_mask(mask: Tensor, logits: Tensor, name: str) -> None:
    if mask.shape != logits.shape[:1] or mask.dtype != torch.bool:
        raise ValueError(
            f"{name}: mask is {mask.dtype} of shape {tuple(mask.shape)} for {len(logits)} tokens. Give each token a"
            " bool, False for padding: mask.flatten() of [B, T]."
        )


def check_k(k: int, num_experts: int, name: str) -> None:
    """Raises for a number of choices not allowed by the experts.

    Raises:
        ValueError: k is less than 1, or more than the number of experts.
    """
    if not 1 <= k <= num_experts:
        raise ValueError(
            f"{name}: k must be from 1 to {num_experts}, the number of experts, as a token takes each expert at most"
            f" once, got k={k}."
        )


def check_chosen(chosen: Tensor, size: int, k: int, num_experts: int, name: str) -> None:
    """Raises for a replayed choice of the wrong shape, dtype or expert.

    Args:
        chosen: a number for each choice of each token.
        size: S.
        k: choices of a token.
        num_experts: E.
        name: begins the message.

    Raises:
        ValueError: another shape or dtype, or an unknown expert.

    Example:
        >>> check_chosen(torch.tensor([[0, 1], [-1, -1]]), 2, 2, 4, "router")
    """
    if chosen.shape != (size, k) or chosen.dtype != torch.int64:
        raise ValueError(
            f"{name}: chosen is {chosen.dtype} of shape {tuple(chosen.shape)}, but {size} tokens with k={k} choices"
            f" need int64 of shape {(size, k)}: the experts of an earlier routing."
        )
    outside = ((chosen < -1) | (chosen >= num_experts)).sum()
    # In a graph a message is a constant, without a number of choices.
    num = "some" if isinstance(outside, FakeTensor) or is_batched(outside) else int(outside)
    refuse(
        outside,
        f"{name}: {num} numbers in chosen are not experts: there are {num_experts}, from 0 on, and -1 means no"
        f" expert. Replay the choices of a router of {num_experts} experts.",
    )


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
