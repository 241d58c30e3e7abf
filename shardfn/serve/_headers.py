"""Headers of all answers: an id of the request, and permission for pages of other sites (CORS)."""

import re
import secrets
from collections.abc import Mapping

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
