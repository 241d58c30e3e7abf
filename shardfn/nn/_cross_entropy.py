"""The loss of a language model: -log softmax(logits)[target].

B batch, T tokens, V vocabulary.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64
from torch import Tensor


def cross_entropy(
    logits_BTV: Float[Tensor, "b t v"], targets_BT: Int64[Tensor, "b t"], *, ignore_index: int = -100
) -> Float[Tensor, ""]:
    """The mean over the targets that count; 0 if none does.

    Args:
        logits_BTV: unnormalised; 16-bit logits are summed in float32.
        targets_BT: classes in [0, V), or `ignore_index`.
        ignore_index: the target that does not count.

    Example:
        >>> round(cross_entropy(torch.zeros(1, 2, 8), torch.tensor([[3, -100]])).item(), 4)
        2.0794
    """
    total, count = cross_entropy_sum(logits_BTV, targets_BT, ignore_index=ignore_index)
    return total / count.clamp(min=1)


def cross_entropy_sum(
    logits_BTV: Float[Tensor, "b t v"], targets_BT: Int64[Tensor, "b t"], *, ignore_index: int = -100
) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
    """The sum over the targets that count, and how many they are: for means over ranks with unequal numbers of tokens.

    Args:
        logits_BTV: unnormalised; 16-bit logits are summed in float32.
        targets_BT: classes in [0, V), or `ignore_index`.
        ignore_index: the target that does not count.

    Returns:
        (total, count), 0-d, both of the dtype of the sum.

    Example:
        >>> total, count = cross_entropy_sum(torch.zeros(1, 2, 8), torch.tensor([[3, -100]]))
        >>> count.item()
        1.0
    """
    wide = logits_BTV.float() if logits_BTV.dtype in (torch.float16, torch.bfloat16) else logits_BTV
    total = F.cross_entropy(wide.flatten(0, 1), targets_BT.flatten(), ignore_index=ignore_index, reduction="sum")
    return total, (targets_BT != ignore_index).sum().to(total.dtype)
