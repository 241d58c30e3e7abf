"""Covers options of draws in `inference`: each option's tokens are those of the request alone, and bad values."""

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch

import shardfn as sf
from shardfn import make_mesh
from shardfn.data import ByteTokenizer
from shardfn.inference import Completion, Engine, ReasoningBudget, Runner, Sampling, Suffix, decoder
from shardfn.models import gpt
from shardfn.testing import distributed
from tests.inference.stories import PROCESSORS, TOKENS, model
from tests.inference.test_stories import KINDS

CHANGES, LIMITS = KINDS["gpt2"]
PROMPTS = [[1, 2, 0, 1], [2, 2], [0, 1, 2, 0, 1, 2, 0], [1], [4, 3, 2, 1, 0, 2]]
HOT = Sampling(max_tokens=12, temperature=1.3, stop_tokens=(1, 4), stop=("ab ", "bb"))
OPTIONS: dict[str, dict[str, Any]] = {
    "min_tokens": {"min_tokens": 8},
    "bad_words": {"bad_words": ((2,), (0, 3), (3, 3), (9, 5, 7))},
    "allowed_token_ids": {"allowed_token_ids": (0, 2, 4, 6, 9)},
    "logits_processors": {"logits_processors": ("odd", "prompt")},
    "reasoning_budget": {"reasoning_budget": ReasoningBudget(3, (0,), (5, 6), inside=True)},
    "all": {
        "min_tokens": 5,
        "bad_words": ((2,), (0, 0)),
        "allowed_token_ids": (0, 2, 3, 4, 6, 9),
        "logits_processors": ("prompt",),
        "presence_penalty": 0.5,
        "logit_bias": ((3, 1.5),),
    },
}


@functools.cache
def alone(option: str) -> list[Completion]:
    """The completions of each request in an engine of its own."""
    one = model(**CHANGES)
    hows = [replace(HOT, seed=i, **OPTIONS[option]) for i in range(len(PROMPTS))]
    made = []
    for prompt, how in zip(PROMPTS, hows, strict=True):
        engine = Engine(one.decoder, one.params[0], limits=LIMITS, tokenizer=TOKENS, logits_processors=PROCESSORS)
        made += engine.generate([prompt], how)
    return made


@pytest.mark.day("all-2", "min_tokens-1")
@distributed(world=[1, 2])
@pytest.mark.parametrize("option", OPTIONS)
def test_tokens_are_those_of_the_request_alone(world: int, option: str) -> None:
    """Batched, preempted, drafted, and on several ranks."""
    one, mesh = model("tp", **CHANGES), make_mesh({"tp": world})
    tight = replace(LIMITS, blocks=LIMITS.width + 2, drafts=6)
    more = {"tokenizer": TOKENS, "logits_processors": PROCESSORS, "drafter": Suffix(), "mesh": mesh}
    engine = Engine(one.decoder, one.params[0], limits=tight, **more)
    hows = [replace(HOT, seed=i, **OPTIONS[option]) for i in range(len(PROMPTS))]
    for _ in range(2):  # the second time with the drafts of the first
        assert engine.generate(PROMPTS, hows) == alone(option)
    stats = engine.stats
    assert stats.counts["held"] == 0
    if option == "min_tokens":  # the other options end choices early
        assert stats.cache.preemptions > 0 and stats.speculation.accepted > 0


def test_what_options_do() -> None:
    one = model(**CHANGES)
    force = {"force": lambda output, logits: logits.index_fill(0, torch.tensor([7]), 1e4)}
    engine = Engine(one.decoder, one.params[0], limits=LIMITS, tokenizer=TOKENS, logits_processors=force)

    def tokens(**more: Any) -> list[list[int]]:
        hows = [replace(HOT, seed=i, **more) for i in range(len(PROMPTS))]
        return [c.tokens for c in engine.generate(PROMPTS, hows)]

    free = tokens()
    assert min(map(len, free)) < 8 <= min(map(len, tokens(min_tokens=8)))
    firsts = tuple({(drawn[0],) for drawn in free})
    assert not {t for drawn in tokens(bad_words=firsts) for t in drawn} & {t for (t,) in firsts}
    assert {t for drawn in tokens(allowed_token_ids=(0, 2, 6)) for t in drawn} <= {0, 2, 6}
    assert tokens(logits_processors=("force",)) == [[7] * 12] * len(PROMPTS)


@functools.cache
def of_bytes() -> Engine:
    config = gpt.Config(vocab_size=256, num_layers=1, d_model=32, num_heads=2, max_len=48, batch_invariant=True)
    flat = sf.core.tree_map(lambda x: x * 0, gpt.init(config, sf.key(0)))  # all tokens are equally probable
    return Engine(decoder(config), flat, tokenizer=ByteTokenizer())


def test_bad_words_are_forbidden_at_the_beginning_and_after_a_space() -> None:
    letters = tuple(b"ab ")
    how = Sampling(max_tokens=40, allowed_token_ids=letters)
    made = of_bytes().generate([[1]] * 6, [replace(how, seed=i, bad_words=("ab", "b a")) for i in range(6)])
    free = of_bytes().generate([[1]] * 6, [replace(how, seed=i) for i in range(6)])
    assert any("ab" in c.text for c in free) and any("b a" in c.text for c in free)
    assert not any("ab" in c.text or "b a" in c.text for c in made) and any("a" in c.text for c in made)


def test_a_stop_string_before_min_tokens_is_text() -> None:
    how = Sampling(max_tokens=12, allowed_token_ids=tuple(b"ab"), stop=("a",))
    for seed in range(8):
        [made] = of_bytes().generate([[1]], replace(how, seed=seed, min_tokens=6))
        assert len(made.tokens) > 6 and made.text[:6] == bytes(made.tokens[:6]).decode()
        assert "a" not in made.text[6:] and (made.finish_reason == "stop") == (made.tokens[-1] == ord("a"))


def test_a_choice_without_an_allowed_token_ends_as_an_error() -> None:
    how = Sampling(max_tokens=4, allowed_token_ids=(65, 66), bad_words=((65,), (66, 66)))
    [made, other] = of_bytes().generate([[1], [1]], [how, Sampling(max_tokens=4, allowed_token_ids=(65,))])
    assert (made.tokens, made.finish_reason) == ([66], "error")
    assert (other.tokens, other.finish_reason) == ([65] * 4, "length")


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"temperature": "hot"}, "temperature must be a number from 0 to 100, got 'hot'"),
    ({"top_k": 2.0}, "top_k must be an integer from 0 to 16777216, got 2.0"),
    ({"min_tokens": 1.5}, "min_tokens must be an integer from 0 to 16777216, got 1.5"),
    ({"min_tokens": True}, "min_tokens must be an integer .*got True"),
    ({"min_tokens": 17}, "min_tokens must be at most max_tokens=16, got 17"),
    ({"bad_words": "ab"}, "bad_words must be a tuple of strings or of tuples of token ids, got 'ab'"),
    ({"bad_words": ((1, 13),)}, r"bad_words\[0\]\[1\] must be an integer from 0 to 12, got 13"),
    ({"bad_words": ((),)}, r"bad_words\[0\] must have from 1 to 256 tokens, got 0"),
    ({"bad_words": ("ab",)}, r"bad_words is \('ab',\), and there is no tokenizer that encodes text"),
    ({"allowed_token_ids": ()}, r"allowed_token_ids must have at least one token id, got \(\)"),
    ({"allowed_token_ids": [1]}, "allowed_token_ids must be a tuple of token ids, got a list"),
    ({"allowed_token_ids": (1.0,)}, r"allowed_token_ids\[0\] must be an integer from 0 to 12, got 1.0"),
    ({"logits_processors": (abs,)}, "logits_processors must be a tuple of strings"),
    ({"logits_processors": ("od",)}, r"logits_processors has 'od', but this engine has \['odd', 'prompt'\].*'odd'"),
]


@distributed(world=[1, 2])
def test_wrong_options_are_named_on_all_ranks(world: int) -> None:
    one, mesh = model("tp", **CHANGES), make_mesh({"tp": world})
    more: dict[str, Any] = {"tokenizer": TOKENS, "logits_processors": PROCESSORS}
    engine = Engine(one.decoder, one.params[0], mesh=mesh, limits=LIMITS, **more)
    for given, words in WRONG:
        with pytest.raises(ValueError, match=words):
            engine.add([1, 2], Sampling(**given))
    assert engine.idle and engine.generate([PROMPTS[0]], replace(HOT, seed=0, min_tokens=8)) == [alone("min_tokens")[0]]


def test_processors_that_are_no_functions_of_logits() -> None:
    one = model(**CHANGES)
    with pytest.raises(TypeError, match=r"logits_processors\['f'\] must be a function \(output, logits\) or"):
        Engine(one.decoder, one.params[0], limits=LIMITS, logits_processors={"f": lambda logits: logits})
    cases: Any = ((lambda output, x: x[:2], r"got \(2,\) of torch.float32"), (lambda output, x: 1, "got int"))
    for wrong, words in cases:
        engine = Engine(one.decoder, one.params[0], limits=LIMITS, logits_processors={"f": wrong})
        engine.add([1], Sampling(logits_processors=("f",)), name="mine")
        with pytest.raises(ValueError, match=rf"logits processor 'f' must return a tensor \(13,\).*{words}.*'mine'"):
            engine.step()


@distributed(world=[2, pytest.param(4, marks=pytest.mark.nightly)])
def test_a_step_may_have_another_layout(world: int) -> None:
    """Prompts of many rows are cut by tokens and single rows by heads, over one cache."""
    one, mesh = model("tp", **CHANGES), make_mesh({"tp": world})
    limits = replace(LIMITS, buckets=(1, 3, 7, 12), layouts=(("tp", 1), ("sp", 7)))
    engine = Engine(one.decoder, one.params[0], mesh=mesh, limits=limits, adapters=one.adapters)
    whole = model(**CHANGES)
    plain = Engine(whole.decoder, whole.params[0], limits=LIMITS, adapters=whole.adapters)
    how = Sampling(max_tokens=6, temperature=0.9, seed=3, prompt_logprobs=True)
    prompts = [*PROMPTS, [1, 2] * 8]
    assert engine.generate(prompts, how) == plain.generate(prompts, how)
    assert {key[0] for key in engine.runner._bound} == {"tp", "sp"}
    names = [None, "thin", "wide"] * 2
    assert engine.generate(prompts, how, adapter=names) == plain.generate(prompts, how, adapter=names)


@distributed(world=[2, 3])
@pytest.mark.nightly
def test_later_layers_of_swift_kv_have_only_wanted_tokens_in_each_layout(world: int) -> None:
    changes, limits = KINDS["swift"]
    changes = changes | {
        "num_heads": 6,
        "num_kv_heads": 6,
        "d_model": 48,
        "d_ff": 96,
        "chunks": 24 if world == 3 else 8,
    }
    one, cut = model(**changes), model("tp", **changes)
    own = replace(limits, layouts=(("tp", 1), ("sp", limits.budget)))
    engine = Engine(cut.decoder, cut.params[0], mesh=make_mesh({"tp": world}), limits=own)
    how = Sampling(max_tokens=6, temperature=0.9, seed=3)
    plain = Engine(one.decoder, one.params[0], limits=limits)
    assert engine.generate([*PROMPTS, [1, 2] * 8], how) == plain.generate([*PROMPTS, [1, 2] * 8], how)
    [call] = [call for key, call in engine.runner._bound.items() if key[0] == "sp"]
    gated = [x.meta["val"].shape[-2] for x in call._ready.program.gm.graph.nodes if "gated_silu" in x.name]
    rows, each = limits.wanted(limits.budget), -(-limits.wanted(limits.budget) // world)
    own_rows = len(range(rows)[engine.mesh.rank * each :][:each])
    assert gated == [limits.budget // world] + [own_rows] * 4


def test_a_layout_that_a_decoder_does_not_offer() -> None:
    one = model(**CHANGES)
    limits = replace(LIMITS, layouts=(("tp", 1), ("sp", 7)))
    with pytest.raises(ValueError, match=r"limits.layouts has \['sp'\], but this decoder offers \['tp'\]"):
        Engine(one.decoder, one.params[0], limits=limits)
    with pytest.raises(ValueError, match="layouts must be pairs of a name and a number of rows, ascending from 1"):
        replace(LIMITS, layouts=(("tp", 2),))


def test_a_runner_names_its_layout() -> None:
    one = model(**CHANGES)
    runner = Runner(one.decoder, LIMITS)
    assert [*runner.pack_weights(one.params[0])] == ["tp"] and torch.is_tensor(one.params[0]["embed"])


def test_the_end_of_reasoning_is_forced_and_tokens_before_are_those_without_a_budget() -> None:
    one = model(**CHANGES)
    engine = Engine(one.decoder, one.params[0], limits=LIMITS, tokenizer=TOKENS)
    for seed in range(3):
        how = Sampling(max_tokens=12, temperature=1.3, seed=seed)
        [free] = engine.generate([[1, 2]], how)
        budget = ReasoningBudget(4, (12,), (11, 10), inside=True, forced=(11, 10, 9))
        [made] = engine.generate([[1, 2]], replace(how, reasoning_budget=budget))
        if (11, 10) not in zip(free.tokens[:5], free.tokens[1:5], strict=False):
            begun = int(free.tokens[3] == 11)  # the end has begun by itself
            assert made.tokens[:4] == free.tokens[:4] and list(made.tokens[4 - begun : 7 - begun]) == [11, 10, 9]


@pytest.mark.parametrize(
    ("budget", "said"),
    [
        (5, "reasoning_budget must be None or a ReasoningBudget"),
        (ReasoningBudget(-1, (1,), (2,)), r"reasoning_budget\.tokens must be an integer from 0"),
        (ReasoningBudget(1, (), (2,)), r"reasoning_budget\.begin must have from 1 to 256 tokens, got 0"),
        (ReasoningBudget(1, (1,), (99,)), r"reasoning_budget\.end\[0\] must be an integer from 0 to"),
    ],
)
def test_wrong_budgets_are_named(budget: Any, said: str) -> None:
    one = model(**CHANGES)
    engine = Engine(one.decoder, one.params[0], limits=LIMITS, tokenizer=TOKENS)
    with pytest.raises(ValueError, match=said):
        engine.generate([[1]], Sampling(reasoning_budget=budget))
