"""Dropout whose mask belongs to the sample and not to the batch.

B batch.
Srivastava et al., Dropout: A Simple Way to Prevent Neural Networks from Overfitting, 2014,
https://jmlr.org/papers/v15/srivastava14a.html
"""

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from shardfn.core import fold_in, threefry2x32

_LEVELS = 1 << 16


def dropout(
    key: Int64[Tensor, "2"], x: Float[Tensor, "b *rest"], rate: float, index_B: Int64[Tensor, " b"]
) -> Float[Tensor, "b *rest"]:
    """Zeroes each element with probability `rate`, and scales the rest by 1 / (1 - rate).

    The mask is a function of (key, sample number, position): the same bits however the samples are dealt to ranks and
    microbatches, and again under remat. One call of the cipher serves four elements with 16 bits each: `rate` is
    rounded to a multiple of 2**-16, and the scale is that of the rounded rate, so the mean is exact.

    Args:
        key: a key for this place and step.
        x: one sample a row.
        rate: probability of dropping, in [0, 1).
        index_B: global number of each sample.

    Raises:
        ValueError: `rate` is outside [0, 1).

    Example:
        >>> from shardfn.core import key
        >>> x, index_B = torch.ones(4, 3), torch.arange(4)
        >>> whole = dropout(key(0), x, 0.5, index_B)
        >>> torch.equal(whole[2:], dropout(key(0), x[2:], 0.5, index_B[2:]))
        True
    """
    if not 0 <= rate < 1:
        raise ValueError(f"dropout(rate={rate}): the rate lies in [0, 1); at 1 nothing would be left to scale.")
    drop = min(round(rate * _LEVELS), _LEVELS - 1)
    if drop == 0 or x.numel() == 0:
        return x
    keep = _lanes(key.to(x.device), index_B.to(x.device), x[0].numel()).reshape(x.shape) >= drop
    return torch.where(keep, x * (_LEVELS / (_LEVELS - drop)), 0.0)


def _lanes(key: Tensor, index_B: Tensor, count: int) -> Tensor:
    """[B, count] numbers in [0, 2**16): the four quarters of the cipher's output, one after the other."""
    counter = torch.arange(-(-count // 4), device=key.device)
    hi, lo = threefry2x32(fold_in(key, index_B)[:, None], counter)
    quarters = [q & (_LEVELS - 1) for q in (hi, hi >> 16, lo, lo >> 16)]
    return torch.cat(quarters, dim=1)[:, :count]
