"""Simulated engines and logs of decisions: the decisions of a real engine, and its bytes."""

import dataclasses
import json
import random
import time
from pathlib import Path

import pytest

from shardfn import core
from shardfn.core import deferred, key, make_mesh
from shardfn.inference import (
    DecisionLog,
    Engine,
    Grammar,
    Limits,
    Ngram,
    Request,
    Runner,
    Sampling,
    TimedRequest,
    decoder,
    limits_of,
    replay_log,
    simulate,
)
from shardfn.inference._decision_log import _decode_event, _encode_event
from shardfn.inference._events import Add
from shardfn.models import gpt
from shardfn.testing import distributed

CONFIG = gpt.Config(vocab_size=64, num_layers=2, d_model=32, num_heads=4, max_len=64, batch_invariant=True)
# Few blocks, so that sequences are preempted, and prompts with a common beginning.
LIMITS = Limits(vocab=64, context=64, blocks=14, block=4, buckets=(2, 4, 8, 16), running=6)


def draw_trace(num: int, seed: int = 0) -> list[TimedRequest]:
    draw, now, made = random.Random(seed), 0.0, []
    for i in range(num):
        now += draw.expovariate(60.0)
        prompt = (*range(1, 9), *(draw.randrange(64) for _ in range(draw.randrange(1, 12))))
        made.append(TimedRequest(now, Request(prompt, Sampling(max_tokens=draw.randrange(2, 24), seed=i)), ()))
    return made


def play(engine: Engine, trace: list[TimedRequest]) -> tuple[list[TimedRequest], list[float], float]:
    """Runs a trace on an engine, on a clock of the measured times of its steps. Waits take no time."""
    now, left, times, answers = 0.0, list(trace), [], {str(i): [] for i in range(len(trace))}
    while left or not engine.idle:
        if engine.idle:
            now = max(now, left[0].seconds)
        while left and left[0].seconds <= now:
            i = len(trace) - len(left)
            engine.add(left[0].request.prompt, left.pop(0).request.sampling, name=str(i))
        began = time.perf_counter()
        tokens = engine.step()
        times.append(time.perf_counter() - began)
        now += times[-1]
        for token in tokens:
            if token.token is not None:
                answers[token.name].append(token.token)
    return [x._replace(answer=tuple(answers[str(i)])) for i, x in enumerate(trace)], times, now


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory):
    path = tmp_path_factory.mktemp("log") / "decisions.jsonl"
    engine = Engine(decoder(CONFIG), gpt.init(CONFIG, key(0)), limits=LIMITS, decisions=(log := DecisionLog(path)))
    answered, times, now = play(engine, draw_trace(30))
    log.close()
    return engine, answered, times, now, path


def test_simulated_decisions_are_the_real_engines(run):
    engine, answered, times, now, path = run
    clock = iter(times)
    found = simulate(LIMITS, answered, lambda plan: next(clock))
    assert found.plans == tuple(x.plan for x in replay_log(path).steps)
    assert found.cache == engine.stats.cache and found.cache.preemptions > 0 and found.cache.hits > 0
    assert found.seconds == now and next(clock, None) is None
    assert len(found.latencies) == len(answered)


def test_a_log_replays_to_the_same_decisions(run):
    _, answered, times, _, path = run
    found = replay_log(path)
    assert found.limits == LIMITS and len(found.steps) == len(times)
    assert [x.answer for x in found.trace] == [x.answer for x in answered]
    assert [x.request.prompt for x in found.trace] == [x.request.prompt for x in answered]


def test_pauses_between_steps_count_and_waits_for_requests_do_not(tmp_path: Path):
    path = tmp_path / "pauses.jsonl"
    lines = [json.dumps({"limits": dataclasses.asdict(LIMITS), "tokenizer": ""})]
    engine = Engine(decoder(CONFIG), gpt.init(CONFIG, key(0)), limits=LIMITS, decisions=(log := DecisionLog(path)))
    for _ in range(2):
        engine.add([1, 2, 3], Sampling(max_tokens=2))
        while not engine.idle:
            engine.step()
    log.close()
    told = [json.loads(line) for line in path.read_text().splitlines()[1:]]
    for i, line in enumerate(told):  # each step takes 1 s, and 0.25 s pass before the next, or 5 s between requests
        line |= {"at": 1.25 * i + 4 * (i >= len(told) // 2), "seconds": 1.0}
    path.write_text("\n".join([*lines, *map(json.dumps, told)]) + "\n")
    half = len(told) // 2
    assert [x.pause for x in replay_log(path).steps] == [0.25] * (half - 1) + [0.0] + [0.25] * (half - 1) + [0.0]


def test_an_answer_that_stops_early_stops_in_a_simulation():
    request = Request((1, 2, 3), Sampling(max_tokens=20))
    found = simulate(LIMITS, [TimedRequest(0.0, request, (7, 8, 9))], lambda plan: 1.0)
    [one] = found.latencies
    assert (one.first, one.gaps, one.whole) == (2.0, (1.0, 1.0), 4.0)  # a step's tokens come with the next step


def test_a_changed_log_is_refused(run, tmp_path: Path):
    lines = run[-1].read_text().splitlines()
    line = json.loads(lines[5])
    line["drawn"] = [(x + 1) % 64 for x in line["drawn"]]
    bad = tmp_path / "bad.jsonl"
    bad.write_text("\n".join([*lines[:5], json.dumps(line), *lines[6:]]) + "\n")
    with pytest.raises(ValueError, match="step 4 must have the decisions of the log"):
        replay_log(bad)
    bad.write_text("\n".join(lines[1:]) + "\n")
    with pytest.raises(ValueError, match="the first line of a log of decisions has the limits"):
        replay_log(bad)
    bad.write_text(lines[0] + "\nno json\n")
    with pytest.raises(ValueError, match="line 2 is not valid JSON"):
        replay_log(bad)
    bad.write_text("\n".join(lines[:9]) + "\n" + lines[9][:20])  # an engine that was killed
    assert len(replay_log(bad).steps) == 8


def test_a_log_has_no_drafts(tmp_path: Path):
    limits = dataclasses.replace(LIMITS, drafts=3)
    log = DecisionLog(tmp_path / "x.jsonl")
    with pytest.raises(ValueError, match="without a drafter"):
        Engine(decoder(CONFIG), gpt.init(CONFIG, key(0)), limits=limits, drafter=Ngram(), decisions=log)
    log.close()


def test_requests_are_written_whole():
    sampling = Sampling(
        5,
        0.7,
        seed=1 << 63,
        stop=("a", "bc"),
        grammar=Grammar.regex("[0-9]{3}"),
        logit_bias=((1, 2.5),),
        bad_words=((1, 2),),
    )
    event = Add(3, "x", Request((1, 2), sampling, priority=2, deadline=7, adapter=b"\0a", salt=b"s"))
    assert _decode_event(json.loads(json.dumps(_encode_event(event)))) == event


def test_a_trace_whose_times_run_backwards_is_refused():
    one, two, *_ = draw_trace(2)
    with pytest.raises(ValueError, match="must not run backwards"):
        simulate(LIMITS, [two, one], lambda plan: 1.0)


def plan_bytes(ranks: int, num_layers: int, *, exact: bool = True):
    config = dataclasses.replace(CONFIG, num_layers=num_layers, batch_invariant=exact)
    one = decoder(config, tp="tp" if ranks > 1 else None)
    mesh = make_mesh({"tp": ranks} if ranks > 1 else {}, device="cpu", abstract=True)
    with deferred():
        params = gpt.init(config, key(0))
    return Runner(one, limits_of(one, running=4, buckets=(4, 8)), mesh=mesh).plan_memory(params)


@pytest.mark.parametrize("exact", [True, False])
def test_planned_bytes_are_the_engines(exact: bool):
    config = dataclasses.replace(CONFIG, batch_invariant=exact)
    one = decoder(config)
    engine = Engine(one, gpt.init(config, key(0)), limits=limits_of(one, running=4, buckets=(4, 8)))
    planned = plan_bytes(1, 2, exact=exact)
    assert planned == engine.memory()
    # The rest of a step does not depend on the number of layers.
    assert plan_bytes(1, 4, exact=exact).step == planned.step


@pytest.mark.nightly
@distributed(world=2)
def test_planned_bytes_are_the_engines_on_two_ranks():
    mesh = make_mesh({"tp": 2})
    one = decoder(CONFIG, tp="tp")
    engine = Engine(one, gpt.init(CONFIG, key(0)), mesh=mesh, limits=limits_of(one, running=4, buckets=(4, 8)))
    assert plan_bytes(2, 2) == engine.memory()
    assert core.tree_leaves(engine.core.weights)
