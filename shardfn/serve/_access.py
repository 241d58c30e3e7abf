"""Access of clients: keys and their limits, headers of answers, and permission for pages of other sites (CORS)."""

import collections
import hashlib
import hmac
import math
import pathlib
import re
import secrets
import time
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import NamedTuple

from ._errors import ApiError

_WINDOW = 60.0  # seconds


class KeyLimits(NamedTuple):
    """Limits of a key. None is no limit.

    Attributes:
        requests: requests that begin within a minute.
        tokens: tokens of prompts and answers within a minute. A request begins below the limit, and may go beyond it.
        concurrent: requests in progress.
    """

    requests: int | None = None
    tokens: int | None = None
    concurrent: int | None = None


def read_keys(path: pathlib.Path) -> dict[str, KeyLimits]:
    """Returns the keys of a file with their limits, a key in each line, for example `KEY requests=60 concurrent=4`.

    Empty lines and lines that begin with # are left out.

    Raises:
        ValueError: the file has no key, or a key twice, or with other than ASCII characters, or another limit than
            requests, tokens and concurrent.
        OSError: the file cannot be read.
    """
    lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    keys, made = [line for line in lines if line and not line.startswith("#")], dict[str, KeyLimits]()
    if not keys:
        raise ValueError(f"{path} has no key. Write one in each line.")
    for i, line in enumerate(keys, 1):
        key, *words = line.split()
        if not key.isascii() or key in made:
            how = "is there twice" if key in made else "has a character that is not ASCII"
            raise ValueError(f"{path}: key {i} of {len(keys)} {how}.")
        limits = dict[str, int]()
        for word in words:
            name, _, value = word.partition("=")
            if name not in KeyLimits._fields or not value.isdecimal() or int(value) < 1:
                known = ", ".join(f"{field}=N" for field in KeyLimits._fields)
                raise ValueError(f"{path}: after key {i} of {len(keys)} there must be {known}, got {word!r:.40}.")
            limits[name] = int(value)
        made[key] = KeyLimits(**limits)
    return made


class KeyUse:
    """Use of a key within its limits.

    Args:
        limits: limits of the key. None is no limit.
        clock: function that returns the time in seconds.

    Example:
        >>> use = KeyUse(KeyLimits(requests=1), lambda: 0.0)
        >>> use.begin()
        >>> use.begin()
        Traceback (most recent call last):
        shardfn.serve._errors.ApiError: The key may begin 1 requests a minute. Try again later.
    """

    def __init__(self, limits: KeyLimits | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._limits, self._clock = limits or KeyLimits(), clock
        self._begun, self._tokens = collections.deque[float](), collections.deque[tuple[float, int]]()
        self._open = 0

    def begin(self) -> None:
        """Counts a request that begins.

        Raises:
            ApiError: the key is at a limit, 429, with the seconds after which to try again.
        """
        now, (requests, tokens, concurrent) = self._clock(), self._limits
        while self._begun and self._begun[0] <= now - _WINDOW:
            self._begun.popleft()
        while self._tokens and self._tokens[0][0] <= now - _WINDOW:
            self._tokens.popleft()
        if concurrent is not None and self._open >= concurrent:
            raise _make_limit_error(f"have {concurrent} requests in progress", 1)
        if requests is not None and len(self._begun) >= requests:
            raise _make_limit_error(f"begin {requests} requests a minute", self._begun[0] + _WINDOW - now)
        if tokens is not None and sum(num for _, num in self._tokens) >= tokens:
            raise _make_limit_error(f"use {tokens} tokens a minute", self._tokens[0][0] + _WINDOW - now)
        if requests is not None:
            self._begun.append(now)
        self._open += 1

    def end(self) -> None:
        """Counts the end of a request."""
        self._open -= 1

    def add_tokens(self, num: int) -> None:
        """Counts tokens of a prompt and its answer."""
        if self._limits.tokens is not None:
            self._tokens.append((self._clock(), num))


def _make_limit_error(what: str, seconds: float) -> ApiError:
    headers = {"Retry-After": str(max(1, math.ceil(seconds)))}
    return ApiError(429, f"The key may {what}. Try again later.", headers=headers)


class ClientOrigin(NamedTuple):
    """Sender of a request.

    Attributes:
        use: use of the client's key.
        name: id of the request, as in `x-request-id`.
        trace: headers `traceparent` and `tracestate` of the request, as of W3C's trace context.
    """

    use: KeyUse | None = None
    name: str = ""
    trace: Mapping[str, str] = MappingProxyType({})


NOBODY = ClientOrigin()


class ApiKeys:
    """Keys that open a server.

    The time of a comparison depends neither on the place of a difference nor on the key that is equal.

    Args:
        keys: keys, or limits by keys. Without keys, every client is admitted.

    Example:
        >>> keys = ApiKeys(["secret"])
        >>> keys.admit("Bearer secret"), keys.admit("Bearer other"), keys.admit(None), ApiKeys([]).admit(None)
        (True, False, False, True)
    """

    def __init__(self, keys: Mapping[str, KeyLimits] | Iterable[str]) -> None:
        limits = keys if isinstance(keys, Mapping) else dict.fromkeys(keys, KeyLimits())
        self._digests = [_digest_key(key) for key in limits]
        self._uses = [KeyUse(one) for one in limits.values()] or [KeyUse()]

    def admit(self, header: str | None) -> bool:
        """Returns whether an `Authorization` header has one of the keys."""
        return self.find_use(header) is not None

    def find_use(self, header: str | None) -> KeyUse | None:
        """Returns the use of the key in an `Authorization` header, or None without one of the keys."""
        if not self._digests:
            return self._uses[0]
        kind, _, given = (header or "").partition(" ")
        mine = _digest_key(given.strip())
        found = [hmac.compare_digest(mine, digest) for digest in self._digests]  # all of them
        use = self._uses[sum(i * equal for i, equal in enumerate(found))]
        return use if any(found) and kind.lower() == "bearer" else None


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
