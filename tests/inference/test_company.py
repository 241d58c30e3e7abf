"""Covers the law of company: neighbours, their order, hits of the cache and lost blocks change no bit of a request."""

from collections import Counter, defaultdict
from dataclasses import replace
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from shardfn.inference import Engine, Limits, Sampling, Token
from shardfn.inference._state import Sequence as Choice
from shardfn.inference._state import State
from tests.inference.stories import TOKENS, model
from tests.inference.test_stories import LIMITS, runner

HOT = Sampling(max_tokens=9, temperature=1.3, top_p=0.9, seed=7)


def engine(limits: Limits = LIMITS, **more: Any) -> Engine:
    one = model(tie_embeddings=True)
    shared: dict[str, Any] = {} if "buckets" in more else {"runner": runner("gpt2")}
    return Engine(one.decoder, one.params[0], limits=replace(limits, **more), tokenizer=TOKENS, **shared)


@pytest.mark.nightly
def test_neighbours_and_their_order_change_no_bit() -> None:
    many = engine(blocks=64 * 7 + 1, buckets=(1, 8, 65), running=64)
    scored = replace(HOT, prompt_logprobs=True)
    prompts = [[1, 2, 0, 3, 1, 2], *([i % 13, i % 5, *range(i % 7)] for i in range(63))]
    hows = [scored, *(Sampling(max_tokens=3 + i % 9, temperature=i % 3, seed=i) for i in range(63))]
    [alone] = many.generate(prompts[:1], scored)
    for num in (1, 7, 63):
        for step in (1, -1):
            made = many.generate(prompts[: num + 1][::step], hows[: num + 1][::step])
            assert made[::step][0] == alone


@pytest.mark.nightly
def test_requests_of_one_seed_draw_the_same_tokens_beside_others() -> None:
    hows = [HOT, *(replace(HOT, seed=i) for i in range(20, 40)), HOT]
    first, *others, last = engine().generate([[4, 2]] * 22, hows)
    assert first == last and sum(other.tokens == first.tokens for other in others) < 5


prompts = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=18), min_size=2, max_size=5)


@settings(max_examples=12, derandomize=True, deadline=None, database=None)
@given(prompts)
def test_hits_that_are_forced_and_forbidden_have_equal_bits(trees: list[list[int]]) -> None:
    shared, apart = engine(), engine()
    for i, prompt in enumerate([*trees, trees[0]]):
        got = told(shared.stream(prompt, HOT))
        assert got == told(apart.stream(prompt, HOT, salt=bytes([i])))
    computed = shared.core._rows, apart.core._rows
    assert computed[0] <= computed[1] and (computed[0] < computed[1] or len(trees[0]) <= LIMITS.block)


def told(tokens: Any) -> list[tuple[Any, ...]]:
    return [(t.position, t.token, t.logprob, t.text, t.finish_reason) for t in tokens]


def test_requests_that_lose_their_blocks_three_times_have_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    lost, plain = Counter[str](), State.preempt

    def preempt(self: State, sequence: Choice) -> None:
        lost[sequence.name] += 1
        plain(self, sequence)

    monkeypatch.setattr(State, "preempt", preempt)
    asked = {"a": [1, 2], "b": [1, 2, 3], "c": [0, 5]}
    greedy, hot = (replace(HOT, max_tokens=25, temperature=t) for t in (0.0, 1.3))
    hows = {"a": greedy, "b": hot, "c": replace(hot, seed=8)}
    small, found = engine(blocks=13), defaultdict[str, list[Token]](list)
    for name, prompt in asked.items():
        small.add(prompt, hows[name], name=name)
    for _ in range(3):
        before = {name: len(found[name]) for name in asked}
        while any(len(found[name]) == before[name] for name in asked):
            collect(small, found)
        for token in (3, 4):  # together they need more blocks than there are
            small.add([token] * 18, Sampling(max_tokens=9), name=f"urgent{token}", priority=1)
        while {"urgent3", "urgent4"} & set(small.core.requests):
            collect(small, found)
    while not small.idle:
        collect(small, found)
    assert min(lost[name] for name in asked) >= 3, lost
    large = engine()
    for name, prompt in asked.items():
        assert told(found[name]) == told(large.stream(prompt, hows[name]))


def collect(one: Engine, found: dict[str, list[Token]]) -> None:
    for token in one.step():
        found[token.name].append(token)
