"""Tokens that the choices in progress may draw: by grammars, which also end complete texts, and by options with a rule.

A row's tokens follow from the tokens before the row's place, drafts included. So they do not depend on batches,
preemption or drafts.
"""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool

from ._detokenize import Detokenizer
from ._draft_tree import DraftTree
from ._drafters import Context
from ._hooks import Choice, Ends, EngineHooks, SampledToken, list_drawing_rows
from ._matchers import Allowed, Compiler, Matcher, MatcherAhead
from ._options import Rule
from ._requests import Request, list_rules
from ._schedule import Output
from ._state import State


class Constraints:
    """Hooks of an engine for choices that have a grammar.

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
        self._ruled: dict[Choice, list[Rule]] = {}

    @property
    def hooks(self) -> EngineHooks:
        """Returns the engine hooks that restrict tokens by grammars."""
        hooks = EngineHooks(
            admit=self.compile,
            begin=self.begin,
            take=self.drop,
            columns=lambda state, plan: {"allowed": self.allowed(state, len(plan.rows))},
        )
        # Without a tokenizer there are no grammars.
        return hooks if self._detokenizer is None else hooks._replace(ends=lambda drawn, ends: self.take(drawn))

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

    def compile(self, request: Request) -> tuple[Request, list[Matcher]]:
        """Returns a request with a matcher for each choice, or with no matcher if the request has no grammar.

        Raises:
            ImportError: llguidance is missing.
            ValueError: the grammar is refused.
        """
        how = request.sampling
        if how.grammar is None:
            return request, []
        self.prepare()
        assert self._compiler is not None
        return request, [self._compiler.compile(how.grammar, how.stop_tokens) for _ in range(how.n)]

    def begin(self, name: str, compiled: tuple[Request, Sequence[Matcher]]) -> None:
        """Takes a request that was added, and the request's matchers."""
        request, matchers = compiled
        if rules := list_rules(request.sampling):
            self._ruled.update({(name, choice): rules for choice in range(request.sampling.n)})
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
        for output in outputs if self._matchers or self._ruled else ():
            if output.finish_reason is not None:
                for kept in (self._matchers, self._ahead, self._after, self._ruled):
                    kept.pop((output.name, output.choice), None)

    def allowed(self, state: State, rows: int) -> Bool[np.ndarray, "rows vocab"] | None:
        """Returns the tokens that each of the next plan's rows may draw, padding included.

        None if all rows may draw all tokens.
        """
        found: dict[int, Allowed] = {}
        for one in list_drawing_rows(state) if self._matchers or self._ruled else ():
            mask = self._find_mask(one.choice, one.draft)
            for rule in self._ruled.get(one.choice, ()):
                if len(forbidden := rule(one.request.sampling, one.output, self._vocab)):
                    mask = np.ones(self._vocab, bool) if mask is None else mask.copy()
                    mask[np.asarray(forbidden)] = False
            if mask is not None:
                found[one.row] = mask
        self._after.clear()
        if not found:
            return None
        allowed = np.ones((rows, self._vocab), bool)
        for row, mask in found.items():
            allowed[row] = mask
        return allowed

    def _find_mask(self, choice: Choice, draft: int) -> Allowed | None:
        """Returns the tokens that a grammar permits after a draft, or after the last known token. None is all."""
        if choice not in self._matchers:
            return None
        if draft < 0:
            return self._matchers[choice].allowed
        after = self._after.get(choice, [])
        return after[draft] if draft < len(after) else None
