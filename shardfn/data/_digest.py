"""Digests of data sets: a saved position can be resumed only with the same data set.

Reading all rows of a large data set would take hours, so 64 rows at equal distances are digested, the first and the
last among them.
"""

import hashlib
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
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
