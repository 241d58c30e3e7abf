"""How the package reports a bad tree: every failing leaf by path, both values, and the remedy."""

import difflib
from collections.abc import Iterable


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A suffix that names the nearest known word, or nothing.

    Example:
        >>> did_you_mean("dpp", ["dp", "tp"])
        " Did you mean 'dp'?"
    """
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f" Did you mean {near[0]!r}?" if near else ""


def raise_all(kind: type[Exception], title: str, problems: list[str]) -> None:
    """Raises one error that lists every problem, or returns if there is none."""
    if problems:
        lines = "\n".join(f"  - {p}" for p in problems)
        raise kind(f"{title}\n{lines}")


class DonatedError(RuntimeError):
    """A leaf of a donated state was touched: its buffers were reused by the step that consumed it."""


class RankError(RuntimeError):
    """Another rank failed or disagreed; the message names the rank and what it reported."""
