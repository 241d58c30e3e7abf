"""Requirements on inputs of bodies of attention with a custom backward."""

import torch
from torch import Tensor

from ._online import OnlineScores


def narrowed(*qkv: Tensor) -> tuple[Tensor, ...]:
    """Returns queries, keys and values in the dtype of autocast, once, as forward and backward are separate."""
    kind = qkv[0].device.type
    if not torch.is_autocast_enabled(kind) or qkv[0].dtype == torch.float64:
        return qkv
    return tuple(x.to(torch.get_autocast_dtype(kind)) for x in qkv)


def refuse_gradients(how: OnlineScores) -> None:
    """Raises where data other than queries, keys and values would need a gradient.

    Raises:
        ValueError: slopes or a mask's data require a gradient.
    """
    if how.slopes_H is not None and how.slopes_H.requires_grad:
        raise ValueError("attention: slopes_H requires a gradient, which only Dense() takes. Pass slopes_H.detach().")
    wrong = [type(m).__name__ for m in how.mask.parts if any(t.requires_grad for t in m.tensors)]
    if wrong:
        raise ValueError(
            f"attention: data of the masks {', '.join(wrong)} require a gradient, which only Dense() gives; detach"
            " them, or take it."
        )
