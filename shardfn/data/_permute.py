"""A shuffle that is never stored: a keyed bijection of {0, ..., size - 1}, evaluated on demand.

A Feistel network permutes the integers of b bits, the smallest b with 2^b >= size. An image outside {0, ..., size - 1}
is permuted again until inside (cycle walking), in at most two passes on average.

Luby, Rackoff: How to Construct Pseudorandom Permutations from Pseudorandom Functions, 1988,
https://doi.org/10.1137/0217022 Black, Rogaway: Ciphers with Arbitrary Finite Domains, 2002,
https://doi.org/10.1007/3-540-45760-7_9
"""

import numpy as np
from jaxtyping import Int64, UInt64

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_ROUNDS = 8  # four rounds make a strong cipher of wide halves, but here halves may be one bit wide


def permute(index: Int64[np.ndarray, " n"], size: int, *key: int) -> Int64[np.ndarray, " n"]:
    """Returns the images of `index` under the permutation of {0, ..., size - 1} with this key.

    Args:
        index: numbers in {0, ..., size - 1}.
        size: the number of permuted numbers.
        key: integers. Each tuple gives another permutation.

    Returns:
        One number in {0, ..., size - 1} for each index.

    Raises:
        ValueError: an index is outside.

    Example:
        >>> sorted(permute(np.arange(7), 7, 42, 0).tolist())
        [0, 1, 2, 3, 4, 5, 6]
    """
    if index.size and not 0 <= int(index.min()) <= int(index.max()) < size:
        raise ValueError(f"index spans {index.min()} to {index.max()}, but the permutation is of 0 to {size - 1}.")
    keys, bits = _round_keys(key), max(size - 1, 0).bit_length()
    out = _permute_bits(index.astype(np.uint64), bits, keys)
    # Terminates: the orbit of a bijection of a finite set returns to the start, inside the set.
    while (outside := out >= size).any():
        out[outside] = _permute_bits(out[outside], bits, keys)
    return out.astype(np.int64)


def _permute_bits(x: UInt64[np.ndarray, " n"], bits: int, keys: list[np.uint64]) -> UInt64[np.ndarray, " n"]:
    low_bits = np.uint64(bits - bits // 2)
    low_mask, high_mask = np.uint64((1 << int(low_bits)) - 1), np.uint64((1 << bits // 2) - 1)
    low, high = x & low_mask, x >> low_bits
    for i, key in enumerate(keys):
        if i % 2:
            high ^= _mix_bits(low ^ key) & high_mask
        else:
            low ^= _mix_bits(high ^ key) & low_mask
    return high << low_bits | low


def _mix_bits(x: UInt64[np.ndarray, " n"]) -> UInt64[np.ndarray, " n"]:
    """Returns the finalizer of splitmix64. Unsigned products wrap."""
    x = (x ^ x >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ x >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return x ^ x >> np.uint64(31)


def _round_keys(key: tuple[int, ...]) -> list[np.uint64]:
    state = np.zeros(1, np.uint64)
    for k in key:
        state = _mix_bits(state + np.uint64((k + _GOLDEN) & _MASK))
    return [_mix_bits(state + np.uint64((i + 1) * _GOLDEN & _MASK))[0] for i in range(_ROUNDS)]


def shuffled(rows: Int64[np.ndarray, " n"], size: int, seed: int | None) -> Int64[np.ndarray, " n"]:
    """Returns the item, of `size`, at each row of an endless sequence.

    Each item appears once an epoch, in a different order in each epoch.

        epoch, k = divmod(row, size);   permute(k, size, seed, epoch)

    Args:
        rows: numbers from 0 on, 1-d int64.
        size: size of an epoch.
        seed: seed of the orders. None: in order.

    Example:
        >>> order = shuffled(np.arange(6), 3, 42)
        >>> sorted(order[:3].tolist()), sorted(order[3:].tolist()), shuffled(np.arange(4), 3, None).tolist()
        ([0, 1, 2], [0, 1, 2], [0, 1, 2, 0])
    """
    epoch, place = np.divmod(rows, size)
    if seed is not None:
        for e in np.unique(epoch):
            place[epoch == e] = permute(place[epoch == e], size, seed, int(e))
    return place
