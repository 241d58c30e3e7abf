"""Drafts that branch: a tree of guessed tokens below the last known token."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class DraftTree:
    """Guessed tokens, each with the place of the token before.

    At each place the child that equals the drawn token is followed, so that siblings are guesses of one place.

    Args:
        tokens: tokens of the drafts. The first drafts are kept where there is no room for all.
        parents: place of each draft's parent among the drafts. -1 is the last known token. Parents come before
            children.
        spec: number of last entries that are [SPEC] tokens, not drafts (`SpecTokenDrafter`).

    Raises:
        ValueError: tokens and parents differ in number, or a parent does not come before its child.

    Example:
        >>> tree = DraftTree((5, 6, 7, 8), (-1, 0, 0, 2))  # 5, then 6; or 5, 7, 8
        >>> tree.depths, tree.path([5, 7, 0, 9, 0]), tree.branch(3)
        ((1, 2, 2, 3), [0, 2], [5, 7, 8])
    """

    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    spec: int = 0

    def __post_init__(self) -> None:
        if len(self.tokens) != len(self.parents) or not all(-1 <= p < i for i, p in enumerate(self.parents)):
            raise ValueError(
                "each token of a draft must have one parent: -1, or the index of an earlier token. Got the parents"
                f" {self.parents} of the tokens {self.tokens}."
            )

    @classmethod
    def chain(cls, tokens: Seq[int]) -> "DraftTree":
        """Returns a tree of drafts that follow one another.

        Example:
            >>> DraftTree.chain([5, 6])
            DraftTree(tokens=(5, 6), parents=(-1, 0), spec=0)
        """
        return cls(tuple(tokens), tuple(range(-1, len(tokens) - 1)))

    def __len__(self) -> int:
        """Returns the number of entries: drafts, and [SPEC] tokens."""
        return len(self.tokens)

    @property
    def num_drafts(self) -> int:
        """Returns the number of drafts."""
        return len(self.tokens) - self.spec

    def add_spec_tokens(self, token: int) -> "DraftTree":
        """Returns the tree with a [SPEC] token after the last known token, and after each draft. No entry sees them.

        Example:
            >>> DraftTree.chain([5]).add_spec_tokens(99)
            DraftTree(tokens=(5, 99, 99), parents=(-1, -1, 0), spec=2)
        """
        num = len(self)
        return DraftTree(self.tokens + (token,) * (num + 1), self.parents + tuple(range(-1, num)), num + 1)

    def find_spec_token(self, draft: int) -> int | None:
        """Returns the place of the [SPEC] token after a draft, or after the last known token for -1. None: no such."""
        place = self.num_drafts + draft + 1
        return place if place < len(self) else None

    @cached_property
    def branches(self) -> bool:
        """Returns whether a draft does not follow the draft before."""
        return self.parents != tuple(range(-1, len(self.tokens) - 1))

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """Returns the distance of each draft from the last known token."""
        found: list[int] = []
        for parent in self.parents:
            found.append(1 + (found[parent] if parent >= 0 else 0))
        return tuple(found)

    @property
    def height(self) -> int:
        """Returns the most drafts that can be accepted."""
        return max(self.depths[: self.num_drafts], default=0)

    def path(self, drawn: Seq[int]) -> list[int]:
        """Returns the drafts that are accepted.

        Args:
            drawn: token drawn after the last known token, and tokens drawn after each draft.
        """
        found, at = [], -1
        for i, (token, parent) in enumerate(zip(self.tokens, self.parents, strict=True)):
            if parent == at and token == drawn[at + 1]:
                found.append(at := i)
        return found

    def find_rejected(self, drawn: Seq[int]) -> list[int]:
        """Returns the tokens drawn along the first branch below the accepted drafts, behind its wrong first draft.

        Args:
            drawn: see `path`.

        Example:
            >>> DraftTree.chain([5, 6, 7]).find_rejected([5, 9, 8, 4])  # 5 is accepted, and 9 is the next token
            [8, 4]
        """
        at, found = max(self.path(drawn), default=-1), list[int]()
        for i, parent in enumerate(self.parents):
            if parent == at:
                at = i
                found.append(drawn[i + 1])
        return found

    def ancestors(self, draft: int) -> list[int]:
        """Returns the drafts from the first to a draft."""
        found = []
        while draft >= 0:
            found.append(draft)
            draft = self.parents[draft]
        return found[::-1]

    def branch(self, draft: int) -> list[int]:
        """Returns the tokens from the first draft to a draft, or to the draft before a [SPEC] token."""
        return [self.tokens[i] for i in self.ancestors(draft) if i < self.num_drafts]

    def merge(self, other: "DraftTree", most: int) -> "DraftTree":
        """Returns the drafts of this tree, then those of another that this tree lacks, at most `most`.

        Example:
            >>> DraftTree.chain([5, 6]).merge(DraftTree.chain([5, 7, 8]), 4)
            DraftTree(tokens=(5, 6, 7, 8), parents=(-1, 0, 0, 2), spec=0)
        """
        tokens, parents = [*self.tokens], [*self.parents]
        known = {pair: i for i, pair in reversed([*enumerate(zip(parents, tokens, strict=True))])}
        places = {-1: -1}  # of the other tree's drafts
        for i, (token, parent) in enumerate(zip(other.tokens, other.parents, strict=True)):
            pair = places[parent], token
            if pair not in known:
                known[pair] = len(tokens)
                tokens.append(token)
                parents.append(pair[0])
            places[i] = known[pair]
        return DraftTree(tuple(tokens), tuple(parents)).first(most)

    def first(self, num: int) -> "DraftTree":
        """Returns only the first entries."""
        num = max(0, num)
        if num >= len(self):
            return self
        return DraftTree(self.tokens[:num], self.parents[:num], max(0, num - self.num_drafts))


NO_DRAFTS = DraftTree()
