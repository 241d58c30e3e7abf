"""Covers a cache on the host: tokens, log probabilities and the cache are those of one on the device, bit for bit."""

import functools
import pathlib
from dataclasses import replace
from typing import Any

import pytest
import torch

import shardfn as sf
from shardfn import memory
from shardfn.inference import DraftModel, Engine, Ngram, Runner, Sampling, decoder, limits_of
from shardfn.inference._plan import make_padding
from shardfn.inference._pure_step import run_step
from shardfn.inference._tensors import make_tensors
from shardfn.models import gpt
from shardfn.testing import distributed
from tests.inference.drafters import Bush
from tests.inference.stories import Model, Story, check, model, run
from tests.inference.test_speculation import truth_of
from tests.inference.test_stories import KINDS, drawn_stories

SIZES: dict[str, Any] = {"vocab_size": 77, "num_layers": 12, "d_model": 64, "num_heads": 4, "max_len": 512}
PROMPTS = [[5, 6, 7], [1, 2, 3, 4, 5, 6, 7, 8, 9] * 3]
HOW = [Sampling(max_tokens=6, seed=3), Sampling(max_tokens=9, temperature=0.0)]


@functools.cache
def deep() -> tuple[Any, Any]:
    """A model of many layers, beside whose cache all else is small."""
    config = gpt.Config(**SIZES, batch_invariant=True)
    return decoder(config), gpt.init(config, sf.key(0))


def engine_of(**how: Any) -> Engine:
    made, params = deep()
    return Engine(made, params, limits=limits_of(made, running=4, buckets=(2, 12)), **how)


def completed(engine: Engine) -> list[tuple[list[int], list[float]]]:
    return [(c.tokens, c.logprobs) for c in engine.generate(PROMPTS, HOW)]


def hold(story: Story, one: Model, runners: list[Runner], limits: Any, drafter: Any = None) -> Engine:
    """Runs a story over a cache in each memory, and compares tokens and caches."""
    (told, engine), (want, resident) = (run(story, one, runner, limits, drafter) for runner in runners)
    assert told == want
    check(story, told, one)
    for x, y in zip(engine.core._cache, resident.core._cache, strict=True):
        assert (x.memory_kind, y.memory_kind) == ("host", "device")
        assert torch.equal(x.local.view(torch.uint8), y.local.view(torch.uint8))
    return engine


def tell(kind: str, number: int, drafter: Any = None, tp: str | None = None, mesh: Any = None, **more: Any) -> int:
    """Holds stories of preemption, shared prefixes, forks, cancels and new weights; returns the preemptions."""
    changes, limits = KINDS[kind]
    limits, one = replace(limits, **more), model(tp, **changes)
    runners = [Runner(one.decoder, limits, mesh=mesh, cache=cache) for cache in ("host", "device")]
    stories = drawn_stories(limits, number)
    uses = [hold(story, one, runners, limits, drafter).core.stats.cache for story in stories]
    assert sum(use.hits for use in uses) > 0
    return sum(use.preemptions for use in uses)


@pytest.mark.nightly
def test_stories() -> None:
    assert tell("gpt2", 4) > 0


@pytest.mark.nightly
@pytest.mark.parametrize("kind", list(KINDS))
def test_many_stories(kind: str) -> None:
    tell(kind, 60)


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", ["bfloat16", "int8", "fp8"])
def test_stories_of_other_dtypes(dtype: str) -> None:
    changes, limits = KINDS["llama"]
    limits, one = replace(limits, cache_dtype=dtype), model(**changes)
    runners = [Runner(one.decoder, limits, cache=cache) for cache in ("host", "device")]
    for story in drawn_stories(limits, 20):
        told, want = (run(story, one, runner, limits)[0] for runner in runners)
        assert told == want


@pytest.mark.nightly
@distributed(world=2)
def test_ranks_keep_their_own_heads() -> None:
    tell("gpt2", 4, tp="tp", mesh=sf.make_mesh({"tp": 2}))


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["ngram", "bush", "small model"])
def test_drafters_beside_it_change_nothing(name: str) -> None:
    """Drafts that branch move rows in the cache between steps; a small model has a cache of its own on the device."""
    changes, limits = KINDS["gpt2"]
    limits, one = replace(limits, buckets=(1, 3, 12), drafts=8), model(**changes)
    small = replace(limits, blocks=12, block=4, buckets=(2, 9), running=3, drafts=0)
    runner, accepted = Runner(one.decoder, limits, cache="host"), 0
    for story in drawn_stories(limits, 6):
        plain, _ = run(story, one, runner, limits)
        drafter = {
            "ngram": lambda: Ngram(longest=3, shortest=1),
            "bush": lambda told=plain, story=story: Bush(13, truth_of(story, told)),
            "small model": lambda: DraftModel(one.decoder, one.params[0], limits=small),
        }[name]()
        told, engine = run(story, one, runner, limits, drafter)
        check(story, told, one)
        accepted += engine.stats.speculation.accepted
    assert accepted > 0


def test_the_step_is_the_same_eager_and_captured() -> None:
    changes, limits = KINDS["llama"]
    one = model(**changes)
    runner = Runner(one.decoder, limits, cache="host")
    weights = runner.pack_weights(one.params[0])
    plan = make_padding(7, limits)
    plan.tokens[:], plan.slots[:] = type(plan.tokens)("i", range(7)), type(plan.slots)("i", range(6, 13))
    plan.positions[:], plan.sequences[:] = type(plan.slots)("i", range(7)), type(plan.slots)("i", [0] * 7)
    plan.tables[:3], plan.lengths[0] = type(plan.tables)("i", [2, 3, 4]), 7
    step = make_tensors(plan, limits, runner.mesh.device, host_cache=True)
    eager = sf.sharded(
        functools.partial(run_step, one.decoder, one.decoder.layouts["tp"], ()),
        specs=one.decoder.packed,
        in_specs=(one.decoder.cache.kept("host"), None),
        out_specs=(None, None, sf.Donated(1), None),
        donate=1,
    )
    found = [
        call(weights["tp"], runner.empty_cache(), step)
        for call in (eager, runner.bind(7, weights, runner.empty_cache()))
    ]
    (tokens, logprobs, cache, _), (tokens2, logprobs2, cache2, _) = found
    assert torch.equal(tokens, tokens2) and torch.equal(logprobs, logprobs2)
    assert all(torch.equal(x.local, y.local) for x, y in zip(cache, cache2, strict=True))
    assert all((x.local[2:4] != 0).any() and not x.local[5:].any() for x in cache)


def test_the_next_layers_blocks_are_under_way_while_a_layer_attends() -> None:
    engine = engine_of(cache="host")
    call: Any = engine.runner.bind(12, engine.core.weights, engine.core._cache)
    order = [n.target.__name__.split(".")[0] for n in call._ready.program.gm.graph.nodes if n.op == "call_function"]
    starts, attends = (
        [i for i, x in enumerate(order) if x == name] for name in ("rows_to_device_start", "ragged_attention")
    )
    assert len(starts) == len(attends) == 12
    assert all(a < b for a, b in zip(starts[1:], attends[:-1], strict=True))
    assert all(a > b for a, b in zip(starts[2:], attends[:-2], strict=True))


def test_a_step_moves_the_blocks_of_its_sequences_and_the_rows_of_its_tokens() -> None:
    engine = engine_of(cache="host")
    engine.warm_up()
    own = engine.core._cache[0].local
    block, row, layers = own[0].nbytes, own[0].nbytes // engine.limits.block, len(engine.core._cache)
    engine.add([7] * 36, Sampling(max_tokens=2, temperature=0.0))
    for length in (12, 24, 36, 37):
        bucket, blocks = 12 if length < 37 else 2, -(-length // 16)
        with memory.ledger() as book:
            engine.step()
        assert book.moved("host", "device") == layers * (blocks + 1) * block  # with block 0, of padding
        assert book.moved("device", "host") == layers * bucket * row
        assert book.transfers("host", "device") == book.transfers("device", "host") == layers
        # Two layers of the cache are on the device at a time, and all else that the plan has.
        assert book.peak("device") < 2.2 * own.nbytes


@pytest.mark.nightly
def test_the_device_needs_less_by_the_cache_but_for_two_layers() -> None:
    engine, resident = engine_of(cache="host"), engine_of()
    assert completed(engine) == completed(resident)
    plan, want, layer = engine.memory(), resident.memory(), engine.core._cache[0].local.nbytes
    assert (plan.weights, plan.cache) == (want.weights, want.cache) and (want.host, plan.host) == (0, plan.cache)
    assert want.device == want.total and plan.device + plan.host == plan.total
    assert plan.cache == 12 * layer
    assert plan.device <= want.device - plan.cache + 2.2 * layer
    assert "of all these, on the host" in str(plan) and "host" not in str(want)


@pytest.mark.nightly
def test_a_model_of_three_times_the_devices_memory_generates(tmp_path: pathlib.Path) -> None:
    """With weights on disk, too, the device holds neither; a CPU reads weights to the memory of the host."""
    resident = engine_of()
    engine = engine_of(cache="host", weights="disk", disk=sf.Disk(str(tmp_path)))
    want, limit = completed(resident), resident.memory().total // 3
    engine.warm_up()
    assert engine.memory().device <= limit
    with memory.ledger() as book:
        assert completed(engine) == want
    assert book.peak("device") <= limit  # beside the small leaves, which were there before
    engine.close()


@pytest.mark.nightly
@distributed(world=2)
def test_ranks_with_weights_on_disk_and_the_cache_on_the_host(tmp_path: pathlib.Path) -> None:
    config = gpt.Config(**{**SIZES, "num_layers": 3}, batch_invariant=True)
    made, params, mesh = decoder(config, tp="tp"), gpt.init(config, sf.key(0)), sf.make_mesh({"tp": 2})
    how: dict[str, Any] = {"mesh": mesh, "limits": limits_of(made, running=4, buckets=(2, 12))}
    engine = Engine(made, params, cache="host", weights="disk", disk=sf.Disk(str(tmp_path)), **how)
    assert completed(engine) == completed(Engine(made, params, **how))


@pytest.mark.nightly
@pytest.mark.parametrize("exact", [True, False])
def test_weights_on_the_host_embeddings_and_top_tokens(exact: bool) -> None:
    config = gpt.Config(**{**SIZES, "num_layers": 3}, batch_invariant=exact)
    made, params = decoder(config), gpt.init(config, sf.key(0))
    engines = [Engine(made, params), Engine(made, params, cache="host", weights="host")]
    first, second = (e.generate(PROMPTS, Sampling(max_tokens=5, top_logprobs=3, temperature=0.0)) for e in engines)
    assert first == second
    assert torch.equal(*(e.embed(PROMPTS, "mean") for e in engines))


def test_mistakes() -> None:
    made, params = deep()
    limits = limits_of(made, running=4, buckets=(2, 12))
    cases: list[tuple[dict[str, Any], str]] = [
        ({"cache": "disk"}, "cache must be 'device' or 'host', the memory of keys and values, got 'disk'"),
        ({"cache": "int8"}, r"got 'int8', a dtype: pass it as Limits\(cache_dtype=\)"),
        (
            {"cache": "host", "runner": Runner(made, limits)},
            r"cache='host' is the runner's to choose: Runner\(\.\.\., cache=\)",
        ),
    ]
    for wrong, words in cases:
        with pytest.raises(ValueError, match=words):
            Engine(made, params, limits=limits, **wrong)
