"""Covers the texts of an engine's tokens, and the stop strings that end requests."""

from typing import Any

import pytest

from shardfn import RankError, make_mesh
from shardfn.data import ByteTokenizer
from shardfn.inference import Add, Engine, Limits, Request, Sampling, Stop, advance, start
from shardfn.testing import distributed
from tests.inference.stories import TOKENS, model
from tests.inference.test_stories import KINDS, LIMITS, runner

GREEDY = Sampling(max_tokens=9, temperature=0.0)


def engine(**changes: Any) -> Engine:
    one = model(tie_embeddings=True)
    given: dict[str, Any] = {"tokenizer": TOKENS} | changes
    return Engine(one.decoder, one.params[0], runner=runner("gpt2"), limits=LIMITS, **given)


def test_a_stop_string_ends_tokens_log_probabilities_and_text_at_one_token() -> None:
    how = Sampling(max_tokens=9, seed=3)
    [whole] = engine().generate([[1, 2, 0]], how)
    assert whole.text == engine().detokenizer.decode(whole.tokens) and len(whole.text) > 4  # pyright: ignore
    stop = whole.text[2:4]
    [cut] = engine().generate([[1, 2, 0]], Sampling(max_tokens=9, seed=3, stop=(stop,)))
    num = len(cut.tokens)
    assert cut.finish_reason == "stop" and cut.text == whole.text[: whole.text.index(stop)]
    assert (cut.tokens, cut.logprobs) == (whole.tokens[:num], whole.logprobs[:num]) and num < 9
    [kept] = engine().generate([[1, 2, 0]], Sampling(max_tokens=9, seed=3, stop=(stop,), include_stop=True))
    assert kept.tokens == cut.tokens and kept.text == cut.text + stop


def test_a_request_that_stops_frees_its_blocks_in_the_step_that_takes_the_token() -> None:
    one = engine()
    [whole] = engine().generate([[1, 2, 0]], GREEDY)
    one.add([1, 2, 0], Sampling(max_tokens=9, temperature=0.0, stop=(whole.text[:1],)))
    told = []
    while not told or told[-1].finish_reason is None:
        told = one.step()
    assert told[-1].finish_reason == "stop" and told[-1].text == "" and one.idle and one.stats.counts["held"] == 0


def test_a_text_that_is_cancelled_has_all_its_characters() -> None:
    one, told = engine(), []
    one.add([1, 2, 0], Sampling(max_tokens=9, temperature=0.0, stop=("zzzzzzz",)))
    for _ in range(5):
        told += one.step()
    one.cancel("request-0")
    told += one.step()
    assert told[-1].finish_reason == "cancelled" and told[-1].token is None
    assert "".join(t.text for t in told) == one.detokenizer.decode([t.token for t in told[:-1]])  # pyright: ignore
    assert one._texts._texts == {}


def test_an_engine_without_a_tokenizer_has_no_text_and_refuses_stop_strings() -> None:
    one = engine(tokenizer=None)
    [made] = one.generate([[1]], GREEDY)
    assert made.text == "" and len(made.tokens) == 9
    with pytest.raises(ValueError, match=r"stop is \('a',\), and the engine has no tokenizer: Engine\(tokenizer="):
        one.add([1], Sampling(stop=("a",)))


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"stop": "a"}, r"stop must be a tuple of strings, such as \('a',\).*got 'a'"),
        ({"stop": ("a", 1)}, "must be a tuple of strings"),
        ({"stop": ("a", "")}, r"stop\[1\] must have from 1 to 256 characters, got 0"),
        ({"stop": ("a" * 257,)}, r"stop\[0\] must have from 1 to 256 characters, got 257"),
        ({"stop": ("a",) * 17}, "stop must have at most 16 strings, got 17"),
        ({"include_stop": 1}, "include_stop must be True or False.*got 1"),
    ],
)
def test_stops_out_of_range_are_refused(how: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        engine().add([1], Sampling(**how))


def test_a_stop_of_a_token_that_is_not_drawn_is_refused() -> None:
    request = Request((1, 2), Sampling(max_tokens=3))
    state, _, _ = advance(start(Limits(vocab=9, context=8, blocks=9)), [Add(0, "a", request)])
    for name, choice, at in (("b", 0, 2), ("a", 1, 2), ("a", 0, 1), ("a", 0, 3)):
        with pytest.raises(ValueError, match="the plan in flight draws no token of that choice at"):
            advance(state.copy(), [Stop(1, name, choice, at)], [4])
    state, plan, [out] = advance(state, [Stop(1, "a", 0, 2)], [4])
    assert (out.token, out.finish_reason, plan, state.idle) == (4, "stop", None, True)


@distributed(world=2)
def test_another_tokenizer_on_a_rank_is_named() -> None:
    changes, limits = KINDS["gpt2"]
    one, mesh = model("tp", **changes), make_mesh({"tp": 2})
    tokenizer = TOKENS if mesh.rank else ByteTokenizer()
    made = Engine(one.decoder, one.params[0], mesh=mesh, limits=limits, tokenizer=tokenizer)
    made.add([1, 2, 3])
    with pytest.raises(RankError, match="ranks 0 and 1 differ in tokenizer"):
        made.step()
