"""Grammars of all choices in progress: permitted tokens, and ends of complete texts."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool

from ._detokenize import Detokenizer
from ._draft_tree import DraftTree
from ._drafters import Context
from ._hooks import EngineHooks
from ._matchers import Allowed, Compiler, Matcher, MatcherAhead
from ._requests import Request
from ._sampled_tokens import Choice, Ends, SampledToken
from ._schedule import Output
from ._state import PrefillChunk, State


class Constraints:
    """EngineHooks of the tokens of choices that have a grammar.

    Args:
        detokenizer: detokenizer of the engine's tokenizer.
        vocab: number of logits.
    """

    def __init__(self, detokenizer: Detokenizer | None, vocab: int) -> None:
        self._detokenizer, self._vocab = detokenizer, vocab
        self._compiler: Compiler | None = None
        self._matchers: dict[Choice, Matcher] = {}
        self._ahead: dict[Choice, MatcherAhead] = {}  # of choices that had drafts
        self._after: dict[Choice, list[Allowed]] = {}  # of the next plan's drafts

    @property
    def hooks(self) -> EngineHooks:
        """Returns the hooks."""
        return EngineHooks(
            admit=self.compile,
            begin=self.begin,
            ends=lambda drawn, ends: self.take(drawn),
            take=self.drop,
            columns=lambda state, plan: {"allowed": self.allowed(state, len(plan.rows))},
        )

    def prepare(self) -> None:
        """Makes the compiler, a second of work where the vocabulary is large.

        Raises:
            ImportError: llguidance is missing.
            ValueError: the engine has no tokenizer, or a tokenizer whose tokens have no bytes.
        """
        if self._detokenizer is None:
            raise ValueError("grammar needs the engine's tokenizer: Engine(tokenizer=...).")
        if self._compiler is None:
            self._compiler = Compiler(self._detokenizer, self._vocab)

    def compile(self, request: Request) -> list[Matcher]:
        """Returns a matcher for each choice of a request, or an empty list for a request without a grammar.

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

    def take(self, drawn: Sequence[SampledToken]) -> Ends:
        """Takes drawn tokens, and returns the ends by grammars."""
        ends: Ends = {}
        ended = set[Choice]()  # by these tokens
        for one in drawn:
            choice = one.place[:2]
            matcher = None if choice in ended else self._matchers.get(choice)
            if matcher is not None and (end := matcher.take(one.token, last=one.last)):
                ends[one.place] = end
                ended.add(choice)
        return ends

    def cut(self, context: Context, drafts: DraftTree) -> DraftTree:
        """Returns the drafts that the grammar of a choice permits, in the order given.

        Drafts below an excluded draft are excluded, too.
        """
        choice, how = (context.name, context.choice), context.sampling
        assert self._compiler is not None and how.grammar is not None
        if choice not in self._ahead:
            self._ahead[choice] = self._compiler.ahead(how.grammar, how.stop_tokens)
        tokens, allowed = context.tokens[context.prompt :].tolist(), self._matchers[choice].allowed
        kept, self._after[choice] = self._ahead[choice].cut(tokens, allowed, drafts)
        return kept

    def drop(self, outputs: Sequence[Output]) -> None:
        """Forgets the choices that have ended."""
        for output in outputs:
            if output.finish_reason is not None:
                for kept in (self._matchers, self._ahead, self._after):
                    kept.pop((output.name, output.choice), None)

    def allowed(self, state: State, rows: int) -> Bool[np.ndarray, "rows vocab"] | None:
        """Returns the tokens that each of the next plan's rows may draw, padding included.

        None if all rows may draw all tokens.
        """
        found: dict[int, Allowed] = {}
        for chunk, one, first in state.rows_in_flight() if self._matchers else ():
            if chunk.positions and chunk.positions[-1] + 1 >= len(one.tokens):
                masks = self._make_masks((one.name, one.choice), chunk)
                found.update(enumerate(masks, first + len(chunk.positions) - len(masks)))
        self._after.clear()
        if not found:
            return None
        allowed = np.ones((rows, self._vocab), bool)
        for row, mask in found.items():
            allowed[row] = mask
        return allowed

    def _make_masks(self, choice: Choice, chunk: PrefillChunk) -> list[Allowed]:
        """Returns the masks of a chunk's last rows: of the last known token, and of its drafts."""
        if choice not in self._matchers:
            return []
        return [self._matchers[choice].allowed, *self._after.get(choice, [])[: len(chunk.drafts)]]
