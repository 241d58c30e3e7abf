"""Bytes that the C++ allocates during a run, computed from the shapes of an op's arguments."""

from typing import Any

from torch import Tensor

from shardfn.kernels._num_threads import num_threads

_WIDE = 512  # columns of scores that pass through the softmax together, if blocks are smaller
_PARTS = 16  # the least number of units of work in a backward


def forward(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> int:
    """Forward: keys and values padded to whole vectors, a block of queries per thread, and 16-bit values as fp32.

    Example:
        >>> import torch
        >>> q = torch.empty(1, 4, 1, 16)
        >>> forward(q, q, q, 16, 1.0) - torch.get_num_threads() * 4 * 16 * (2 * 16 + 512 + 2)
        1280
    """
    block, size = int(rest[-2]), _element_bytes(q)
    W, P = _pad_length(q.shape[-1]), _pad_length(block)
    own = block * (2 * W + P * max(_WIDE // P, 1) + 2)
    return _packed_bytes(k, block) + num_threads() * own * size + sum(map(_widened_bytes, (q, q, k, v)))


def backward(dy: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, lse: Tensor, *rest: Any) -> int:
    """Backward: keys and values in two layouts, and their gradients once for each part of the queries."""
    del y, lse
    (B, T, H, K), S, block = q.shape, k.shape[1], int(rest[-2])
    W, P = _pad_length(K), _pad_length(block)
    parts = min(-(-T // block), -(-_PARTS // max(B * H, 1)))
    sums, own = B * H * parts * 2 * S * W, block * (3 * W + 2 * P)
    widened = sum(map(_widened_bytes, (dy, q, q, k, k, v, v)))
    return 2 * _packed_bytes(k, block) + (sums + num_threads() * own) * _element_bytes(q) + widened


def _packed_bytes(k: Tensor, block: int) -> int:
    B, S, G, K = k.shape
    return B * G * (-(-S // block) * K * _pad_length(block) + S * _pad_length(K)) * _element_bytes(k)


def _pad_length(n: int) -> int:
    return -(-n // 16) * 16


def _element_bytes(x: Tensor) -> int:
    return max(x.element_size(), 4)


def _widened_bytes(x: Tensor) -> int:
    return 4 * x.numel() if x.element_size() == 2 else 0
