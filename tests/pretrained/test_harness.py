"""Covers the model of lm-evaluation-harness: its answers are the engine's, with the harness or a stand-in of it."""

import importlib.machinery
import math
import sys
import types
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from shardfn.core import key
from shardfn.data import ByteTokenizer
from shardfn.inference import Engine, Sampling, decoder, limits_of
from shardfn.models import gpt
from shardfn.pretrained._harness import make_harness_model
from shardfn.pretrained._text import wrap_data_tokenizer

CONFIG = gpt.Config.llama_like(
    vocab_size=256, num_layers=1, d_model=32, num_heads=2, d_ff=None, max_len=48, batch_invariant=True
)


class TemplateLM:
    """Stands in for `lm_eval.api.model.TemplateLM`."""


def list_windows(
    token_list: Sequence[int], prefix_token: int, max_seq_len: int, context_len: int
) -> Iterator[tuple[list[int], list[int]]]:
    """Stands in for `lm_eval.utils.get_rolling_token_windows`, of a text that fits in one window."""
    assert len(token_list) <= max_seq_len and context_len == 1
    yield [prefix_token, *token_list[:-1]], list(token_list)


def cut_window(pair: tuple[list[int], list[int]]) -> tuple[list[int], list[int]]:
    """Stands in for `lm_eval.utils.make_disjoint_window`."""
    context, choice = pair
    return context[: len(context) - (len(choice) - 1)], choice


@pytest.fixture(params=["stand-in", "lm_eval"])
def harness(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The harness, or a stand-in of the parts that the model uses."""
    if request.param == "lm_eval":
        pytest.importorskip("lm_eval")
        return request.param
    utils = {"get_rolling_token_windows": list_windows, "make_disjoint_window": cut_window}
    parts: dict[str, dict[str, Any]] = {"": {}, ".api": {}, ".api.model": {"TemplateLM": TemplateLM}, ".utils": utils}
    for name, values in parts.items():
        module = types.ModuleType(f"lm_eval{name}")
        module.__spec__ = importlib.machinery.ModuleSpec(module.__name__, None)
        vars(module).update(values)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return request.param


@pytest.fixture(scope="module")
def llm() -> Any:
    """A model of bytes, as an `LLM` has it."""
    made = decoder(CONFIG)
    limits = limits_of(made, running=4, buckets=(8,), cache_bytes=1 << 18)
    engine = Engine(made, gpt.init(CONFIG, key(0)), limits=limits, tokenizer=ByteTokenizer(), eager_steps=10_000)
    return SimpleNamespace(engine=engine, text=wrap_data_tokenizer(ByteTokenizer()))


def make_request(*args: Any) -> Any:
    return SimpleNamespace(args=args)


@pytest.mark.parametrize("batch_size", [1, 64])
def test_scores_are_those_of_the_engine(harness: str, llm: Any, batch_size: int) -> None:
    model = make_harness_model(llm, batch_size=batch_size)
    pairs = [("the sea", " is"), ("a", "b"), ("the sea", " was"), ("x" * 60, "yes")]
    ids = [(list(left.encode()), list(right.encode())) for left, right in pairs]
    found = model._loglikelihood_tokens([(None, *pair) for pair in ids])
    kept = [(left[-(49 - len(right)) :], right) for left, right in ids]  # a long context loses its beginning
    for one, (left, right) in zip(found, kept, strict=True):
        [[want]] = llm.engine.score([left], [[right]])
        assert one == (want.logprob, want.is_greedy)
    assert model.tok_encode("ab") == [97, 98] and model.max_length == 48


def test_a_whole_text_is_scored_after_the_first_token(harness: str, llm: Any) -> None:
    model = make_harness_model(llm)
    texts = ["the sea", "a"]
    found = model.loglikelihood_rolling([make_request(text) for text in texts])
    want = llm.engine.score([[model.prefix_token_id]] * 2, [[list(text.encode())] for text in texts])
    assert found == [one.logprob for [one] in want]
    if harness == "lm_eval":  # two windows, which are scored apart
        long = "the sea is " * 6
        [found] = model.loglikelihood_rolling([make_request(long)])
        assert found < 0 and math.isfinite(found)


def test_texts_are_those_of_the_engine(harness: str, llm: Any) -> None:
    model = make_harness_model(llm, batch_size=1)
    given: list[dict[str, Any]] = [
        {"max_gen_toks": 5},
        {"until": "e", "max_gen_toks": 9, "do_sample": True, "temperature": 0.7, "top_k": 9},
    ]
    hows = [
        Sampling(max_tokens=5, temperature=0.0),
        Sampling(max_tokens=9, temperature=0.7, top_k=9, stop=("e",)),
    ]
    found = model.generate_until([make_request("the sea " * 8, how) for how in given])
    for text, how in zip(found, hows, strict=True):
        prompt = list(("the sea " * 8).encode())[-(48 - how.max_tokens) :]
        assert text == llm.engine.generate([prompt], how)[0].text
    with pytest.raises(ValueError, match="max_gen_toks must be from 1 to 47"):
        model.generate_until([make_request("a", {"max_gen_toks": 48})])
    with pytest.raises(ValueError, match="until must have at most 16 strings, got 17"):
        model.generate_until([make_request("a", {"until": ["x"] * 17})])


def test_a_wrong_batch_size(harness: str, llm: Any) -> None:
    with pytest.raises(ValueError, match="batch_size must be at least 1, got 0"):
        make_harness_model(llm, batch_size=0)
    with pytest.raises(ValueError, match="no chat template"):
        make_harness_model(llm).apply_chat_template([{"role": "user", "content": "a"}])
