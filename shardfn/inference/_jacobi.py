"""Jacobi decoding: a step's draws after rejected drafts are the drafts of the next step. Needs no training.

    y_i <- draw(model(x, y_1 .. y_i-1)) for all i of a block of n, in parallel, until y does not change

A model draws tokens for all places of a block at once, from guesses of the tokens before. Each step makes at least one
more token right, so n steps suffice for n tokens, and fewer where a token does not depend on a wrong guess before. An
engine accepts the drafts that equal the draws, and the draws behind the first wrong draft are guesses of later tokens.

References:
    Santilli et al., Accelerating Transformer Inference for Translation via Parallel Decoding, 2023,
    https://arxiv.org/abs/2305.10427
    Jacobi Forcing: Fast and Accurate Causal Parallel Decoding, 2025, https://arxiv.org/abs/2512.14681
"""

import hashlib
import math
from array import array
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from shardfn.core import raise_all

from ._draft_tree import DraftTree
from ._drafters import Context, repeated


@dataclass(eq=False)
class Jacobi:
    """Drafter of the last step's draws behind the first wrong draft.

    Places without a draw have the tokens of the text from the beginning on.

    Args:
        block: number n of drafts of each step, at most `Limits.drafts`.

    Raises:
        ValueError: `block` is below 1.

    Example:
        >>> drafter, context = Jacobi(4), Context(0, "a", 0, array("q", [5, 6, 7]), 3)
        >>> drafter.propose(context, 4)
        [5, 6, 7, 5]
        >>> drafter.take_rejected(context, [8, 9])
        >>> drafter.propose(context, 4)
        [8, 9, 5, 6]
    """

    block: int = 8

    def __post_init__(self) -> None:
        if type(self.block) is not int or self.block < 1:
            raise ValueError(f"Jacobi: block must be an integer of at least 1, got {self.block!r}.")
        self._guesses: dict[int, tuple[int, list[int]]] = {}  # by sequence, with the number of tokens before

    def propose(self, context: Context, most: int) -> list[int]:
        """Returns the guesses of the last step, and tokens of the text."""
        num, guesses = self._guesses.get(context.serial, (0, []))
        known = guesses if num == len(context.tokens) else []
        most = min(most, self.block)
        return [*known, *repeated(context.tokens, 0, most)][:most]

    def take_rejected(self, context: Context, drawn: Seq[int]) -> None:
        """Keeps the tokens that a step drew behind the first wrong draft, for the places after the context."""
        valid = next((i for i, token in enumerate(drawn) if token < 0), len(drawn))
        self._guesses[context.serial] = len(context.tokens), [*drawn[:valid]]

    def end(self, context: Context) -> None:
        """Forgets the guesses of a sequence."""
        self._guesses.pop(context.serial, None)

    def copy(self) -> "Jacobi":
        """Returns a separate drafter, equal to this drafter."""
        new = Jacobi(self.block)
        new._guesses = dict(self._guesses)
        return new

    def digest(self) -> bytes:
        """Returns a hash of the settings, and of the guesses."""
        found = hashlib.blake2b(f"{self.block}".encode(), digest_size=8)
        for serial, (num, guesses) in sorted(self._guesses.items()):
            found.update(array("q", (serial, num, len(guesses), *guesses)).tobytes())
        return found.digest()


@dataclass(eq=False)
class MultiBlockJacobi:
    """Jacobi decoding of a block at a time, with a block after it in time, and with guesses that were wrong before.

    Guesses reach to the end of the block in progress. Once most of its tokens are known, they reach to the end of the
    next block, too. Draws behind a wrong draft are kept in a pool, as they are often right for later places: where the
    last token is in a draw of the pool, what followed there is a branch of the proposal (rejection recycling).

    Args:
        size: tokens n of a block. A step has at most 2 n drafts, and `Limits.drafts` must have room for them.
        spawn: part of a block that is known before the next block begins.
        pool: number of kept draws, the newest, of each sequence.

    Raises:
        ValueError: lists all values that are out of range.

    Example:
        >>> drafter, context = MultiBlockJacobi(4), Context(0, "a", 0, array("q", [5, 6, 7]), 2)
        >>> drafter.propose(context, 8)
        DraftTree(tokens=(5, 6, 7), parents=(-1, 0, 1), spec=0)
        >>> drafter.take_rejected(context, [7, 9])
        >>> drafter.propose(context, 8)
        DraftTree(tokens=(7, 9, 5, 9), parents=(-1, 0, 1, -1), spec=0)
    """

    size: int = 8
    spawn: float = 0.85
    pool: int = 4

    def __post_init__(self) -> None:
        problems = [] if 0 <= self.spawn <= 1 else [f"spawn must be from 0 to 1, got {self.spawn}"]
        for name, low in (("size", 1), ("pool", 0)):
            if type(value := getattr(self, name)) is not int or value < low:
                problems.append(f"{name} must be an integer of at least {low}, got {value!r}")
        raise_all(ValueError, "MultiBlockJacobi:", problems)
        self._last = Jacobi(2 * self.size)
        self._pools: dict[int, list[list[int]]] = {}  # by sequence

    @property
    def block(self) -> int:
        """Returns the most drafts of a step."""
        return 2 * self.size

    def propose(self, context: Context, most: int) -> DraftTree:
        """Returns the guesses of the last step to the end of a block, then branches from the pool."""
        done = (len(context.tokens) - context.prompt) % self.size
        ahead = self.size - done + (self.size if done >= math.ceil(self.spawn * self.size) else 0)
        tree = DraftTree.chain(self._last.propose(context, min(most, ahead)))
        for drawn in reversed(self._pools.get(context.serial, ())):
            if context.tokens[-1] in drawn[:-1]:
                tree = tree.merge(DraftTree.chain(drawn[drawn.index(context.tokens[-1]) + 1 :]), most)
        return tree

    def take_rejected(self, context: Context, drawn: Seq[int]) -> None:
        """Keeps the tokens that a step drew behind the first wrong draft, as guesses and in the pool."""
        self._last.take_rejected(context, drawn)
        valid = [token for token in drawn if token >= 0]
        if self.pool and len(valid) > 1:
            self._pools[context.serial] = [*self._pools.get(context.serial, ()), valid][-self.pool :]

    def end(self, context: Context) -> None:
        """Forgets the guesses of a sequence."""
        self._last.end(context)
        self._pools.pop(context.serial, None)

    def copy(self) -> "MultiBlockJacobi":
        """Returns a separate drafter, equal to this drafter."""
        new = MultiBlockJacobi(self.size, self.spawn, self.pool)
        new._last, new._pools = self._last.copy(), {serial: [*x] for serial, x in self._pools.items()}
        return new

    def digest(self) -> bytes:
        """Returns a hash of the settings, the guesses and the pools."""
        content = f"{self} {sorted(self._pools.items())}".encode() + self._last.digest()
        return hashlib.blake2b(content, digest_size=8).digest()
