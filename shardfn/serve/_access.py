"""Access of clients: keys, headers of answers, and permission for pages of other sites (CORS)."""

import hashlib
import hmac
import pathlib
import re
import secrets
from collections.abc import Iterable, Mapping


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


_ID = re.compile(r"[\x21-\x7e]{1,128}")
_SECONDS = b"600"  # for which a browser keeps a permission


def make_headers(given: Mapping[bytes, str], origins: tuple[str, ...]) -> list[tuple[bytes, bytes]]:
    """Returns the headers of an answer.

    Args:
        given: headers of the request by their names in small letters.
        origins: origins of pages that may use the server.

    Example:
        >>> make_headers({b"x-request-id": "a1", b"origin": "https://a.b"}, ("https://a.b",))[0]
        (b'x-request-id', b'a1')
    """
    own = given.get(b"x-request-id", "")
    name = own if _ID.fullmatch(own) else f"req_{secrets.token_hex(12)}"
    made = [(b"x-request-id", name.encode()), (b"request-id", name.encode())]
    if (origin := given.get(b"origin")) is not None and origins:
        made.append((b"vary", b"Origin"))
        if "*" in origins or origin in origins:
            made += [
                (b"access-control-allow-origin", b"*" if "*" in origins else origin.encode("latin-1")),
                (b"access-control-expose-headers", b"x-request-id, retry-after"),
            ]
    return made


def make_permission(given: Mapping[bytes, str]) -> list[tuple[bytes, bytes]] | None:
    """Returns the further headers of the answer to a browser's question, or None for another request."""
    if b"access-control-request-method" not in given or b"origin" not in given:
        return None
    asked = given.get(b"access-control-request-headers", "authorization, content-type")
    return [
        (b"access-control-allow-methods", b"GET, POST, OPTIONS"),
        (b"access-control-allow-headers", asked.encode("latin-1")),
        (b"access-control-max-age", _SECONDS),
    ]
