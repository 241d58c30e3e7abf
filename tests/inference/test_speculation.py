"""Covers guessing in `inference`: tokens, log probabilities and texts are those without a drafter, for any drafter."""

import functools
import os
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from shardfn import core, make_mesh
from shardfn.inference import (
    Context,
    Drafter,
    DraftModel,
    DraftTree,
    Engine,
    Grammar,
    Jacobi,
    Limits,
    MultiBlockJacobi,
    Ngram,
    Runner,
    Sampling,
    Suffix,
)
from shardfn.speculators import Hybrid, Kind, Speculator, config_of, init
from shardfn.testing import distributed
from tests.inference.drafters import Adversary, Bush, Random, Seeing
from tests.inference.stories import LANGUAGES, TOKENS, Arrival, Model, Story, Told, check, model, run
from tests.inference.test_matchers import HARD
from tests.inference.test_stories import KINDS, drawn_stories
from tests.speculators.trained import trained

MANY = int(os.environ.get("SHARDFN_STORIES", "500"))
SIZES = replace(KINDS["gpt2"][1], buckets=(1, 3, 12), drafts=8)
Truth = Mapping[tuple[str, int], Sequence[int]]


@functools.cache
def draft_model(version: int, **changes: Any) -> DraftModel:
    """A model with few blocks, so that sequences lose theirs."""
    small = Limits(vocab=13, context=28, blocks=12, block=4, buckets=(2, 9), running=3)
    one = model(**KINDS["gpt2"][0], **changes)
    return DraftModel(one.decoder, one.params[version], limits=small)


def speculator(kind: Kind, one: Model, branches: int = 1) -> Speculator:
    """A speculator that was not trained, so that it is right by chance."""
    config = config_of(one.decoder, kind)
    return Speculator(config, init(config, core.key(2)), branches=branches)


DRAFTERS: dict[str, Callable[[Truth, Model], Drafter]] = {
    "ngram": lambda truth, one: Ngram(longest=3, shortest=1),
    "suffix": lambda truth, one: Suffix(most_tokens=60),
    "random": lambda truth, one: Random(13),
    "right": lambda truth, one: Adversary(13, truth, None),
    "hidden states": lambda truth, one: Seeing(13, (1, 2)),
    "lstm speculator": lambda truth, one: speculator("lstm", one),
    "mlp speculator": lambda truth, one: speculator("mlp", one),
    "eagle3 speculator": lambda truth, one: speculator("eagle3", one),
    "mtp speculator": lambda truth, one: speculator("mtp", one),
    "trained eagle3 speculator": lambda truth, one: trained("eagle3")[0],
    "trained lstm speculator": lambda truth, one: trained("lstm")[0],
    "trained mtp speculator": lambda truth, one: trained("mtp")[0],
    "owl speculator": lambda truth, one: speculator("owl", one),
    "trained owl speculator": lambda truth, one: trained("owl")[0],
    "owl speculator with suffixes": lambda truth, one: Hybrid(speculator("owl", one)),
    "lstm speculator with suffixes": lambda truth, one: Hybrid(speculator("lstm", one)),
    "lstm speculator with trees": lambda truth, one: speculator("lstm", one, 3),
    "eagle3 speculator with trees": lambda truth, one: speculator("eagle3", one, 2),
    "mtp speculator with trees": lambda truth, one: speculator("mtp", one, 2),
    "owl speculator with trees and suffixes": lambda truth, one: Hybrid(speculator("owl", one, 2)),
    "trained mlp speculator with trees": lambda truth, one: trained("mlp", 3)[0],
    "trained eagle3 speculator with trees": lambda truth, one: trained("eagle3", 3)[0],
    "jacobi": lambda truth, one: Jacobi(6),
    "jacobi blocks": lambda truth, one: MultiBlockJacobi(4),
    "bush": lambda truth, one: Bush(13, truth),
    "small model": lambda truth, one: draft_model(1, num_layers=1, max_len=28),
    "same model": lambda truth, one: draft_model(0),
    "wrong at 0": lambda truth, one: Adversary(13, truth, 0),
    "wrong at 2": lambda truth, one: Adversary(13, truth, 2),
}


def truth_of(story: Story, told: dict[tuple[str, int], Told]) -> Truth:
    """Prompt and tokens of each choice."""
    drawn = {of: [t.token for t in one.tokens if t.token is not None] for of, one in told.items()}
    skipped = {of: sum(t.position < len(story.arrivals[int(of[0])].prompt) for t in told[of].tokens) for of in told}
    return {of: [*story.arrivals[int(of[0])].prompt, *drawn[of][skipped[of] :]] for of in told}


def add_spec_token(name: str, drafter: Drafter, one: Model, runner: Runner) -> tuple[Model, Runner]:
    """The model and graphs with the drafter's [SPEC] token, made once; other drafters' are unchanged."""
    if not isinstance(drafter, Speculator | Hybrid) or not drafter.wants_spec_token:
        return one, runner
    if (name, runner) not in _WITH_SPEC:
        made = [drafter.prepare(one.decoder, params) for params in one.params]
        other = replace(one, decoder=made[0][0], params=[params for _, params in made])
        other.full = one.full
        _WITH_SPEC[name, runner] = other, Runner(other.decoder, runner.limits, mesh=runner.mesh)
    return _WITH_SPEC[name, runner]


_WITH_SPEC: dict[tuple[str, Runner], tuple[Model, Runner]] = {}


def hold(story: Story, one: Model, runner: Runner, limits: Limits, name: str) -> tuple[int, int]:
    """Runs a story without and with a drafter; returns the numbers of drafts and of accepted ones."""
    plain, _ = run(story, one, runner, limits)
    drafter = DRAFTERS[name](truth_of(story, plain), one)
    told, engine = run(story, *add_spec_token(name, drafter, one, runner), limits, drafter)
    check(story, told, one)
    for of, got in told.items():
        arrival = story.arrivals[int(of[0])]
        if arrival.cancel is None and not story.updates:
            tokens, texts = ([t._replace(text="") for t in x.tokens] for x in (got, plain[of])), (got, plain[of])
            mine, theirs = tokens
            assert mine == theirs
            assert len({"".join(t.text for t in x.tokens) for x in texts}) == 1
    return engine.stats.speculation.drafted, engine.stats.speculation.accepted


@functools.cache
def runner() -> Runner:
    return Runner(model(**KINDS["gpt2"][0]).decoder, SIZES)


def tell(name: str, number: int) -> None:
    one = model(**KINDS["gpt2"][0])
    counts = [hold(story, one, runner(), SIZES, name) for story in drawn_stories(SIZES, number)]
    drafted, accepted = map(sum, zip(*counts, strict=True))
    assert drafted > 0
    if (
        name not in ("random", "hidden states", "jacobi", "jacobi blocks") and "speculator" not in name
    ):  # right by chance
        assert (accepted > 0) == (name != "wrong at 0")


@pytest.mark.nightly
@pytest.mark.parametrize("name", DRAFTERS)
def test_stories_with_a_drafter(name: str) -> None:
    tell(name, 5)


@pytest.mark.nightly
@pytest.mark.parametrize("name", DRAFTERS)
def test_many_stories_with_a_drafter(name: str) -> None:
    tell(name, MANY)


ENGINES = {
    "gpt2": SIZES,
    "llama": replace(KINDS["llama"][1], buckets=(2, 7, 11), drafts=6),
    "mistral": replace(KINDS["mistral"][1], buckets=(1, 5, 16), drafts=15),
    "swift": replace(KINDS["swift"][1], buckets=(1, 5, 12), drafts=8),
}


def long_stories(limits: Limits, number: int) -> list[Story]:
    """Stories with more drafts than those that hypothesis draws: requests of more tokens, several at a time."""
    rng = random.Random(number)
    found = []
    for _ in range(number):
        arrivals = tuple(_long_arrival(rng) for _ in range(rng.randint(2, 6)))
        updates = ((rng.randint(2, 12), rng.random() < 0.5),) if rng.random() < 0.25 else ()
        found.append(Story(arrivals, updates, rng.randint(limits.width + 1, limits.blocks)))
    return found


def _long_arrival(rng: random.Random) -> Arrival:
    how = Sampling(
        max_tokens=rng.randint(6, 16),
        temperature=rng.choice([0.0, 0.7, 1.5]),
        top_k=rng.choice([0, 0, 3]),
        top_p=rng.choice([1.0, 0.8]),
        seed=rng.randrange(4),
        n=rng.choice([1, 1, 1, 2]),
        stop_tokens=rng.choice([(), (), (1, 4)]),
        stop=rng.choice([(), (), ("ab ", "bb")]),
        grammar=rng.choice([None] * 4 + list(LANGUAGES)),
        prompt_logprobs=rng.random() < 0.2,
    )
    prompt = tuple(rng.randrange(3) for _ in range(rng.randint(1, 12)))
    cancel = rng.randint(1, 12) if rng.random() < 0.2 else None
    return Arrival(rng.randint(0, 6), prompt, how, rng.randrange(2), cancel, rng.choice([None, None, None, "thin"]))


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ENGINES)
@pytest.mark.parametrize("part", range(2))
def test_long_stories_of_engines_with_drafters_in_turn(kind: str, part: int) -> None:
    one, limits = model(**KINDS[kind][0]), ENGINES[kind]
    # Trained speculators are of a model of two layers, and of no other.
    names = [name for name in DRAFTERS if "trained" not in name or one.config.num_layers == 2]
    graphs = Runner(one.decoder, limits)
    for i, story in list(enumerate(long_stories(limits, -(-MANY // len(ENGINES)))))[part::2]:
        hold(story, one, graphs, limits, names[i % len(names)])


def tell_on_ranks(world: int, number: int, kind: str = "gpt2") -> None:
    one, limits = model("tp", **KINDS[kind][0]), SIZES if kind == "gpt2" else ENGINES[kind]
    graphs = Runner(one.decoder, limits, mesh=make_mesh({"tp": world}))
    # The first drafters are of Jacobi decoding. Trained speculators are of a model of two layers, and of no other.
    names = [name for name in DRAFTERS if "trained" not in name or one.config.num_layers == 2]
    names.sort(key=lambda name: not name.startswith("jacobi"))
    for i, story in enumerate(drawn_stories(limits, number)):
        hold(story, one, graphs, limits, names[i % len(names)])


@pytest.mark.nightly
@distributed(world=2)
def test_stories_with_drafters_on_ranks(world: int) -> None:
    tell_on_ranks(world, 6)


@pytest.mark.nightly
@distributed(world=2, timeout=600)
def test_many_stories_with_drafters_on_ranks(world: int) -> None:
    tell_on_ranks(world, MANY // 10)


@pytest.mark.nightly
@distributed(world=2, timeout=600)
def test_stories_of_swift_kv_with_drafters_on_ranks(world: int) -> None:
    tell_on_ranks(world, max(4, MANY // 20), "swift")


@pytest.mark.parametrize("name", ["random", "bush"])
def test_rejected_drafts_leave_nothing_that_is_read(name: str) -> None:
    """Keys and values of rejected drafts, and of places beyond, may be anything, even NaN."""
    one = model(**KINDS["gpt2"][0])
    how = Sampling(max_tokens=18, temperature=0.0)
    plain = Engine(one.decoder, one.params[0], limits=SIZES, runner=runner()).generate([[1, 2, 1, 2]], how)
    drafter = DRAFTERS[name]({("request-0", 0): [1, 2, 1, 2, *plain[0].tokens]}, one)
    engine = Engine(one.decoder, one.params[0], limits=SIZES, runner=runner(), drafter=drafter)
    engine.add([1, 2, 1, 2], how)
    tokens, moves = [], 0
    while not engine.idle:
        tokens += engine.step()
        for sequence in engine.core._state.running:
            [chunk] = engine.core._state.flight
            first = chunk.num - len(chunk.positions)  # row of a wanted position
            valid = [*range(first), *(first + row for row, *_ in chunk.read_rows(engine.core._tokens_in_flight, 0))]
            places = set(range(sequence.computed, len(sequence.blocks) * SIZES.block))
            for p in places - {sequence.computed + row for row in valid}:
                for layer in engine.core._cache:
                    layer.local[sequence.blocks[p // SIZES.block], :, :, p % SIZES.block] = torch.nan
            moves += len(chunk.moves(len(valid), engine.core._tokens_in_flight, lambda at: at))
    assert engine.stats.speculation.drafted > engine.stats.speculation.accepted
    assert (moves > 0) == (name == "bush")
    assert [t.token for t in tokens] == plain[0].tokens and [t.logprob for t in tokens] == plain[0].logprobs


def test_penalties_see_the_drafts_before_a_row() -> None:
    one = model(**KINDS["gpt2"][0])
    how = Sampling(max_tokens=18, seed=3, presence_penalty=1.0, repetition_penalty=1.3, frequency_penalty=0.5)
    plain = Engine(one.decoder, one.params[0], limits=SIZES, runner=runner()).generate([[1, 2, 1]], how)
    truth = {("request-0", 0): [1, 2, 1, *plain[0].tokens]}
    for drafter in (Adversary(13, truth, None), Adversary(13, truth, 1), Adversary(13, truth, 3), Bush(13, truth)):
        engine = Engine(one.decoder, one.params[0], limits=SIZES, runner=runner(), drafter=drafter)
        assert engine.generate([[1, 2, 1]], how) == plain
        assert engine.stats.speculation.accepted > 5


@pytest.mark.day("ab")
@pytest.mark.parametrize(
    "grammar", [Grammar.regex("(ab )*z"), Grammar.regex("[ab]{1,9}c"), HARD], ids=["ab", "c", "hard"]
)
def test_drafts_of_requests_with_grammars(grammar: Grammar) -> None:
    """A draft is accepted where it equals the token that is drawn under the mask; errors come where they came."""
    pytest.importorskip("llguidance")
    one, accepted = model(**KINDS["gpt2"][0]), 0
    for temperature in (0.0, 1.0, 100.0):
        how = Sampling(max_tokens=16, seed=3, temperature=temperature, grammar=grammar, n=2)
        parts: dict[str, Any] = {"limits": SIZES, "runner": runner(), "tokenizer": TOKENS}
        [plain] = Engine(one.decoder, one.params[0], **parts).generate([[1, 2, 1]], how)
        truth = {("request-0", i): [1, 2, 1, *choice.tokens] for i, choice in enumerate(plain)}
        for name in ("right", "bush", "wrong at 2", "ngram"):
            engine = Engine(one.decoder, one.params[0], drafter=DRAFTERS[name](truth, one), **parts)
            assert engine.generate([[1, 2, 1]], how) == [plain]
            assert engine.idle and engine.stats.counts["held"] == 0 and engine._constraints._ahead == {}
            accepted += engine.stats.speculation.accepted
    assert accepted > (20 if grammar != HARD else 5)


def test_right_drafts_save_steps_and_max_tokens_holds() -> None:
    one = model(**KINDS["gpt2"][0])
    for most in (1, 2, 5, 24):
        how = Sampling(max_tokens=most, temperature=0.0)
        plain = Engine(one.decoder, one.params[0], limits=SIZES, runner=runner()).generate([[1, 2]], how)
        drafter = Adversary(13, {("request-0", 0): [1, 2, *plain[0].tokens]}, None)
        engine = Engine(one.decoder, one.params[0], limits=SIZES, runner=runner(), drafter=drafter)
        assert engine.generate([[1, 2]], how) == plain
        assert engine.core._state.step <= 2 + most / 2
        assert engine.stats.speculation.drafted <= max(0, most - 2)


def test_a_drafter_that_computes_is_not_asked_where_a_step_is_full() -> None:
    asked = list[int]()

    class Asked(Random):
        def propose_all(self, asks: Sequence[tuple[Context, int]]) -> list[Sequence[int] | DraftTree]:
            asked.append(sum(most for _, most in asks))
            return [self.propose(*ask) for ask in asks]

        def check(self, decoder: Any, limits: Any) -> None: ...

        def warm_up(self, *, extended: bool = False) -> None: ...

    one = model(**KINDS["gpt2"][0])
    limits = replace(SIZES, buckets=(1, 3, 8, 12, 24), blocks=80, running=8, drafts=7)
    for num in (8, 5, 4, 3):
        asked.clear()
        engine = Engine(one.decoder, one.params[0], limits=limits, drafter=Asked(13))
        engine.generate([[1, 2 + i] for i in range(num)], Sampling(max_tokens=8, temperature=0.0))
        assert max(asked, default=0) == (8 - num if num <= 4 else 0), (num, asked)


def test_a_drafter_needs_rows() -> None:
    one = model(**KINDS["gpt2"][0])
    with pytest.raises(ValueError, match=r"limits.drafts is 0, and the drafter is Ngram\(.*limits_of\(..., drafts="):
        Engine(one.decoder, one.params[0], limits=KINDS["gpt2"][1], drafter=Ngram())
    assert Engine(one.decoder, one.params[0], drafter=Ngram()).limits.drafts > 0


class _Broken(Random):
    def propose(self, context: object, most: int) -> list[int]:
        return [99] * most


def test_a_draft_outside_the_vocabulary_is_refused() -> None:
    one = model(**KINDS["gpt2"][0])
    engine = Engine(one.decoder, one.params[0], limits=SIZES, runner=runner(), drafter=_Broken(13))
    with pytest.raises(ValueError, match=r"the drafter must propose .*each from 0 to 12, got \(99, "):
        engine.generate([[1, 2]], Sampling(max_tokens=9))
