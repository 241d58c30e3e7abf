"""The loss of a language model: -log softmax(logits)[target].

B batch, T tokens, V vocabulary.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64
from torch import Tensor

from shardfn.collectives import axis_size, pmax, psum
from shardfn.core import Axes

from ._layers import rank_classes, rank_index


def cross_entropy(
    logits_BTV: Float[Tensor, "b t v"],
    targets_BT: Int64[Tensor, "b t"],
    *,
    ignore_index: int = -100,
    axis: Axes = None,
    vocab_size: int | None = None,
) -> Float[Tensor, ""]:
    """Returns the mean over the counted targets, or 0 without counted targets.

    Args:
        logits_BTV: unnormalised logits. 16-bit logits are summed in float32. With `axis`, the rank's classes.
        targets_BT: classes in [0, V), or `ignore_index`.
        ignore_index: target without a loss, such as padding.
        axis: mesh axes along which V is cut. None means a single device.
        vocab_size: V, needed where the axis has several ranks.

    Example:
        >>> round(cross_entropy(torch.zeros(1, 2, 8), torch.tensor([[3, -100]])).item(), 4)
        2.0794
    """
    total, count = cross_entropy_sum(
        logits_BTV, targets_BT, ignore_index=ignore_index, axis=axis, vocab_size=vocab_size
    )
    return total / count.clamp(min=1)


def cross_entropy_sum(
    logits_BTV: Float[Tensor, "b t v"],
    targets_BT: Int64[Tensor, "b t"],
    *,
    ignore_index: int = -100,
    axis: Axes = None,
    vocab_size: int | None = None,
) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
    """Returns the sum over the counted targets, and the number of counted targets.

    For means over ranks with unequal numbers of tokens.

    With `axis` no rank has all logits: three numbers a token cross the mesh, a maximum, a sum and the target's logit.

    Args:
        logits_BTV: unnormalised logits. 16-bit logits are summed in float32. With `axis`, the rank's classes.
        targets_BT: classes in [0, V), or `ignore_index`.
        ignore_index: target without a loss, such as padding.
        axis: mesh axes along which V is cut. None means a single device.
        vocab_size: V, needed where the axis has several ranks.

    Returns:
        (total, count), 0-d, both of the dtype of the sum.

    Example:
        >>> total, count = cross_entropy_sum(torch.zeros(1, 2, 8), torch.tensor([[3, -100]]))
        >>> count.item()
        1.0
    """
    wide = logits_BTV.float() if logits_BTV.dtype in (torch.float16, torch.bfloat16) else logits_BTV
    if axis_size(axis) > 1:
        loss_BT = _vocab_parallel(wide, targets_BT, ignore_index, axis, vocab_size)
        counts = targets_BT != ignore_index
        return loss_BT.masked_fill(~counts, 0.0).sum(), counts.sum().to(loss_BT.dtype)
    total = F.cross_entropy(wide.flatten(0, 1), targets_BT.flatten(), ignore_index=ignore_index, reduction="sum")
    return total, (targets_BT != ignore_index).sum().to(total.dtype)


def _vocab_parallel(
    logits_BTV: Tensor, targets_BT: Tensor, ignore_index: int, axis: Axes, vocab_size: int | None
) -> Tensor:
    """Returns the loss log sum exp(logits) - logits[target], of blocks of the classes, invariant along `axis`."""
    start, stop, size = rank_classes("cross_entropy: logits_BTV", logits_BTV.shape[-1], vocab_size, axis)
    own_BT = logits_BTV.logsumexp(-1)
    top_BT = pmax(own_BT.detach(), axis)  # a shift without an effect on the result
    if start == stop:
        hit_BT = logits_BTV.sum(-1)
    else:
        index, missing = rank_index(targets_BT.masked_fill(targets_BT == ignore_index, 0), start, stop, size)
        hit_BT = logits_BTV.gather(-1, index[..., None])[..., 0].masked_fill(missing, 0.0)
    total_BT, hit_BT = psum(torch.stack([(own_BT - top_BT).exp(), hit_BT]), axis).unbind()
    return total_BT.log() + top_BT - hit_BT


def next_tokens(tokens_BT: Int64[Tensor, "b t"], *, ignore_index: int = -100) -> Int64[Tensor, "b t"]:
    """Returns the targets of a language model: each token's successor. The target of the last token does not count.

    Args:
        tokens_BT: whole sequences. Cut sequences along T only after the shift.
        ignore_index: target without a loss, such as padding.

    Example:
        >>> next_tokens(torch.tensor([[5, 6, 7]])).tolist()
        [[6, 7, -100]]
    """
    return torch.cat((tokens_BT[:, 1:], torch.full_like(tokens_BT[:, :1], ignore_index)), dim=1)
