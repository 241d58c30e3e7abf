"""Values as text for people: tables and sizes, and errors with each leaf's path, both values and the remedy."""

import difflib
import html
import numbers
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

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


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Returns a suffix that names the nearest known word, or nothing.

    Example:
        >>> did_you_mean("dpp", ["dp", "tp"])
        " Did you mean 'dp'?"
    """
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f" Did you mean {near[0]!r}?" if near else ""


def raise_all(kind: type[Exception], title: str, problems: list[str]) -> None:
    """Raises one error that lists every problem, or returns if the list is empty."""
    if problems:
        lines = "\n".join(f"  - {p}" for p in problems)
        raise kind(f"{title}\n{lines}")


def first_of(lines: Sequence[str], num: int) -> list[str]:
    """Returns the first `num` lines, and how many more there are.

    Example:
        >>> first_of(["a", "b", "c"], 1)
        ['a', 'and 2 more']
    """
    return [*lines[:num], *([f"and {len(lines) - num} more"] if len(lines) > num else [])]


def not_scalar(x: Any) -> str | None:
    """Returns a description of a value that is neither a 0-d tensor nor a number, or None for a scalar."""
    if isinstance(x, Tensor):
        return None if x.shape == () else f"a tensor of shape {tuple(x.shape)}"
    return None if isinstance(x, numbers.Real) else f"a {type(x).__name__}"


def a_kind(x: Any) -> str:
    """Returns the type of a value, with an article, such as "an int".

    Example:
        >>> a_kind(1), a_kind("a")
        ('an int', 'a str')
    """
    name = type(x).__name__
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"


class DonatedError(RuntimeError):
    """Error of a touched leaf of a donated state: the step that consumed the state has reused the buffers."""


class RankError(RuntimeError):
    """Error of another rank, which failed or disagreed. The message names the rank and gives the rank's report.

    Attributes:
        before_transfers: whether the error was raised where ranks compare their calls, before any transfer began.
    """

    before_transfers = False


_LISTED = 10


def count_nonfinite(x: Tensor) -> int:
    """Returns the number of elements that are infinite or NaN, or 0 for integers.

    Example:
        >>> import torch
        >>> count_nonfinite(torch.tensor([1.0, torch.nan, torch.inf])), count_nonfinite(torch.ones(2, dtype=torch.int8))
        (2, 0)
    """
    if not (x.is_floating_point() or x.is_complex()):
        return 0
    # torch has no isfinite for its types of 8 bits.
    return int((~(x.float() if x.dtype.itemsize == 1 else x).isfinite()).sum())


def raise_nonfinite(title: str, found: Mapping[str, tuple[int, int]], total: int) -> None:
    """Raises an error that names leaves with elements that are not finite, and returns if all are finite.

    Args:
        title: words for the leaves, for example "the weights for runs/model".
        found: path -> (number of elements that are not finite, number of all elements).
        total: number of all leaves.

    Raises:
        ValueError: leaves have such elements. The message names ten leaves at most.
    """
    lines = [f"{path}: {bad:,} of {size:,} elements" for path, (bad, size) in found.items()]
    raise_all(
        ValueError,
        f"{title} must be finite, got NaN or infinite elements in {len(lines)} of {total} leaves, so that nothing was"
        f" written."
        " Write them from an earlier checkpoint, and train on from there with a smaller learning rate:",
        first_of(lines, _LISTED),
    )
