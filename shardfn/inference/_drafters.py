"""Drafters: they propose tokens that may follow. A draft is accepted where it equals the token that is drawn there.

So no drafter changes a token or a log probability; a good one saves steps. Drafters see token ids alone, and are
deterministic, so that all ranks propose the same.

References:
    Saxena: Prompt Lookup Decoding, 2023, https://github.com/apoorvumang/prompt-lookup-decoding
"""

import hashlib
from array import array
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

from ._limits import Limits
from ._requests import Sampling
from ._trees import Tree


class Context(NamedTuple):
    """A sequence as a drafter sees it.

    Attributes:
        serial: number, in order of arrival.
        name: name of the request.
        choice: choice of the request.
        tokens: prompt, and drawn ones.
        prompt: tokens of the prompt.
        salt: of the request, with its adapter: texts of different ones are kept apart.
        key: key of the draws.
        sampling: sampling of the request.
    """

    serial: int
    name: str
    choice: int
    tokens: array
    prompt: int
    salt: bytes = b""
    key: int = 0
    sampling: Sampling = Sampling()


class Drafter(Protocol):
    """Proposes tokens, by the calls so far alone: by no clock, no set, and no random number of Python."""

    def propose(self, context: Context, most: int) -> Seq[int] | Tree:
        """At most this number of tokens that may follow, as a chain or a tree. An empty one is no proposal."""
        ...

    def end(self, context: Context) -> None:
        """Takes the end of a sequence, whether tokens were proposed for it or not."""
        ...

    def copy(self) -> "Drafter":
        """Returns a drafter of its own, equal to this one."""
        ...

    def digest(self) -> bytes:
        """Bytes of its kind and of all that its proposals follow from, beside the context."""
        ...


@runtime_checkable
class Computes(Drafter, Protocol):
    """A drafter whose proposals take time: it is asked for all sequences at once, and not beyond `Limits.drafts`."""

    def propose_all(self, asks: Seq[tuple[Context, int]]) -> list[Seq[int] | Tree]:
        """Returns a proposal for each sequence, of at most its number of tokens."""
        ...

    def check(self, limits: Limits) -> None:
        """Refuses an engine that it cannot propose for, by a ValueError."""
        ...

    def warm_up(self, *, extended: bool = False) -> None:
        """Prepares the first proposals, so that they take no longer than others; of requests with penalties, too."""
        ...


@dataclass(frozen=True)
class Ngram:
    """Proposes the tokens that followed the last n tokens where they occurred last: prompt lookup.

    The longest n is tried first. The text is continued as if it repeated itself, so that a proposal may be longer than
    the distance to the earlier place.

    Args:
        longest: the largest n.
        shortest: the smallest n.

    Raises:
        ValueError: `shortest` is not from 1 to `longest`.

    Example:
        >>> Ngram().propose(Context(0, "a", 0, array("q", [5, 6, 7, 8, 9, 5, 6]), 7), 4)
        [7, 8, 9, 5]
    """

    longest: int = 4
    shortest: int = 2

    def __post_init__(self) -> None:
        if not 1 <= self.shortest <= self.longest:
            raise ValueError(f"shortest is {self.shortest}; it must be from 1 to longest, which is {self.longest}.")

    def propose(self, context: Context, most: int) -> list[int]:
        """Returns the tokens after the last earlier occurrence."""
        tokens = context.tokens
        data = tokens.tobytes()
        for n in range(min(self.longest, len(tokens) - 1), self.shortest - 1, -1):
            found = _find_last(data, n, tokens.itemsize)
            if found >= 0:
                return repeated(tokens, found + n, most)
        return []

    def end(self, context: Context) -> None:
        """Has no effect."""

    def copy(self) -> "Ngram":
        """Itself: it is a value."""
        return self

    def digest(self) -> bytes:
        """Returns a hash of its settings."""
        return hashlib.blake2b(repr(self).encode(), digest_size=8).digest()


def repeated(tokens: array, begin: int, most: int) -> list[int]:
    """Returns the tokens from `begin` on, over and over.

    Example:
        >>> repeated(array("q", [1, 2, 3]), 1, 5)
        [2, 3, 2, 3, 2]
    """
    cycle = tokens[begin:].tolist()
    return (cycle * (most // len(cycle) + 1))[:most]


def _find_last(data: bytes, n: int, size: int) -> int:
    """Returns the last place before the end where the last n tokens occur, or -1."""
    pattern, end = data[-n * size :], len(data) - size
    while (at := data.rfind(pattern, 0, end)) >= 0:
        if at % size == 0:
            return at // size
        end = at + n * size - 1  # bytes that are not tokens
    return -1
