"""Drafters for tests: right ones, wrong ones, and ones that are right except at one place."""

import hashlib
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from shardfn.inference import Context, Drafter, DraftTree, Ngram, Suffix


@dataclass(frozen=True)
class Random:
    """Proposes tokens that follow from a hash of the text."""

    vocab: int

    def propose(self, context: Context, most: int) -> Sequence[int] | DraftTree:
        return [byte % self.vocab for byte in _hash(context, most)]

    def end(self, context: Context) -> None:
        pass

    def copy(self) -> "Random":
        return self

    def digest(self) -> bytes:
        return repr(self).encode()


@dataclass(frozen=True)
class Seeing(Random):
    """Proposes tokens that follow from a hash of the hidden states, and keeps what it has seen.

    Attributes:
        wants_hidden: numbers of layers.
        hidden_window: the most states.
        seen: tokens, and the states behind the draws of the last tokens.
    """

    wants_hidden: tuple[int, ...] = (2,)
    hidden_window: int = 1
    seen: list[tuple[list[int], tuple[Tensor, ...]]] = field(default_factory=list, hash=False, repr=False)

    def propose(self, context: Context, most: int) -> list[int]:
        if context.hidden is None:
            return []
        self.seen.append((context.tokens.tolist(), context.states))
        data = hashlib.blake2b(context.hidden.numpy().tobytes(), digest_size=64).digest()
        return [byte % self.vocab for byte in data[:most]]


@dataclass(frozen=True)
class Bush(Random):
    """Proposes trees of tokens that follow from a hash of the text: most siblings differ, and some are equal.

    Attributes:
        truth: prompt and drawn tokens of choices, by name and choice; true ones are the last siblings.
    """

    truth: Mapping[tuple[str, int], Sequence[int]] = field(default_factory=dict, hash=False)

    def propose(self, context: Context, most: int) -> DraftTree:
        data = _hash(context, most)
        tokens = [byte % self.vocab for byte in data]
        parents = [data[-1 - i] % (i + 1) - 1 for i in range(most)]
        known, at = len(context.tokens), -1
        for token in self.truth.get((context.name, context.choice), ())[known : known + most]:
            children = [i for i, parent in enumerate(parents) if parent == at]
            if not children:
                break
            at = children[-1]
            tokens[at] = token
        return DraftTree(tuple(tokens), tuple(parents))


@dataclass(frozen=True)
class Adversary:
    """Proposes the true tokens of each choice, but for a wrong one at a place; None is no place.

    Attributes:
        vocab: of tokens.
        truth: prompt and drawn tokens of each choice, by name and choice.
        wrong: the place among the proposals.
    """

    vocab: int
    truth: Mapping[tuple[str, int], Sequence[int]] = field(hash=False)
    wrong: int | None

    def propose(self, context: Context, most: int) -> list[int]:
        known = len(context.tokens)
        whole = self.truth.get((context.name, context.choice), ())
        drafts = list(whole[known : known + most])
        if self.wrong is not None and self.wrong < len(drafts):
            drafts[self.wrong] = (drafts[self.wrong] + 1) % self.vocab
        return drafts

    def end(self, context: Context) -> None:
        pass

    def copy(self) -> "Adversary":
        return self

    def digest(self) -> bytes:
        return f"{self.vocab} {self.wrong} {sorted(self.truth.items())}".encode()


def _hash(context: Context, most: int) -> bytes:
    data = hashlib.blake2b(context.tokens.tobytes(), digest_size=64).digest()
    return (data * (1 + most // len(data)))[:most]


def context(*tokens: int, prompt: int = 1, serial: int = 0, salt: bytes = b"") -> Context:
    return Context(serial, "a", 0, array("q", tokens), prompt, salt)


# They propose ids below 5.
DRAFTERS: list[Drafter] = [Ngram(longest=3, shortest=1), Suffix(most_tokens=30), Random(5), Bush(5)]
