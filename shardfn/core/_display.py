"""Values as text for people: tables, sizes, and the same text in a notebook."""

import html
from collections.abc import Sequence

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def as_html(text: str) -> str:
    """Returns text as HTML for a notebook: line by line, with equal widths.

    Example:
        >>> as_html("a < b")
        '<pre>a &lt; b</pre>'
    """
    return f"<pre>{html.escape(text)}</pre>"


def columns(rows: Sequence[Sequence[str]]) -> str:
    """Returns rows of cells as lines of equal columns. Columns of numbers are right-aligned.

    Example:
        >>> print(columns([("path", "bytes"), ("w", "1,024"), ("bias", "16")]))
        path  bytes
        w     1,024
        bias     16
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    numeric = [all(cell[:1].isdigit() for cell in column[1:]) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(c.rjust(w) if n else c.ljust(w) for c, w, n in zip(row, widths, numeric, strict=True)).rstrip()
        for row in rows
    )


def size(nbytes: float) -> str:
    """Returns bytes as text, in the unit that gives at most four digits.

    Example:
        >>> size(512), size(1536), size(3 << 30)
        ('512 B', '1.5 KiB', '3.0 GiB')
    """
    for unit in _UNITS[:-1]:
        if nbytes < 1024:
            return f"{nbytes:.1f} {unit}" if unit != "B" else f"{nbytes:.0f} B"
        nbytes /= 1024
    return f"{nbytes:.1f} {_UNITS[-1]}"
