"""Factors of dropout on probabilities after the softmax: threefry2x32 of each pair, in plain torch.

The file is the definition. `core` draws the same numbers, but kernels import no other room.
"""

import torch
from torch import Tensor

from shardfn.kernels.block_sparse_attention._api import Dropped

LEVELS = 1 << 16
_MASK, _PARITY = 0xFFFFFFFF, 0x1BD11BDA
_ROTATIONS = (13, 15, 26, 6), (17, 29, 16, 24)


def factors(dropped: Dropped, head: int, queries: Tensor, keys: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the factors of the pairs of some queries [m] and keys [n] of one head: [B, m, n].

    Example:
        >>> dropped = Dropped(torch.tensor([[0, 7]]), level=1 << 15)
        >>> factors(dropped, 0, torch.arange(2), torch.arange(4), torch.float32).tolist()
        [[[2.0, 2.0, 0.0, 0.0], [0.0, 2.0, 2.0, 0.0]]]
    """
    own = _apply_threefry(
        dropped.keys.unbind(-1), torch.zeros_like(keys[:1]), torch.full_like(keys[:1], dropped.head + head)
    )
    key, at = (own[0][:, None, None], own[1][:, None, None]), keys + dropped.key
    first, second = _apply_threefry(key, (queries + dropped.query)[:, None], at // 4)
    lanes = torch.where(at % 4 < 2, first, second) >> 16 * (at % 2) & LEVELS - 1
    return (lanes >= dropped.level).to(dtype) * (LEVELS / (LEVELS - dropped.level))


def _apply_threefry(key: tuple[Tensor, ...], hi: Tensor, lo: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the two words of the counters (hi, lo), as numbers in [0, 2^32)."""
    ks = (*key, key[0] ^ key[1] ^ _PARITY)
    x0, x1 = hi + ks[0] & _MASK, lo + ks[1] & _MASK
    for i in range(5):
        for r in _ROTATIONS[i % 2]:
            x0 = x0 + x1 & _MASK
            x1 = (x1 << r | x1 >> 32 - r) & _MASK ^ x0
        x0, x1 = x0 + ks[(i + 1) % 3] & _MASK, x1 + ks[(i + 2) % 3] + i + 1 & _MASK
    return x0, x1
