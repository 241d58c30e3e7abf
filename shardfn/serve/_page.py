"""The page at `/`: one file, with a policy that permits only the page's script, and only calls of its server."""

import base64
import hashlib
import pathlib
import re

_PATH = pathlib.Path(__file__).with_name("page.html")


def page() -> tuple[str, dict[str, str]]:
    """Returns the page, and the headers of the answer.

    Example:
        >>> html, headers = page()
        >>> headers["Content-Security-Policy"].startswith("default-src 'none'; script-src 'sha256-")
        True
    """
    html = _PATH.read_text(encoding="utf-8")
    own = {tag: _digest_element(html, tag) for tag in ("script", "style")}
    rules = [
        "default-src 'none'",
        *(f"{tag}-src 'sha256-{digest}'" for tag, digest in own.items()),
        "connect-src 'self'",
        "img-src data:",  # the empty icon
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
    ]
    headers = {
        "Content-Security-Policy": "; ".join(rules),
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }
    return html, headers


def _digest_element(html: str, tag: str) -> str:
    """Returns the digest of the page's single element of a tag."""
    [text] = re.findall(rf"<{tag}>(.*?)</{tag}>", html, re.DOTALL)
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
