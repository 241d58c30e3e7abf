"""Drafts from texts that continued in the same way before: suffix decoding.

The longest suffixes of a sequence are looked up in the sequence itself, and in the texts that other requests have
drawn. After a suffix, each token that followed is a branch, and so on. A branch has the product p of its tokens' parts
of what followed. The branches of the largest p make a tree. The proposal with the most tokens expected to be accepted,
the sum of all p, is taken. Counts equal the counts of the reference's trees, over the places where a suffix occurred
last instead of all places.

References:
    Oliaro et al.: SuffixDecoding, 2024, https://arxiv.org/abs/2411.04975
"""

import hashlib
import heapq
import itertools
from array import array
from collections import OrderedDict
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import NamedTuple

from ._draft_tree import DraftTree
from ._drafters import Context

_KEY = 2  # tokens by which places are found: the shortest suffix
_LENGTHS = 4  # suffixes that are tried, the longest first


class TreePlace(NamedTuple):
    """Place in a text after which the text continues.

    Attributes:
        text: tokens.
        end: number of tokens before the place.
    """

    text: array
    end: int


class Index:
    """Last places of each pair of tokens in growing texts. The oldest text can be dropped.

    Args:
        places: most places of each pair.

    Example:
        >>> index = Index(places=2)
        >>> index.extend(0, array("q", [5, 6, 7, 5, 6]))
        >>> index.find(array("q", [1, 5, 6]))
        [(0, 5), (0, 2)]
    """

    def __init__(self, places: int) -> None:
        self._places = places
        self._ends: dict[tuple[int, int], list[tuple[int, int]]] = {}  # oldest first
        self._lengths: dict[int, int] = {}

    def extend(self, serial: int, tokens: array) -> None:
        """Takes the new tokens of a text."""
        begin = self._lengths.get(serial, 0)
        for end in range(max(begin + 1, _KEY), len(tokens) + 1):
            ends = self._ends.setdefault((tokens[end - 2], tokens[end - 1]), [])
            ends.append((serial, end))
            if len(ends) > self._places:
                del ends[0]
        self._lengths[serial] = len(tokens)

    def drop(self, serial: int, tokens: array) -> None:
        """Forgets the oldest text, whose places are the first places of each pair."""
        for pair in itertools.pairwise(tokens):
            ends = self._ends.get(pair, [])
            while ends and ends[0][0] == serial:
                del ends[0]
            if not ends:
                self._ends.pop(pair, None)
        del self._lengths[serial]

    def find(self, tokens: array) -> list[tuple[int, int]]:
        """Returns texts and places after the last pair of these tokens, the newest first."""
        return self._ends.get((tokens[-2], tokens[-1]), [])[::-1] if len(tokens) >= _KEY else []

    def __len__(self) -> int:
        """Returns the number of texts."""
        return len(self._lengths)

    def copy(self) -> "Index":
        """Returns a separate index, equal to this index."""
        new = Index(self._places)
        new._ends, new._lengths = {pair: ends[:] for pair, ends in self._ends.items()}, dict(self._lengths)
        return new


class Guess(NamedTuple):
    """A proposal, and the number of its tokens that are expected to be accepted."""

    score: float
    tree: DraftTree


@dataclass(eq=False)
class Suffix:
    """Drafter that proposes the tokens that followed a sequence's longest suffixes, in any text so far.

    Where several tokens followed, the proposal branches.

    Args:
        depth: most tokens of a suffix.
        factor: most tokens of a branch for each token of its suffix.
        least: least probability of a branch, by counts.
        places: most places of a suffix that are counted, the newest places.
        most_tokens: most tokens of texts of ended requests. The oldest text is forgotten first. 0 keeps none.

    Raises:
        ValueError: a value is out of range.

    Example:
        >>> drafter = Suffix()
        >>> drafter.end(Context(0, "a", 0, array("q", [1, 5, 6, 7, 8, 9]), prompt=1))
        >>> drafter.propose(Context(1, "b", 0, array("q", [2, 5, 6, 7]), prompt=1), 8)
        DraftTree(tokens=(8, 9), parents=(-1, 0), spec=0)
    """

    depth: int = 64
    factor: float = 2.0
    least: float = 0.1
    places: int = 16
    most_tokens: int = 1 << 15

    def __post_init__(self) -> None:
        for name, low in (("depth", _KEY), ("places", 1), ("most_tokens", 0)):
            if type(value := getattr(self, name)) is not int or value < low:
                raise ValueError(f"{name} must be an integer of at least {low}, got {value!r}.")
        if not self.factor > 0 or not 0 <= self.least <= 1:
            raise ValueError(f"factor must be above 0, and least from 0 to 1, got {self.factor} and {self.least}.")
        self._own: dict[int, Index] = {}  # by sequence, follows from the tokens
        self._texts: OrderedDict[int, tuple[bytes, array]] = OrderedDict()  # of ended requests, with their salts
        self._index: dict[bytes, Index] = {}  # by salt; follows from the texts
        self._size = self._ended = 0

    def propose(self, context: Context, most: int) -> DraftTree:
        """Returns the tokens after the best suffix. The sequence's text comes before equally good other texts."""
        return self.guess(context, most).tree

    def guess(self, context: Context, most: int) -> Guess:
        """Returns the proposal, and the number of its tokens that are expected to be accepted."""
        tokens = context.tokens
        own = self._own.setdefault(context.serial, Index(self.places))
        own.extend(context.serial, tokens)
        mine = [TreePlace(tokens, end) for _, end in own.find(tokens) if end < len(tokens)]
        others = self._index.get(context.salt)
        theirs = [TreePlace(self._texts[i][1], end) for i, end in others.find(tokens)] if others is not None else []
        best = Guess(0.0, DraftTree())
        for places in (mine, theirs):
            for guess in self._make_guesses(tokens, places, most):
                best = guess if guess.score > best.score else best
        return best

    def end(self, context: Context) -> None:
        """Keeps the tokens that the sequence has drawn."""
        self._own.pop(context.serial, None)
        text = context.tokens[context.prompt :]
        if not _KEY < len(text) <= self.most_tokens:
            return
        serial, self._ended = self._ended, self._ended + 1
        self._texts[serial] = context.salt, text
        self._index.setdefault(context.salt, Index(self.places)).extend(serial, text)
        self._size += len(text)
        while self._size > self.most_tokens:
            self._forget_oldest()

    def copy(self) -> "Suffix":
        """Returns a separate drafter, equal to this drafter."""
        new = Suffix(self.depth, self.factor, self.least, self.places, self.most_tokens)
        new._own = {serial: index.copy() for serial, index in self._own.items()}
        new._texts = self._texts.copy()
        new._index = {salt: index.copy() for salt, index in self._index.items()}
        new._size, new._ended = self._size, self._ended
        return new

    def digest(self) -> bytes:
        """Returns a hash of the settings, and of the texts of ended requests."""
        found = hashlib.blake2b(f"{self} {self._ended}".encode(), digest_size=8)
        for serial, (salt, text) in self._texts.items():
            found.update(array("q", (serial, len(salt), len(text))).tobytes() + salt + text.tobytes())
        return found.digest()

    def _forget_oldest(self) -> None:
        serial, (salt, text) = self._texts.popitem(last=False)
        self._size -= len(text)
        index = self._index[salt]
        index.drop(serial, text)
        if not len(index):
            del self._index[salt]

    def _make_guesses(self, tokens: array, places: Seq[TreePlace], most: int) -> Iterator[Guess]:
        """Yields a proposal for each of the longest suffixes."""
        lengths = [_count_common(tokens, place, self.depth) for place in places]
        for length in sorted(set(lengths), reverse=True)[:_LENGTHS]:
            same = [place for place, n in zip(places, lengths, strict=True) if n >= length]
            yield self._grow_tree(same, tokens, most, int(length * self.factor))

    def _grow_tree(self, places: list[TreePlace], tokens: array, most: int, height: int) -> Guess:
        """Returns the branches of the largest probability. Among equal branches, the most frequent, then the newest."""
        score, found, parents = 0.0, list[int](), list[int]()
        # Ends of branches: -p, the order of finding, the parent, the depth, the token, the places.
        ends: list[tuple[float, int, int, int, int, list[TreePlace]]] = []
        numbers = itertools.count()

        def extend_tree(parent: int, depth: int, p: float, places: list[TreePlace]) -> None:
            followed = _group_places(places, tokens, depth) if depth < height else {}
            for token in sorted(followed, key=lambda one: -len(followed[one])):
                part = p * len(followed[token]) / len(places)
                if part >= self.least:
                    heapq.heappush(ends, (-part, next(numbers), parent, depth + 1, token, followed[token]))

        extend_tree(-1, 0, 1.0, places)
        while ends and len(found) < most:
            negative, _, parent, depth, token, own = heapq.heappop(ends)
            found.append(token)
            parents.append(parent)
            score -= negative
            extend_tree(len(found) - 1, depth, -negative, own)
        return Guess(score, DraftTree(tuple(found), tuple(parents)))


def _group_places(places: list[TreePlace], tokens: array, depth: int) -> dict[int, list[TreePlace]]:
    """Returns the places by their tokens at a depth. The sequence's text continues as it did since the place."""
    followed: dict[int, list[TreePlace]] = {}
    for place in places:
        at = place.end + depth
        if place.text is tokens and at >= len(tokens):
            at = place.end + (at - place.end) % (len(tokens) - place.end)
        if at < len(place.text):
            followed.setdefault(place.text[at], []).append(place)
    return followed


def _count_common(tokens: array, place: TreePlace, most: int) -> int:
    """Returns the number of equal tokens before the end of a sequence and before a place."""
    text, end, num = place.text, place.end, len(tokens)
    most = min(most, end, num)
    n = _KEY
    while n < most and text[end - 1 - n] == tokens[num - 1 - n]:
        n += 1
    return n
