"""Orders of examples: a keyed shuffle that is never stored, and digests of data sets.

Digests of data sets: a saved position can be resumed only with the same data set.

Reading all rows of a large data set would take hours, so 64 rows at equal distances are digested, the first and the
last among them.

A shuffle that is never stored: a keyed bijection of {0, ..., size - 1}, evaluated on demand.

A Feistel network permutes the integers of b bits, the smallest b with 2^b >= size. An image outside {0, ..., size - 1}
is permuted again until inside (cycle walking), in at most two passes on average.

Luby, Rackoff: How to Construct Pseudorandom Permutations from Pseudorandom Functions, 1988,
https://doi.org/10.1137/0217022 Black, Rogaway: Ciphers with Arbitrary Finite Domains, 2002,
https://doi.org/10.1007/3-540-45760-7_9
"""

import hashlib
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from jaxtyping import Int64, UInt64
from torch import Tensor

_SAMPLED = 64


class _NotPlainError(Exception):
    """A row has a value whose bytes are not known to be the same at each read."""


def sampled_rows(count: int) -> list[int]:
    """Returns the numbers of the rows that a digest reads: at most 64 at equal distances, with the first and the last.

    Example:
        >>> sampled_rows(3), len(sampled_rows(1000)), sampled_rows(1000)[-1]
        ([0, 1, 2], 64, 999)
    """
    return sorted({int(i) for i in np.linspace(0, count - 1, min(count, _SAMPLED))}) if count else []


def digest_bytes(parts: Iterable[bytes]) -> str:
    """Returns a digest of byte strings and of their order, 16 hexadecimal digits."""
    found = hashlib.blake2b(digest_size=8)
    for part in parts:
        found.update(len(part).to_bytes(8, "little"))
        found.update(part)
    return found.hexdigest()


def digest_examples(examples: Any) -> str | None:
    """Returns the digest of a map-style data set, or None where its rows may differ from read to read.

    A list, a tuple, an array or a tensor has the digest of its sampled rows. Any other data set has the result of its
    method `digest()`, for example `JSONLines`. A data set without the method is not read, since it may draw (for
    example a random crop of an image).
    """
    own: Callable[[], str] | None = getattr(examples, "digest", None)
    if callable(own):
        return own()
    if not isinstance(examples, list | tuple | np.ndarray | Tensor):
        return None
    try:
        return digest_bytes(part for i in sampled_rows(len(examples)) for part in _row_bytes(examples[i]))
    except _NotPlainError:
        return None


def _row_bytes(x: Any) -> Iterable[bytes]:
    """Yields the bytes of a plain value, with types and lengths that distinguish values."""
    if x is None or isinstance(x, bool | int | float | str):
        yield f"{type(x).__name__} {x!r}".encode("utf-8", "surrogatepass")
    elif isinstance(x, bytes):
        yield b"bytes"
        yield x
    elif isinstance(x, Tensor):
        yield f"tensor {x.dtype} {tuple(x.shape)}".encode()
        yield x.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
    elif isinstance(x, np.ndarray | np.generic) and not x.dtype.hasobject:
        yield f"array {x.dtype.str} {x.shape}".encode()
        yield np.ascontiguousarray(x).tobytes()
    elif isinstance(x, list | tuple):
        yield f"sequence {len(x)}".encode()
        for item in x:
            yield from _row_bytes(item)
    elif isinstance(x, dict):
        yield f"dict {len(x)}".encode()
        for name, value in sorted(x.items(), key=lambda pair: repr(pair[0])):
            yield from _row_bytes(name)
            yield from _row_bytes(value)
    else:
        raise _NotPlainError


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
