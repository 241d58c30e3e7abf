"""Drafters for speculative decoding: a draft is accepted where it equals the token that the engine draws.

So no drafter changes a token or a log probability. A good drafter saves steps. Drafters see token ids, and hidden
states of the model where they ask for states. Drafters are deterministic, so that all ranks propose the same drafts.

References:
    Saxena: Prompt Lookup Decoding, 2023, https://github.com/apoorvumang/prompt-lookup-decoding
"""

import hashlib
from array import array
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

from jaxtyping import Float32
from torch import Tensor

from ._draft_tree import DraftTree
from ._limits import Limits
from ._requests import Sampling

if TYPE_CHECKING:
    from ._decoder import Decoder


class Context(NamedTuple):
    """A sequence as a drafter sees it.

    Attributes:
        serial: number, in order of arrival.
        name: name of the request.
        choice: choice of the request.
        tokens: prompt, and drawn tokens.
        prompt: tokens of the prompt.
        salt: salt of the request, with its adapter. Texts of different salts are kept separate.
        key: key of the draws.
        sampling: sampling of the request.
        states: hidden states behind the draws of the last tokens, oldest first, each after the layers that the drafter
            wants, concatenated. At most `hidden_window` of them. Empty for a drafter that wants no states, and before
            the first draw of a request.
    """

    serial: int
    name: str
    choice: int
    tokens: array
    prompt: int
    salt: bytes = b""
    key: int = 0
    sampling: Sampling = Sampling()
    states: tuple[Float32[Tensor, " d"], ...] = ()

    @property
    def hidden(self) -> Float32[Tensor, " d"] | None:
        """Returns the hidden states behind the last token's draw, or None."""
        return self.states[-1] if self.states else None


class Drafter(Protocol):
    """Proposer of tokens. Proposals depend only on the calls so far: on no clock, set, or random number of Python."""

    def propose(self, context: Context, most: int) -> Seq[int] | DraftTree:
        """Returns at most `most` tokens that may follow, as a chain or a tree. An empty chain is not a proposal."""
        ...

    def end(self, context: Context) -> None:
        """Takes the end of a sequence, whether tokens were proposed for it or not."""
        ...

    def copy(self) -> "Drafter":
        """Returns a separate drafter, equal to this drafter."""
        ...

    def digest(self) -> bytes:
        """Returns bytes of the drafter's kind, and of all that proposals depend on in addition to the context."""
        ...


@runtime_checkable
class BatchDrafter(Drafter, Protocol):
    """Drafter whose proposals take time, asked for all sequences at once, and not beyond `Limits.drafts`."""

    def propose_all(self, asks: Seq[tuple[Context, int]]) -> list[Seq[int] | DraftTree]:
        """Returns a proposal for each sequence, within the sequence's number of tokens."""
        ...

    def check(self, decoder: "Decoder", limits: Limits) -> None:
        """Refuses, by a ValueError, an engine for which the drafter cannot propose."""
        ...

    def warm_up(self, *, extended: bool = False) -> None:
        """Prepares the first proposals, also of requests with penalties, to be as fast as later proposals."""
        ...


@runtime_checkable
class HiddenStateDrafter(Drafter, Protocol):
    """Drafter that sees hidden states of the model, as `Context.hidden`: those behind the last token's draw."""

    @property
    def wants_hidden(self) -> tuple[int, ...]:
        """Returns the layers that the drafter wants states after, some of `Decoder.hidden_layers`.

        For example (2, 6): the states after two layers, and after all of six layers.
        """
        ...


@runtime_checkable
class HiddenWindowDrafter(HiddenStateDrafter, Protocol):
    """Drafter that sees the hidden states of several tokens, as `Context.states`."""

    @property
    def hidden_window(self) -> int:
        """Returns the most states of a sequence that the drafter wants, at least 1."""
        ...


@runtime_checkable
class SpecTokenDrafter(HiddenStateDrafter, Protocol):
    """Drafter that sees the state of a [SPEC] token instead of the state behind the last draw.

    A step has a [SPEC] token after the last known token and after each draft, seen by no other token. The token's id is
    the vocabulary's size, so the decoder must have an embedding for it (`Decoder.spec_token`). `Context.states` has the
    state of the [SPEC] token after the last accepted draft, or nothing where the last step had no such row.
    """

    @property
    def wants_spec_token(self) -> bool:
        """Returns whether steps have [SPEC] tokens."""
        ...


@runtime_checkable
class RejectionDrafter(Drafter, Protocol):
    """Drafter that sees the tokens that a step drew behind the first wrong draft of its first branch."""

    @property
    def block(self) -> int:
        """Returns the most drafts of each step, whether the last drafts were accepted or not."""
        ...

    def take_rejected(self, context: Context, drawn: Seq[int]) -> None:
        """Takes the tokens drawn for the places after the context. -1 where logits were not finite."""
        ...


def find_wanted_layers(drafter: Drafter | None) -> tuple[int, ...]:
    """Returns the layers that a drafter wants hidden states after.

    Example:
        >>> find_wanted_layers(Ngram())
        ()
    """
    return tuple(drafter.wants_hidden) if isinstance(drafter, HiddenStateDrafter) else ()


def wants_spec_token(drafter: Drafter | None) -> bool:
    """Returns whether steps have [SPEC] tokens for a drafter.

    Example:
        >>> wants_spec_token(Ngram())
        False
    """
    return isinstance(drafter, SpecTokenDrafter) and drafter.wants_spec_token


def find_hidden_window(drafter: Drafter | None) -> int:
    """Returns the most hidden states of a sequence that a drafter wants.

    Example:
        >>> find_hidden_window(Ngram())
        1
    """
    return drafter.hidden_window if isinstance(drafter, HiddenWindowDrafter) else 1


@dataclass(frozen=True)
class Ngram:
    """Drafter by prompt lookup: proposes the tokens that followed the last n tokens where they occurred last.

    The longest n is tried first. The text is continued as if it repeated itself, so that a proposal may be longer than
    the distance to the earlier place.

    Args:
        longest: largest n.
        shortest: smallest n.

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
            raise ValueError(f"shortest must be from 1 to longest = {self.longest}, got {self.shortest}.")

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
        """Returns the drafter itself, which has no state."""
        return self

    def digest(self) -> bytes:
        """Returns a hash of the settings."""
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
