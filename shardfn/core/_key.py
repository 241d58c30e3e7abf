"""Keys: explicit, stateless randomness by threefry2x32 in torch integer ops.

Law: a random word is a function of only (key, position), so any block of a draw has the same bits on every rank, under
every mesh, remat and microbatch size. The words equal `jax.random`'s with partitionable threefry.

Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3, SC 2011, https://doi.org/10.1145/2063384.2063405
"""

import numbers
from typing import Any, SupportsInt

import torch
from jaxtyping import Int, Int32, Int64
from torch import Tensor

from ._texts import a_kind

MASK = 0xFFFFFFFF
_PARITY = 0x1BD11BDA
_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))


def key(seed: int, *, device: torch.device | str | None = None) -> Int64[Tensor, "2"]:
    """Returns a key from a seed: the two halves of the seed as unsigned 32-bit words, high half first.

    A key is an ordinary tensor, so a key lives in a state tree and is traced like any other leaf.

    Args:
        seed: any integer of 64 bits, signed or unsigned.
        device: the default device of draws from the key.

    Returns:
        int64 of shape [2], each word in [0, 2**32).

    Raises:
        ValueError: `seed` has more than 64 bits.

    Example:
        >>> key(42).tolist()
        [0, 42]
    """
    if isinstance(seed, bool) or not isinstance(seed, numbers.Integral):
        raise TypeError(f"key({seed!r}): a seed is an integer, as in key(0).")
    if not -(1 << 63) <= seed < 1 << 64:
        raise ValueError(f"key({seed}): a seed must have at most 64 bits. Use {seed & (2**64 - 1)}, its low 64 bits.")
    return torch.tensor([(seed >> 32) & MASK, seed & MASK], dtype=torch.int64, device=device)


def split(key: Int64[Tensor, "2"], num: int = 2) -> Int64[Tensor, "n 2"]:
    """Returns `num` independent keys: `split(key, n)[i] == fold_in(key, i)`.

    Args:
        key: the parent key. Do not draw from the parent as well.
        num: number of keys.

    Returns:
        int64 of shape [num, 2], to unpack or index.

    Raises:
        ValueError: `num` is negative.

    Example:
        >>> a, b = split(key(0))
        >>> torch.equal(b, fold_in(key(0), 1))
        True
    """
    _check_tensor("split", key)
    if num < 0:
        raise ValueError(f"split(key, {num}): the number of keys must not be negative.")
    return fold_in(key, torch.arange(num, device=key.device))


def fold_in(key: Int64[Tensor, "*k 2"], data: SupportsInt | Int[Tensor, "*n"]) -> Int64[Tensor, "*m 2"]:
    """Returns the key of (key, data): threefry of the two words of `data`. A tensor of data gives a key for each entry.

    Args:
        key: a key, or keys with leading dims that broadcast with the dims of `data`.
        data: an integer such as a step, layer or sample number.

    Returns:
        int64 keys of shape [*m, 2], `m` the broadcast of the leading dims and the shape of `data`.

    Raises:
        ValueError: an integer `data` has more than 64 bits.
        TypeError: `data` is a float.

    Example:
        >>> fold_in(key(42), 7).tolist()
        [2547012911, 1371500959]
    """
    _check_tensor("fold_in", key)
    if not isinstance(data, Tensor):
        number: Any = data  # an `axis_index`, too, which has no order
        if not -(1 << 63) <= int(number) < 1 << 64:
            raise ValueError(f"fold_in(key, {data}): data must have at most 64 bits.")
        data = torch.tensor(number - (1 << 64) if int(number) >> 63 > 0 else number, device=key.device)
        if data.is_floating_point():
            raise TypeError(f"fold_in(key, {number}): data must be an integer, got a float. Pass int(data).")
    words = threefry2x32(key, data.to(device=key.device, dtype=torch.int64))
    return torch.stack(words, dim=-1).to(torch.int64) & MASK


def check_key(who: str, key: Any) -> None:
    """Refuses anything but a key.

    Raises:
        TypeError: `key` is not a key. The message shows how to make a key.

    Example:
        >>> check_key("sharded_step", key(0))
    """
    _check_tensor(who, key)
    if key.shape != (2,) or key.dtype != torch.int64:
        raise TypeError(
            f"{who}: a key must be int64 of shape (2,), got {key.dtype} of shape {tuple(key.shape)}. Make a key from a"
            " seed: key=sf.key(0)."
        )


def _check_tensor(who: str, key: Any) -> None:
    if not isinstance(key, Tensor):
        seed = key if isinstance(key, int) else 0
        raise TypeError(f"{who}: key is {key!r}, {a_kind(key)}. Make a key of a seed: sf.key({seed}).")


def bits(key: Int64[Tensor, "2"], start: int, count: int) -> Int64[Tensor, " n"]:
    """Returns the 32-bit words of flat positions start .. start + count: `hi ^ lo` of threefry2x32(key, position).

    Args:
        key: the key.
        start: first position.
        count: number of positions.

    Returns:
        int64 of shape [count], each in [0, 2**32).

    Example:
        >>> bits(key(42), 0, 2).tolist()
        [2098992034, 2919706841]
    """
    hi, lo = threefry2x32(key, torch.arange(start, start + count, device=key.device))
    return (hi ^ lo).to(torch.int64) & MASK


def threefry2x32(
    key: Int64[Tensor, "*k 2"], index: Int64[Tensor, "*n"]
) -> tuple[Int32[Tensor, "*m"], Int32[Tensor, "*m"]]:
    """Returns Threefry-2x32 with 20 rounds of the counters (index >> 32, index & 0xffffffff).

    int32 arithmetic wraps around exactly as the cipher's uint32 does, and CPUs vectorise it best.

    Args:
        key: keys. The leading dims broadcast with `index`.
        index: counters.

    Returns:
        The two words, as the int32 of the same bits.

    Example:
        >>> [hex(w.item() & 0xffffffff) for w in threefry2x32(key(0), torch.tensor(0))]
        ['0x6b200159', '0x99ba4efe']
    """
    k0, k1 = key.to(torch.int32).unbind(-1)
    ks = (k0, k1, k0 ^ k1 ^ _PARITY)
    x0, x1 = (index >> 32).to(torch.int32) + k0, index.to(torch.int32) + k1
    for i in range(5):
        for r in _ROTATIONS[i % 2]:
            x0 = x0 + x1
            x1 = _rotate_left(x1, r) ^ x0
        x0 = x0 + ks[(i + 1) % 3]
        x1 = x1 + (ks[(i + 2) % 3] + (i + 1))
    return x0, x1


def _rotate_left(x: Tensor, r: int) -> Tensor:
    # The shift right is arithmetic, hence the mask. The sum with alpha is the shift left and the or in a single pass.
    low = (x >> (32 - r)) & ((1 << r) - 1)
    return torch.add(low, x, alpha=1 << r)
