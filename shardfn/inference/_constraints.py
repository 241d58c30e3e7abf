"""The grammars of all choices in progress: which tokens they may draw, and where their texts are complete."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool

from ._detokenize import Detokenizer
from ._drawn import Drawn, Ends
from ._follower import Follower
from ._matchers import Compiler, Matcher
from ._requests import Request
from ._schedule import Output
from ._state import State


class Constraints:
    """Follows the tokens of choices that have a grammar.

    Args:
        detokenizer: of the engine's tokenizer.
        vocab: the number of logits.
    """

    def __init__(self, detokenizer: Detokenizer | None, vocab: int) -> None:
        self._detokenizer, self._vocab = detokenizer, vocab
        self._compiler: Compiler | None = None
        self._matchers: dict[tuple[str, int], Matcher] = {}

    @property
    def follower(self) -> Follower:
        """The hooks."""
        return Follower(
            admit=self.compile,
            begin=self.begin,
            ends=lambda drawn, ends: self.take(drawn),
            take=self.drop,
            columns=lambda state, plan: {"allowed": self.allowed(state, len(plan.rows))},
        )

    def prepare(self) -> None:
        """Makes the compiler, which takes a second where the vocabulary is large.

        Raises:
            ImportError: llguidance is missing.
            ValueError: the engine has no tokenizer, or one whose tokens have no bytes.
        """
        if self._detokenizer is None:
            raise ValueError("grammar needs the engine's tokenizer: Engine(tokenizer=...).")
        if self._compiler is None:
            self._compiler = Compiler(self._detokenizer, self._vocab)

    def compile(self, request: Request) -> list[Matcher]:
        """A matcher for each choice of a request; an empty list if it has no grammar.

        Raises:
            ImportError: llguidance is missing.
            ValueError: the grammar is refused.
        """
        how = request.sampling
        if how.grammar is None:
            return []
        self.prepare()
        assert self._compiler is not None
        return [self._compiler.compile(how.grammar, how.stop_tokens) for _ in range(how.n)]

    def begin(self, name: str, matchers: Sequence[Matcher]) -> None:
        """Takes the matchers of a request that was added."""
        self._matchers.update({(name, choice): one for choice, one in enumerate(matchers)})

    def take(self, drawn: Sequence[Drawn]) -> Ends:
        """Takes tokens; the ends by grammars."""
        ends = {}
        for one in drawn:
            matcher = self._matchers.get(one.place[:2])
            if matcher is not None and (end := matcher.take(one.token, last=one.last)):
                ends[one.place] = end
        return ends

    def drop(self, outputs: Sequence[Output]) -> None:
        """Forgets the choices that have ended."""
        for output in outputs:
            if output.finish is not None:
                self._matchers.pop((output.name, output.choice), None)

    def allowed(self, state: State, rows: int) -> Bool[np.ndarray, "rows vocab"] | None:
        """The tokens that each of the next plan's rows may draw, padding included; None if all may draw all."""
        found: dict[int, Matcher] = {}
        at = 0
        for chunk in state.flight if self._matchers else ():
            one = state.sequences[chunk.serial]
            matcher = self._matchers.get((one.name, one.choice))
            if matcher is not None and chunk.positions and chunk.positions[-1] + 1 >= len(one.tokens):
                found[at + len(chunk.positions) - 1] = matcher
            at += len(chunk.positions)
        if not found:
            return None
        allowed = np.ones((rows, self._vocab), bool)
        for row, matcher in found.items():
            allowed[row] = matcher.allowed
        return allowed
