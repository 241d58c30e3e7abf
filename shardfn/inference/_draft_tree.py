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

    Raises:
        ValueError: tokens and parents differ in number, or a parent does not come before its child.

    Example:
        >>> tree = DraftTree((5, 6, 7, 8), (-1, 0, 0, 2))  # 5, then 6; or 5, 7, 8
        >>> tree.depths, tree.path([5, 7, 0, 9, 0]), tree.branch(3)
        ((1, 2, 2, 3), [0, 2], [5, 7, 8])
    """

    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()

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
            DraftTree(tokens=(5, 6), parents=(-1, 0))
        """
        return cls(tuple(tokens), tuple(range(-1, len(tokens) - 1)))

    def __len__(self) -> int:
        """Returns the number of drafts."""
        return len(self.tokens)

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
        return max(self.depths, default=0)

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

    def ancestors(self, draft: int) -> list[int]:
        """Returns the drafts from the first to a draft."""
        found = []
        while draft >= 0:
            found.append(draft)
            draft = self.parents[draft]
        return found[::-1]

    def branch(self, draft: int) -> list[int]:
        """Returns the tokens from the first draft to a draft."""
        return [self.tokens[i] for i in self.ancestors(draft)]

    def first(self, num: int) -> "DraftTree":
        """Returns only the first drafts."""
        return self if num >= len(self) else DraftTree(self.tokens[: max(0, num)], self.parents[: max(0, num)])


NO_DRAFTS = DraftTree()
