"""Covers an engine's requests with grammars: complete texts, errors of one alone, and equal tokens in company."""

import json
import pathlib
import re
from typing import Any

import pytest

from shardfn.inference import Completion, Engine, Grammar, Sampling
from tests.inference.stories import TOKENS, model
from tests.inference.test_matchers import HARD
from tests.inference.test_stories import LIMITS, runner

pytest.importorskip("llguidance")
WORDS = Grammar.regex("(ab )*z")


def engine(**changes: Any) -> Engine:
    one = model(tie_embeddings=True)
    given: dict[str, Any] = {"tokenizer": TOKENS} | changes
    return Engine(one.decoder, one.params[0], runner=runner("gpt2"), limits=LIMITS, **given)


def test_a_text_ends_where_its_grammar_is_complete() -> None:
    one = engine()
    made = one.generate([[1, 2], [3], [0, 0]], [Sampling(max_tokens=12, seed=i, grammar=WORDS) for i in range(3)])
    assert {c.finish_reason for c in made} <= {"stop", "length"} and "stop" in {c.finish_reason for c in made}
    for c in made:
        assert c.finish_reason == "length" or c.text.endswith("z")
        assert c.text.replace("ab ", "") in ("z", "", "a", "ab")
    assert one._constraints._matchers == {} and one.stats.counts["held"] == 0


def test_log_probabilities_are_those_of_the_raw_logits() -> None:
    [free] = engine().generate([[1, 2]], Sampling(max_tokens=1, temperature=0.0))
    [bound] = engine().generate([[1, 2]], Sampling(max_tokens=1, temperature=0.0, grammar=WORDS))
    assert bound.tokens != free.tokens and bound.logprobs[0] < free.logprobs[0]


@pytest.mark.nightly
def test_choices_and_company_change_no_token() -> None:
    how = Sampling(max_tokens=9, temperature=50.0, seed=3, n=3, grammar=WORDS, repetition_penalty=1.3)
    [alone] = engine().generate([[1, 2]], how)
    others = [Sampling(max_tokens=9, seed=7), how, Sampling(max_tokens=5, seed=1, grammar=HARD)]
    made = engine().generate([[4, 4], [1, 2], [1, 2]], others)
    assert made[1] == alone and len({tuple(c.tokens) for c in alone}) > 1
    assert made[0] == engine().generate([[4, 4]], others[0])[0]


def test_an_error_of_a_matcher_ends_its_request_alone() -> None:
    hard = Sampling(max_tokens=14, temperature=100.0, grammar=HARD)
    one = engine()
    bad, good = one.generate([[1, 2], [1, 2]], [hard, Sampling(max_tokens=9, seed=3, grammar=WORDS)])
    assert bad.finish_reason == "error" and 1 < len(bad.tokens) < 14
    assert good == engine().generate([[1, 2]], Sampling(max_tokens=9, seed=3, grammar=WORDS))[0]
    assert one.idle and one.stats.counts["held"] == 0 and one._constraints._matchers == {}


def test_a_token_outside_the_grammar_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    from shardfn.inference._matchers import Matcher

    take, taken = Matcher.take, []

    def third(self: Matcher, token: int, *, last: bool = False) -> str | None:
        taken.append(token)
        return "error" if len(taken) == 3 else take(self, token, last=last)

    [whole] = engine().generate([[1, 2]], Sampling(max_tokens=9, seed=3, grammar=Grammar.regex("(ab )*")))
    monkeypatch.setattr(Matcher, "take", third)
    [cut] = engine().generate([[1, 2]], Sampling(max_tokens=9, seed=3, grammar=Grammar.regex("(ab )*")))
    assert cut.finish_reason == "error" and cut.tokens == whole.tokens[:2] and whole.text.startswith(cut.text)


def test_refusals_change_nothing() -> None:
    one = engine()
    for grammar, words in ((Grammar.regex("[0"), "grammar: "), (Grammar.regex("Q"), "no token of the vocabulary")):
        with pytest.raises(ValueError, match=words):
            one.add([1], Sampling(grammar=grammar))
        with pytest.raises(ValueError, match=words):
            one.generate([[1], [2]], [Sampling(), Sampling(grammar=grammar)])
    assert one.idle and one.core.requests == {}
    for n, grammar in ((17, WORDS), (5, Grammar.regex("a" * 60000))):
        with pytest.raises(ValueError, match=f"n is {n}, and the grammar has .* n must be at most 16"):
            one.add([1], Sampling(n=n, grammar=grammar))
    with pytest.raises(ValueError, match=r"grammar needs the engine's tokenizer: Engine\(tokenizer="):
        engine(tokenizer=None).add([1], Sampling(grammar=WORDS))


def test_a_refused_or_cancelled_request_leaves_no_matcher() -> None:
    one = engine()
    one.add([1], Sampling(max_tokens=9, grammar=WORDS, n=2), name="a")
    one.step()
    one.cancel("a")
    one.core.drain()
    one.add([1], Sampling(grammar=WORDS, n=2), name="b")
    told = one.step()
    ends = {(t.name, t.choice): t.finish_reason for t in told}
    # The step before has drawn a token of each choice of "a", by which a choice may end.
    assert ends[("a", 0)] in ("stop", "cancelled") and ends[("a", 1)] in ("stop", "cancelled")
    assert [t.position for t in told if t.name == "a" and t.token is not None] == [1, 1]
    assert ends[("b", 0)] == ends[("b", 1)] == "refused"
    assert one._constraints._matchers == {}


@pytest.mark.nightly
def test_schemas_of_json() -> None:
    tokens = [bytes([i]) for i in b'{}":,ab 1'] + [b'"a"', None]
    one = engine(tokenizer=[*tokens[:12], b"]"])
    schema = {"type": "object", "properties": {"a": {"enum": ["b", 1]}}, "additionalProperties": False}
    made: list[Completion] = one.generate(
        [[1]] * 5,
        [Sampling(max_tokens=20, seed=i, grammar=Grammar.json_schema(schema | {"required": ["a"]})) for i in range(5)],
    )
    for c in made:
        if c.finish_reason == "stop":
            assert json.loads(c.text) in ({"a": "b"}, {"a": 1})
    assert any(c.finish_reason == "stop" for c in made)


@pytest.mark.nightly
def test_the_page_runs() -> None:
    page = (pathlib.Path(__file__).parents[2] / "docs/inference.md").read_text()
    blocks, last = [], ""
    for kind, block in re.findall(r"^```(\w+)\n(.*?)^```$", page, re.M | re.S):
        if kind in ("python", "py"):
            blocks.append(block)
        if kind == "py":
            last = block
            break
    assert "json_schema" in last
    exec("\n".join(blocks), {})
