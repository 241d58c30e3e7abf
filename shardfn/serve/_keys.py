"""Keys of clients: read from a file, compared in constant time."""

import hashlib
import hmac
import pathlib
from collections.abc import Iterable


def read_keys(path: pathlib.Path) -> tuple[str, ...]:
    """Returns the keys of a file, a key in each line. Empty lines and lines that begin with # are left out.

    Raises:
        ValueError: the file has no key, or a key with a space or other than ASCII characters.
        OSError: the file cannot be read.
    """
    lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    keys = tuple(line for line in lines if line and not line.startswith("#"))
    if not keys:
        raise ValueError(f"{path} has no key. Write one in each line.")
    for i, key in enumerate(keys):
        if not key.isascii() or len(key.split()) != 1:
            raise ValueError(f"{path}: key {i + 1} of {len(keys)} has a space, or a character that is not ASCII.")
    return keys


class ApiKeys:
    """Keys that open a server.

    The time of a comparison depends neither on the place of a difference nor on the key that is equal.

    Args:
        keys: keys. Without keys, every client is admitted.

    Example:
        >>> keys = ApiKeys(["secret"])
        >>> keys.admit("Bearer secret"), keys.admit("Bearer other"), keys.admit(None), ApiKeys([]).admit(None)
        (True, False, False, True)
    """

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = [_digest_key(key) for key in keys]

    def admit(self, header: str | None) -> bool:
        """Returns whether an `Authorization` header has one of the keys."""
        if not self._digests:
            return True
        kind, _, given = (header or "").partition(" ")
        mine = _digest_key(given.strip())
        found = [hmac.compare_digest(mine, digest) for digest in self._digests]  # all of them
        return any(found) and kind.lower() == "bearer"


def _digest_key(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
