"""Places of requests' texts in their grammars, by llguidance: the tokens that may come next.

A matcher is a function of its grammar and tokens. Each choice has a separate matcher, as copies share a cache whose
limits one copy could exhaust for the rest. All limits count steps, and none reads a clock, so that ranks agree.

References:
    llguidance, https://github.com/guidance-ai/llguidance
"""

import importlib
import importlib.util
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool

from ._detokenize import Detokenizer
from ._draft_tree import NO_DRAFTS, DraftTree
from ._grammar import Grammar, check_grammar, list_json_rules

# About 50 of the first and 14 of the second take a microsecond.
_LIMITS = {"initial_lexer_fuel": 200_000, "step_lexer_fuel": 50_000, "step_max_items": 20_000, "verbose_errors": False}
Allowed = Bool[np.ndarray, " vocab"]


class Matcher:
    """Place of a single choice's text in its grammar.

    Attributes:
        allowed: permitted next tokens. None are permitted after an error, so that no token is drawn then.
    """

    allowed: Allowed

    def __init__(self, inner: Any, vocab: int, stop_tokens: Sequence[int]) -> None:
        self._inner, self._vocab, self._stop_tokens = inner, vocab, list(stop_tokens)
        self.allowed = self._compute_next()

    @property
    def problem(self) -> str:
        """Returns the error that the matcher met, or empty."""
        return self._inner.get_error().partition("\n<")[0].strip()

    def take(self, token: int, *, last: bool = False) -> str | None:
        """Advances by a token.

        Args:
            token: token that was drawn.
            last: whether no further token is drawn.

        Returns:
            "stop" where the text is complete, and nothing can follow. "error" where the token is not in the grammar.
        """
        if self._inner.is_error():
            return "error"  # a draft before the token was accepted, and met a limit
        if token in self._stop_tokens:
            return None  # the text ends before the token
        if not self._inner.consume_token(token) or self._inner.is_error():
            self.allowed = np.zeros_like(self.allowed)
            return "error"
        if self._inner.is_stopped():
            return "stop"
        if last:
            return None
        self.allowed = self._compute_next()
        return "stop" if self._accepts and not self.allowed.any() else None

    def _compute_next(self) -> Allowed:
        allowed, self._accepts = _compute_mask(self._inner, self._vocab, self._stop_tokens)
        return allowed


class MatcherAhead:
    """Matcher that goes along drafts, and returns.

    The limits of the choice's matcher count only drawn tokens, since nothing is shared with this matcher, so that
    drafts change no end. Where this matcher meets a limit, the choice has no drafts any more.
    """

    def __init__(self, inner: Any, vocab: int, stop_tokens: Sequence[int]) -> None:
        self._inner, self._vocab, self._stop_tokens = inner, vocab, list(stop_tokens)
        self._num = 0  # tokens that were drawn
        self._path: list[int] = []  # drafts that were consumed after the drawn tokens

    def cut(self, tokens: Sequence[int], allowed: Allowed, drafts: DraftTree) -> tuple[DraftTree, list[Allowed]]:
        """Returns the drafts that the grammar permits.

        Args:
            tokens: drawn tokens so far: the tokens of the last call, and further tokens.
            allowed: permitted next tokens.
            drafts: drafts that may branch.

        Returns:
            The drafts, and for each draft the permitted next tokens.
        """
        kept: DraftTree = NO_DRAFTS
        masks: list[Allowed] = []
        places = {-1: -1}  # of kept drafts
        if self._is_usable and not self._inner.consume_tokens(list(tokens[self._num :])):
            return kept, masks
        self._num = len(tokens)
        for i, (token, parent) in enumerate(zip(drafts.tokens, drafts.parents, strict=True)):
            at = places.get(parent)
            if at is None or not (allowed if at < 0 else masks[at])[token]:
                continue
            tree = DraftTree((*kept.tokens, token), (*kept.parents, at))
            if (after := self._compute_after(tree)) is None:
                break
            places[i], kept = len(kept), tree
            masks.append(after)
        self._go_back(0)
        return kept, masks

    @property
    def _is_usable(self) -> bool:
        return not self._inner.is_error()

    def _compute_after(self, tree: DraftTree) -> Allowed | None:
        """Returns the tokens that may come after the last draft: none where the text ends. None beyond a limit."""
        path = tree.ancestors(len(tree) - 1)
        shared = 0
        while shared < len(self._path) and self._path[shared] == path[shared]:
            shared += 1
        self._go_back(shared)
        ends = np.zeros(self._vocab, bool)
        if tree.tokens[-1] in self._stop_tokens:
            return ends
        for draft in path[shared:]:
            if not self._is_usable or not self._inner.consume_token(tree.tokens[draft]):
                return None
            self._path.append(draft)
        allowed = ends if self._inner.is_stopped() else _compute_mask(self._inner, self._vocab, self._stop_tokens)[0]
        return allowed if self._is_usable else None

    def _go_back(self, num: int) -> None:
        """Goes back to the state after the first `num` drafts of the path."""
        if self._is_usable and len(self._path) > num:
            self._inner.rollback(len(self._path) - num)
        del self._path[num:]


def _compute_mask(inner: Any, vocab: int, stop_tokens: list[int]) -> tuple[Allowed, bool]:
    """Returns the permitted next tokens, and whether the text is complete."""
    bits = np.unpackbits(np.frombuffer(inner.compute_bitmask(), np.uint8), bitorder="little").view(bool)
    if inner.is_error():
        bits[:] = False
    allowed, accepts = bits[:vocab], bool(bits[_choose_end(vocab)])
    allowed[stop_tokens] = accepts
    return allowed, accepts


class Compiler:
    """Compiler of grammars for a vocabulary.

    Args:
        detokenizer: detokenizer of the tokenizer.
        vocab: number of logits.

    Raises:
        ImportError: llguidance is missing.
        ValueError: tokens of the tokenizer have no bytes by themselves.
    """

    def __init__(self, detokenizer: Detokenizer, vocab: int) -> None:
        if importlib.util.find_spec("llguidance") is None:
            raise ImportError("grammars are compiled by llguidance, which is missing: pip install 'shardfn[text]'")
        if detokenizer.bytes_of is None:
            raise ValueError(
                "grammar needs a vocabulary of byte level, byte fallback or metaspace, but the text of a token of this"
                " tokenizer depends on the tokens next to it."
            )
        self._library: Any = importlib.import_module("llguidance")
        self._vocab = vocab
        self._tokenizer = _make_tokenizer(self._library, detokenizer, vocab)

    def compile(self, grammar: Grammar, stop_tokens: Sequence[int]) -> Matcher:
        """Returns a matcher before its first token.

        Raises:
            ValueError: the grammar is wrong, too large, or has no text that the vocabulary can write.
        """
        check_grammar(grammar)
        try:
            inner = self._compile_grammar(grammar)
        except ValueError as error:
            raise ValueError(f"grammar: {error}") from error
        made = Matcher(inner, self._vocab, stop_tokens)
        if not made.allowed.any():
            raise ValueError(
                f"grammar: {_shorten_problem(made.problem) or 'no token of the vocabulary may begin a text'}."
            )
        return made

    def ahead(self, grammar: Grammar, stop_tokens: Sequence[int]) -> MatcherAhead:
        """Returns a matcher for drafts, of a grammar that was compiled before."""
        return MatcherAhead(self._compile_grammar(grammar), self._vocab, stop_tokens)

    def _compile_grammar(self, grammar: Grammar) -> Any:
        make = getattr(self._library.LLMatcher, f"grammar_from_{grammar.kind}")
        is_any = grammar.kind == "json_schema" and grammar.text.strip() == "true"
        text = "{}" if is_any else grammar.text  # the same schema, as an object
        rules = list_json_rules(json.loads(text)) if grammar.kind == "json_schema" else {}
        made = make(text, rules) if rules else make(text)
        limits = self._library.LLParserLimits(**_LIMITS)
        return self._library.LLMatcher(self._tokenizer, made, limits=limits, log_level=0)


def _shorten_problem(problem: str) -> str:
    return " ".join(problem.split())[:300].rstrip(".")


def _choose_end(vocab: int) -> int:
    """Returns the id of an undrawn token that ends texts. Its bit is set where the text is complete."""
    return vocab + 256


def _make_tokenizer(library: Any, detokenizer: Detokenizer, vocab: int) -> Any:
    """Returns the vocabulary, with a further token for each byte, so that every text has tokens.

    No model draws the further tokens.
    """
    assert detokenizer.bytes_of is not None
    found = [detokenizer.bytes_of(token) for token in range(vocab)]
    tokens = [b"\xff<[%d]>" % i if x is None else x for i, x in enumerate(found)]
    single = {x for x in found if x is not None and len(x) == 1}
    fakes = [bytes([i]) if bytes([i]) not in single else b"\xff<[%d]>" % (vocab + i) for i in range(256)]
    end = _choose_end(vocab)
    special = [i for i, x in enumerate(found) if x is None]
    special += [vocab + i for i, x in enumerate(fakes) if len(x) > 1]
    vocabulary = _Vocabulary([*tokens, *fakes, b"\xff<end>"], [*special, end], end)
    made = library.LLTokenizer(library.TokenizerWrapper(vocabulary), n_vocab=end + 1, eos_token=[end])
    vocabulary.tokenize = made.greedy_tokenize
    return made


class _Vocabulary:
    """Vocabulary in the form that llguidance reads."""

    def __init__(self, tokens: list[bytes], special: list[int], end: int) -> None:
        self.tokens, self.special_token_ids, self.eos_token_id = tokens, special, end
        self.bos_token_id = None
        self.tokenize: Any = None

    def __call__(self, text: str) -> list[int]:
        """Returns the tokens of a text that a grammar forces, the longest tokens first."""
        if not isinstance(text, str):
            raise TypeError("text is not a str")  # llguidance then passes strings
        return self.tokenize(text) if self.tokenize is not None else []
