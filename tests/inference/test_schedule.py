"""Covers `inference/_schedule.py`: the laws of a step, over a model that is a pure function of the tokens it sees."""

import gc
import hashlib
import os
import random
import subprocess
import sys
import tracemalloc
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from shardfn.core import DonatedError
from shardfn.inference import (
    Add,
    CacheStats,
    Cancel,
    Clock,
    Drain,
    Event,
    Limits,
    Output,
    Request,
    Sampling,
    State,
    StepPlan,
    Weights,
    advance,
    digest,
    start,
)
from shardfn.inference import _pool as pool_file
from shardfn.inference._state import draw_key
from tests.inference.machine import Laws
from tests.inference.model import Model, alone

LIMITS = Limits(vocab=5, context=24, blocks=9, block=4, buckets=(1, 2, 4, 8), running=4)


def run(
    limits: Limits, adds: dict[int, list[Request]], model: Model | None = None, state: State | None = None
) -> tuple[State, dict[tuple[str, int], list[int]], list[StepPlan]]:
    """Requests by the step in which they arrive, named by arrival; the drawn tokens of each choice, and all plans."""
    state, model = state or start(limits), model or Model(limits)
    tokens: dict[tuple[str, int], list[int]] = {}
    drawn: list[int] = []
    plans: list[StepPlan] = []
    step = count = 0
    last = max(adds, default=0)
    while step <= last or not state.idle:
        events = []
        for request in adds.get(step, []):
            events.append(Add(state.number + len(events), f"r{count}", request))
            count += 1
        state, plan, outputs = advance(state, events, drawn)
        for o in outputs:
            if o.token is not None and o.row is not None:
                tokens.setdefault((o.name, o.choice), []).append(o.token)
        drawn = model.run(plan) if plan else []
        plans += [plan] if plan else []
        step += 1
    return state, tokens, plans


def laws(examples: int, steps: int) -> int:
    before = Laws.steps
    run_state_machine_as_test(
        Laws,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            derandomize=True,
            database=None,
            deadline=None,
            # No shrinking, which takes minutes: the first story that fails is printed.
            phases=[Phase.generate],
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
            report_multiple_bugs=False,
        ),
    )
    return Laws.steps - before


def test_the_laws_hold_under_any_events() -> None:
    assert laws(60, 20) > 500


@pytest.mark.nightly
def test_the_laws_hold_for_ten_thousand_steps() -> None:
    assert laws(160, 40) >= 10_000


@pytest.mark.nightly
def test_the_laws_hold_where_all_keys_collide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_file, "_make_key", lambda fields: bytes(16))
    assert laws(60, 40) >= 1000


def test_outputs_do_not_depend_on_other_requests() -> None:
    rng = random.Random(0)

    def request(i: int) -> Request:
        prompt = tuple(rng.randrange(2) for _ in range(rng.randint(1, 14)))
        return Request(prompt, Sampling(max_tokens=rng.randint(1, 9), seed=i % 3, n=1 + 2 * (i % 5 == 0)))

    requests = [request(i) for i in range(60)]
    for blocks, running in ((7, 1), (7, 4), (40, 4)):
        limits = Limits(vocab=5, context=24, blocks=blocks, block=4, buckets=(1, 2, 4, 8), running=running)
        _, tokens, _ = run(limits, {i // 2: requests[i // 2 * 2 :][:2] for i in range(60)})
        for i, r in enumerate(requests):
            for choice in range(r.sampling.n):
                assert tokens[f"r{i}", choice] == alone(r, draw_key(r.sampling.seed, choice), 0, limits)


def test_a_cached_prefix_is_not_computed_again() -> None:
    prompt = tuple(i % 5 for i in range(12))
    state, _, first = run(LIMITS, {0: [Request(prompt, Sampling(max_tokens=1))]})
    assert sum(p.num_tokens for p in first) == 12
    again, _, plans = run(
        LIMITS, {0: [Request(prompt, Sampling(max_tokens=1))], 9: [Request(prompt, Sampling(max_tokens=1))]}
    )
    assert again.cache_stats == CacheStats(queries=24, hits=8, preemptions=0)
    assert sum(p.num_tokens for p in plans) == 12 + 4  # the last token is computed, and so is its block
    assert state.pool.counts() == {"free": 5, "held": 0, "cached": 3}


@pytest.mark.parametrize("other", [{"salt": b"b"}, {"adapter": b"b"}])
def test_other_salts_and_adapters_share_nothing(other: dict[str, bytes]) -> None:
    prompt = tuple(i % 5 for i in range(12))
    one = Sampling(max_tokens=1)
    _, _, plans = run(LIMITS, {0: [Request(prompt, one)], 9: [Request(prompt, one, **other)]})  # pyright: ignore
    assert sum(p.num_tokens for p in plans) == 24


def test_choices_share_the_blocks_of_their_prompt() -> None:
    request = Request(tuple(i % 5 for i in range(9)), Sampling(max_tokens=4, n=3))
    state, plan, _ = advance(start(LIMITS), [Add(0, "a", request)])
    model = Model(LIMITS)
    while len(state.running) < 3:
        assert plan is not None
        state, plan, _ = advance(state, (), model.run(plan))
    blocks = [s.blocks for s in state.running]
    assert blocks[0][:2] == blocks[1][:2] == blocks[2][:2]
    assert state.pool.counts()["held"] == 2 + 3


def test_decodes_are_not_delayed_by_long_prompts() -> None:
    limits = Limits(vocab=5, context=4096, blocks=600, block=16, buckets=(8, 16, 64), running=8)
    short = [Request((i,), Sampling(max_tokens=40)) for i in range(3)]
    long = [
        Request(tuple(i % 5 for i in range(2048)), Sampling(max_tokens=1, seed=s), salt=bytes([s])) for s in range(2)
    ]
    state, drawn, times = start(limits), [], dict[str, list[int]]()
    for step in range(60):
        events = [Add(i, f"s{i}", r) for i, r in enumerate(short)] if step == 0 else []
        events += [Add(3 + i, f"l{i}", r) for i, r in enumerate(long)] if step == 4 else []
        state, plan, outputs = advance(state, events, drawn)
        assert plan is not None and plan.num_tokens <= limits.budget
        assert step < 4 or step > 40 or plan.num_tokens == limits.budget
        drawn = [1] * plan.num_rows
        for o in outputs:
            times.setdefault(o.name, []).append(step)
    for i in range(3):
        assert times[f"s{i}"] == list(range(1, 41))


def test_an_old_request_ends_beside_a_stream_of_urgent_ones() -> None:
    limits = Limits(vocab=5, context=24, blocks=7, block=4, buckets=(4, 8), running=2, starvation_steps=20)
    state, drawn, ended = start(limits), [], None
    model = Model(limits)
    for step in range(200):
        events: list[Event] = [Add(0, "old", Request((1,) * 9, Sampling(max_tokens=8)))] if step == 0 else []
        urgent = Request((step % 5,) * 8, Sampling(max_tokens=8), priority=9)
        events.append(Add(state.number + len(events), f"u{step}", urgent))
        state, plan, outputs = advance(state, events, drawn)
        drawn = model.run(plan) if plan else []
        ended = next((step for o in outputs if o.name == "old" and o.finish_reason), ended)
        if step < 20:
            assert all(o.name != "old" for o in outputs)
    assert ended is not None and ended <= 20 + 9 + 8


def test_a_preempted_request_sends_nothing_twice() -> None:
    limits = Limits(vocab=5, context=24, blocks=7, block=4, buckets=(4, 8), running=4)
    requests = [Request((i,) * 5, Sampling(max_tokens=16, prompt_logprobs=True)) for i in range(4)]
    state, drawn, model, seen = start(limits), [], Model(limits), dict[str, list[int]]()
    events: list[Event] = [Add(i, f"r{i}", r) for i, r in enumerate(requests)]
    preempted, times = set(), 0
    while events or not state.idle:
        running = {s.serial for s in state.running}
        state, plan, outputs = advance(state, events, drawn)
        events = []
        times += len(running & {s.serial for s in state.sequences.values()} - {s.serial for s in state.running})
        preempted |= {s.name for s in state.sequences.values() if s.preempted >= 0}
        drawn = model.run(plan) if plan else []
        for o in outputs:
            seen.setdefault(o.name, []).append(o.position)
    assert len(preempted) >= 2 and state.cache_stats.preemptions >= times >= 2
    assert all(seen[f"r{i}"] == list(range(1, 21)) for i in range(4))


def started(request: Request, steps: int, limits: Limits = LIMITS) -> tuple[State, Model, list[int]]:
    state, plan, _ = advance(start(limits), [Add(0, "a", request)])
    model = Model(limits)
    drawn = model.run(plan) if plan else []
    for _ in range(steps):
        state, plan, _ = advance(state, (), drawn)
        drawn = model.run(plan) if plan else []
    return state, model, drawn


@pytest.mark.parametrize("steps", range(5))
def test_cancel_frees_in_every_phase(steps: int) -> None:
    state, _, drawn = started(Request((1,) * 12, Sampling(max_tokens=8)), steps)
    state, plan, outputs = advance(state, [Cancel(1, "a")], drawn)
    assert plan is None and state.idle and state.pool.counts()["held"] == 0
    assert [o.token for o in outputs] == [*drawn, None]
    assert [o.finish_reason for o in outputs] == [*[None] * len(drawn), "cancelled"]


def test_a_request_ends_by_its_last_token_before_a_cancel() -> None:
    state, _, drawn = started(Request((1,), Sampling(max_tokens=2)), 1)
    state, plan, [output] = advance(state, [Cancel(1, "a")], drawn)
    assert (output.token, output.finish_reason, plan, state.idle) == (drawn[0], "length", None, True)


def test_reasons_of_ends() -> None:
    ends: dict[str, Callable[[State, list[int]], tuple[State, StepPlan | None, list[Output]]]] = {
        "deadline": lambda state, drawn: advance(state, [Clock(1, 100)], drawn),
        "error": lambda state, drawn: advance(state, (), [-1]),
        "stop": lambda state, drawn: advance(state, (), [3]),
    }
    request = Request((1, 2), Sampling(max_tokens=8, stop_tokens=(3,)), deadline=100)
    for reason, end in ends.items():
        state, _, drawn = started(request, 0)
        state, plan, outputs = end(state, drawn)
        assert outputs[-1].finish_reason == reason and plan is None and state.idle


def test_an_error_ends_one_choice_alone() -> None:
    state, plan, _ = advance(start(LIMITS), [Add(i, f"r{i}", Request((i,), Sampling(max_tokens=3))) for i in range(3)])
    assert plan is not None and plan.num_rows == 3
    state, plan, outputs = advance(state, (), [1, -1, 2])
    assert [(o.name, o.token, o.finish_reason) for o in outputs] == [
        ("r0", 1, None),
        ("r1", None, "error"),
        ("r2", 2, None),
    ]
    assert [s.name for s in state.running] == ["r0", "r2"]


def test_after_drain_new_requests_are_refused_and_old_ones_end() -> None:
    state, model, drawn = started(Request((1, 2), Sampling(max_tokens=3)), 0)
    state, plan, outputs = advance(state, [Drain(1), Add(2, "late", Request((1,), Sampling(n=2)))], drawn)
    assert [(o.name, o.choice, o.finish_reason) for o in outputs if o.finish_reason] == [
        ("late", 0, "refused"),
        ("late", 1, "refused"),
    ]
    reasons = []
    while plan is not None:
        state, plan, outputs = advance(state, (), model.run(plan))
        reasons += [o.finish_reason for o in outputs if o.finish_reason]
    assert reasons == ["length"]


@pytest.mark.parametrize("recompute", [True, False])
def test_new_weights_never_meet_old_blocks(recompute: bool) -> None:
    request = Request((1,) * 12, Sampling(max_tokens=8))
    state, model, drawn = started(request, 3)
    again = Add(2, "b", request)
    state, plan, outputs = advance(state, [Weights(1, 1, recompute), again], drawn)
    versions: dict[str, list[int]] = {}
    while plan is not None:
        for o in outputs:
            versions.setdefault(o.name, []).append(o.version)
        state, plan, outputs = advance(state, (), model.run(plan))  # the model refuses reads of another version
    versions["b"] += [o.version for o in outputs]
    assert versions["b"] == [1] * 8
    assert versions["a"] == ([0, 0, 0] + [1] * 5 if recompute else [0] * 8)[-len(versions["a"]) :]
    assert state.version == 1


def test_a_state_is_donated_and_a_copy_is_not() -> None:
    state, _, drawn = started(Request((1,) * 6, Sampling(max_tokens=8)), 2)
    kept, before = state.copy(), digest(state)
    first = advance(state, (), drawn)
    with pytest.raises(DonatedError, match=r"advanced before.*state\.copy\(\)"):
        advance(state, (), drawn)
    assert digest(kept) == before
    second = advance(kept, (), drawn)
    assert digest(first[0]) == digest(second[0]) and first[2] == second[2]


MISTAKES: dict[str, tuple[list[Event], list[int], str]] = {
    "number": ([Clock(7, 1)], [0], "event 7 came where event 1 was expected"),
    "name": ([Add(1, "a", Request((1,)))], [0], "a request named 'a' is in progress"),
    "time": ([Clock(1, 1 << 63)], [0], "time must be an integer from 0.*got 9223372036854775808"),
    "version": ([Weights(1, 0)], [0], "version must be above 0.*got 0"),
    "rows": ([], [0, 1], "drawn must have 1 tokens, .*, got 2"),
    "token": ([], [5], r"drawn\[0\] must be from 0 to 4, or -1.*got 5"),
}


@pytest.mark.parametrize("kind", MISTAKES)
def test_a_mistake_leaves_the_state_unchanged(kind: str) -> None:
    events, drawn, words = MISTAKES[kind]
    state, _, right = started(Request((1,) * 6), 2)
    before = digest(state)
    with pytest.raises(ValueError, match=words):
        advance(state, events, drawn)
    assert digest(state) == before
    advance(state, (), right)


def story() -> str:
    """A digest of all states of a story, and of its outputs."""
    rng, limits = random.Random(3), LIMITS
    state, model, drawn, whole = start(limits), Model(limits), [], hashlib.blake2b()
    for step in range(120):
        events: list[Event] = []
        if rng.random() < 0.5:
            request = Request(
                (rng.randrange(2),) * rng.randint(1, 9), Sampling(max_tokens=5), priority=rng.randint(0, 2)
            )
            events.append(Add(state.number, f"r{step}", request))
        if rng.random() < 0.1:
            events.append(Cancel(state.number + len(events), f"r{rng.randrange(step + 1)}"))
        state, plan, outputs = advance(state, events, drawn)
        drawn = model.run(plan) if plan else []
        whole.update(digest(state) + repr(outputs).encode())
    return whole.hexdigest()


@pytest.mark.nightly
def test_states_do_not_depend_on_the_seed_of_hashes() -> None:
    program = "from tests.inference.test_schedule import story; print(story())"
    found = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed},
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for seed in ("0", "1", "2")
    }
    assert found == {story() + "\n"}


def grown(num: int) -> int:
    """Bytes that remain after this number of tiny requests."""
    limits = Limits(vocab=100, context=16, blocks=17, block=4, buckets=(1, 2, 4, 8, 16, 32), running=8)

    def serve(state: State, count: int) -> State:
        drawn: list[int] = []
        while count > 0 or not state.idle:
            base = state.number
            events = [
                Add(base + i, f"{base + i}", Request((1, (base + i) % 100), Sampling(max_tokens=1))) for i in range(8)
            ]
            state, plan, _ = advance(state, events[:count], drawn)
            count, drawn = count - 8, [5] * plan.num_rows if plan else []
        return state

    def held() -> int:
        gc.collect()  # the interpreter keeps up to 2,000 freed tuples of a length for later ones until then
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        state = serve(start(limits), 600)
        first = held()
        state = serve(state, num)
        return held() - first
    finally:
        tracemalloc.stop()


@pytest.mark.nightly
@pytest.mark.parametrize("num", [1000, 100_000])
def test_requests_that_have_ended_leave_nothing(num: int) -> None:
    assert grown(num) < 16_384


@pytest.mark.nightly
def test_padding_of_a_trace_is_small() -> None:
    rng, limits = random.Random(0), Limits(vocab=5, context=512, blocks=1025)
    adds: dict[int, list[Request]] = {}
    for _ in range(200):
        prompt = tuple(rng.randrange(5) for _ in range(rng.randint(16, 256)))
        adds.setdefault(rng.randrange(400), []).append(Request(prompt, Sampling(max_tokens=rng.randint(16, 128))))
    _, _, plans = run(limits, adds, model=_Quick(limits))
    assert 1 - sum(p.num_tokens for p in plans) / sum(p.bucket for p in plans) <= 0.15


class _Quick(Model):
    def run(self, plan: StepPlan) -> list[int]:
        return [r % 5 for r in range(plan.num_rows)]
