"""Normalisation over the last dim D.

Ba, Kiros, Hinton, Layer Normalization, 2016, https://arxiv.org/abs/1607.06450
Zhang, Sennrich, Root Mean Square Layer Normalization, 2019, https://arxiv.org/abs/1910.07467
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor


def layer_norm(
    x_D: Float[Tensor, "*batch d"],
    w_D: Float[Tensor, " d"],
    b_D: Float[Tensor, " d"] | None = None,
    *,
    eps: float = 1e-5,
) -> Float[Tensor, "*batch d"]:
    """Returns layer norm: w (x - mean(x)) / sqrt(var(x) + eps) + b.

    Args:
        x_D: any leading dims.
        w_D: scale. A scale with a wider dtype than x determines the dtype of the computation.
        b_D: shift, or None.
        eps: added to the variance.

    Example:
        >>> import torch
        >>> layer_norm(torch.tensor([-1.0, 1.0]), torch.ones(2), eps=0.0).tolist()
        [-1.0, 1.0]
    """
    return _apply_to_rows(w_D, lambda x_D: F.layer_norm(x_D, x_D.shape[-1:], w_D, b_D, eps), x_D)


def rms_norm(
    x_D: Float[Tensor, "*batch d"], w_D: Float[Tensor, " d"], *, eps: float = 1e-5
) -> Float[Tensor, "*batch d"]:
    """Returns the root mean square norm: w x / sqrt(mean(x^2) + eps).

    Args:
        x_D: any leading dims.
        w_D: scale. A scale with a wider dtype than x determines the dtype of the computation.
        eps: added to the mean square.

    Example:
        >>> import torch
        >>> rms_norm(torch.tensor([2.0, -2.0]), torch.ones(2), eps=0.0).tolist()
        [1.0, -1.0]
    """
    return _apply_to_rows(w_D, lambda x_D: F.rms_norm(x_D, x_D.shape[-1:], w_D, eps), x_D)


def _apply_to_rows(w_D: Tensor, norm: Callable[[Tensor], Tensor], x_D: Tensor) -> Tensor:
    """Returns `norm(x)`. Without a row, returns no row of the norm of a row of zeros.

    A rank without rows of a sequence runs the operations of the other ranks, and the rank's backward needs the same
    leaves in the same order: torch's norms of nothing may leave out the weights.
    """
    if x_D.numel():
        return _apply_in_dtype(w_D, norm, x_D)
    padded = torch.cat([x_D.reshape(0, x_D.shape[-1]), x_D.new_zeros(1, x_D.shape[-1])])
    return _apply_in_dtype(w_D, norm, padded)[:0].view(x_D.shape)


def _apply_in_dtype(w_D: Tensor, norm: Callable[[Tensor], Tensor], x_D: Tensor) -> Tensor:
    """Returns `norm(x)` in the dtype of x, computed in the dtype of the weights. Autocast has separate rules."""
    if x_D.dtype == w_D.dtype or torch.is_autocast_enabled(x_D.device.type):
        return norm(x_D)
    return norm(x_D.to(w_D.dtype)).to(x_D.dtype)
