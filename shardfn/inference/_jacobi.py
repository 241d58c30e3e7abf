"""Jacobi decoding: a step's draws after rejected drafts are the drafts of the next step. Needs no training.

    y_i <- draw(model(x, y_1 .. y_i-1)) for all i of a block of n, in parallel, until y does not change

A model draws tokens for all places of a block at once, from guesses of the tokens before. Each step makes at least one
more token right, so n steps suffice for n tokens, and fewer where a token does not depend on a wrong guess before. An
engine accepts the drafts that equal the draws, and the draws behind the first wrong draft are guesses of later tokens.

References:
    Santilli et al., Accelerating Transformer Inference for Translation via Parallel Decoding, 2023,
    https://arxiv.org/abs/2305.10427
"""

import hashlib
from array import array
from collections.abc import Sequence as Seq
from dataclasses import dataclass

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
