"""Covers `seq2seq_decoder`: encoder-decoder models in the engine, next to other requests, equal generation alone."""

import functools
from dataclasses import replace
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

import shardfn as sf
from shardfn.core import tree_map
from shardfn.inference import Engine, Limits, Sampling, limits_of, seq2seq_decoder
from shardfn.models import gpt, seq2seq
from shardfn.models.moe import Experts
from shardfn.models.seq2seq import Config
from shardfn.testing import distributed

SIZES: dict[str, Any] = {"vocab_size": 13, "d_model": 16, "num_heads": 4, "num_layers": 2, "d_ff": 20, "max_len": 24}
BART: dict[str, Any] = {**SIZES, "embedding_norm": True, "mlp": "gelu_erf", "tie_embeddings": True}
ROPE: dict[str, Any] = {**SIZES, "position": "rope", "norm": "rms", "mlp": "swiglu", "bias": False}
CONFIGS = {
    "t5": Config.t5_like(**SIZES, d_head=5, buckets=6, max_distance=5, decoder={"num_layers": 3}),
    "flan": Config.t5_like(**SIZES, d_head=4, mlp="geglu", tied=False, num_kv_heads=2, start=3),
    "experts": Config.t5_like(**SIZES, d_head=4, mlp="gelu", experts=Experts(4, d_ff=8, every=2)),
    "bart": Config(gpt.Config(**BART, causal=False), gpt.Config(**BART, head_bias=True), norm_sums=True, start=2),
    "rope": Config(gpt.Config(**ROPE, causal=False), gpt.Config(**ROPE)),
}
LIMITS = {"block": 4, "buckets": (3, 12), "running": 5, "context": 20, "source": 18}


@functools.cache
def draw_params(name: str, version: int = 0, dtype: torch.dtype = torch.float32) -> Any:
    made = seq2seq.init(CONFIGS[name], sf.key(version))
    return tree_map(lambda x: (x * 6 if x.ndim > 1 and x.std() < 0.1 else x).to(dtype), made)


def make_engine(name: str, *, wide: bool = False, blocks: int | None = None, **more: Any) -> Engine:
    decoder = seq2seq_decoder(CONFIGS[name])
    limits = limits_of(decoder, **LIMITS, cache_dtype="float64" if wide else "float32")
    limits = limits if blocks is None else replace(limits, blocks=blocks)
    params = draw_params(name, dtype=torch.float64 if wide else torch.float32)
    return Engine(decoder, params, limits=limits, eager_steps=10**6, **more)


def draw_sources(num: int, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 19, (num,), generator=generator).tolist()
    return [torch.randint(13, (n,), generator=generator).tolist() for n in lengths]


@pytest.mark.parametrize("name", CONFIGS)
def test_greedy_tokens_and_log_probabilities_are_those_of_the_model(name: str) -> None:
    config, params = CONFIGS[name], draw_params(name, dtype=torch.float64)
    engine, sources = make_engine(name, wide=True), draw_sources(4)
    for source, found in zip(sources, engine.generate(sources, Sampling(max_tokens=9, temperature=0.0)), strict=True):
        source_1S = torch.tensor([source])
        want = seq2seq.generate(config, params, source_1S, 9, sf.key(0), 0.0)[0].tolist()
        assert found.tokens == want
        inputs = seq2seq.shift_right(config, torch.tensor([want]))
        logprobs = seq2seq.apply(config, params, source_1S, inputs)[0].log_softmax(-1)
        picked = logprobs.gather(1, torch.tensor(want)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(found.logprobs, dtype=torch.float64), picked, rtol=0, atol=1e-10)
    [[one, other]] = engine.score(sources[:1], [[[5, 6, 7], [8]]])
    inputs = torch.tensor([[config.start, 5, 6]])
    logprobs = seq2seq.apply(config, params, torch.tensor(sources[:1]), inputs)[0].log_softmax(-1)
    torch.testing.assert_close(
        torch.tensor(one.logprobs, dtype=torch.float64), logprobs[range(3), [5, 6, 7]], rtol=0, atol=1e-10
    )
    assert abs(other.logprob - float(logprobs[0, 8])) < 1e-10
    check_pools(engine)


def check_pools(engine: Engine) -> None:
    """No block is held at the end."""
    counts = engine.core._state.sources.counts()
    assert engine.idle and engine.stats.counts["held"] == 0 and counts["held"] == 0


HOW = st.builds(
    Sampling,
    max_tokens=st.integers(1, 12),
    temperature=st.sampled_from([0.0, 1.3]),
    seed=st.integers(0, 3),
    n=st.sampled_from([1, 1, 2]),
    stop_tokens=st.sampled_from([(), (1, 4)]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.4]),
)
# Few sources, so that requests share them.
ARRIVAL = st.tuples(st.integers(0, 8), st.integers(0, 5), HOW, st.sampled_from([None, None, 3]))


@functools.cache
def generate_alone(name: str, version: int, source: int, how: Sampling) -> list[tuple[Any, ...]]:
    engine = shared_engine(name, version)
    found = engine.generate([SOURCES[source]], how)[0]
    return [(x.tokens, x.logprobs, x.finish_reason) for x in (found if how.n > 1 else [found])]


SOURCES = [*draw_sources(4, 1), [5] * 18, [7]]


@functools.cache
def shared_engine(name: str, version: int) -> Engine:
    engine = make_engine(name)
    if version:
        engine.update_weights(draw_params(name, version))
    return engine


def test_neighbours_change_no_bit() -> None:
    engine, how = make_engine("t5"), Sampling(max_tokens=5, seed=2)
    found = engine.generate(SOURCES, how)
    assert found == [engine.generate([source], how)[0] for source in SOURCES]
    assert found[::-1] == make_engine("t5").generate(SOURCES[::-1], how)
    check_pools(engine)


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["t5", "flan", "experts", "rope"])
def test_a_story_equals_each_request_alone(name: str) -> None:
    @settings(max_examples=10, derandomize=True, deadline=None, database=None)
    @given(st.lists(ARRIVAL, min_size=2, max_size=6), st.integers(6, 26), st.sampled_from([None, 3]))
    def run(arrivals: list[Any], blocks: int, update: int | None) -> None:
        engine, found, step = make_engine(name, blocks=blocks), dict[str, Any](), 0
        while step <= 9 or not engine.idle:
            for i, (at, source, how, cancel) in enumerate(arrivals):
                if at == step:
                    engine.add(SOURCES[source], how, name=str(i))
                    found[str(i)] = [([], [], []) for _ in range(how.n)]
                if cancel is not None and at + cancel == step:
                    engine.cancel(str(i))
            if update == step:
                engine.update_weights(draw_params(name, 1))
            for token in engine.step():
                tokens, logprobs, more = found[token.name][token.choice]
                if token.token is not None:
                    tokens.append(token.token)
                    logprobs.append((token.version, token.logprob))
                more += [token.finish_reason] if token.finish_reason else []
            step += 1
            assert step < 400
        check_pools(engine)
        for i, (_, source, how, _) in enumerate(arrivals):
            for choice, (tokens, logprobs, [reason]) in enumerate(found[str(i)]):
                versions = {version for version, _ in logprobs}
                if len(versions) != 1:
                    continue  # changed in the middle: no run alone has it
                want = generate_alone(name, versions.pop(), source, how)[choice]
                assert tokens == want[0][: len(tokens)] and [x for _, x in logprobs] == want[1][: len(tokens)]
                assert reason == "cancelled" or (reason, len(tokens)) == (want[2], len(want[0]))

    run()


def test_choices_and_requests_of_a_source_share_its_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine("t5")
    plain, fills = type(engine.runner).run, list[int]()

    def run(self: Any, weights: Any, cache: Any, plan: Any, *rest: Any, **more: Any) -> Any:
        fills.extend(len(fill.tokens) for fill in plan.fills)
        return plain(self, weights, cache, plan, *rest, **more)

    monkeypatch.setattr(type(engine.runner), "run", run)
    source, other = list(range(2, 11)), list(range(1, 10))
    how = Sampling(max_tokens=4, n=4, seed=1)
    first = engine.generate([source, other, source], how)
    assert fills == [9, 9] and [x.tokens for x in first[0]] == [x.tokens for x in first[2]]
    engine.generate([source], how)  # its blocks are cached
    assert fills == [9, 9]
    engine.update_weights(draw_params("t5", 1))
    engine.generate([source], how)
    assert fills == [9, 9, 9]
    check_pools(engine)


def test_a_captured_step_has_the_bits_of_the_eager_step() -> None:
    found = []
    for eager in (0, 10**6):
        engine = make_engine("t5")
        engine.runner._eager_steps = eager
        found.append(engine.generate(draw_sources(3), Sampling(max_tokens=5, seed=2)))
    assert found[0] == found[1]


@pytest.mark.nightly
@distributed(world=2)
def test_two_ranks_draw_the_tokens_of_one() -> None:
    config, sources = CONFIGS["flan"], draw_sources(3)
    params, how = draw_params("flan", dtype=torch.float64), Sampling(max_tokens=6, seed=3)
    found = []
    for tp in (None, "tp"):
        decoder = seq2seq_decoder(config, tp=tp)
        mesh = sf.make_mesh({"tp": 2}, device="cpu") if tp else None
        limits = limits_of(decoder, **LIMITS, cache_dtype="float64")
        engine = Engine(decoder, params, limits=limits, mesh=mesh, eager_steps=10**6)
        found.append(engine.generate(sources, how))
    for one, two in zip(*found, strict=True):
        assert one.tokens == two.tokens
        assert max(abs(a - b) for a, b in zip(one.logprobs, two.logprobs, strict=True)) < 1e-10


def test_bad_requests_and_settings_are_refused() -> None:
    engine = make_engine("t5")
    with pytest.raises(ValueError, match=r"is its source, and must have from 1 to 18 tokens, got 19.*source="):
        engine.add([1] * 19)
    with pytest.raises(ValueError, match=r"is its source, and must have from 1 to 18 tokens, got 0"):
        engine.add([])
    with pytest.raises(ValueError, match=r"source must be token ids from 0 to 12|source.*13"):
        engine.add([13])
    with pytest.raises(ValueError, match=r"cache='host' knows no sources of an encoder-decoder model"):
        make_engine("t5", cache="host")
    with pytest.raises(ValueError, match=r"limits.source is 0, and the longest source of the model has 24 tokens"):
        Engine(seq2seq_decoder(CONFIGS["t5"]), draw_params("t5"), limits=Limits(vocab=13, context=20, blocks=9))
    with pytest.raises(ValueError, match=r"batch_invariant=True does not know mlp='gelu_erf'"):
        seq2seq_decoder(CONFIGS["bart"], batch_invariant=True)
    with pytest.raises(ValueError, match=r"only for an engine"):
        half = seq2seq.replace_half(CONFIGS["t5"].decoder, batch_invariant=True)
        served = seq2seq.replace_halves(CONFIGS["t5"], {"decoder": half})
        seq2seq.apply(served, draw_params("t5"), torch.zeros(1, 2).long(), torch.zeros(1, 2).long())
    with pytest.raises(ValueError, match=r"(?s)specs does not match params.*w_gate'\] has no leaf"):
        Engine(seq2seq_decoder(CONFIGS["flan"]), draw_params("t5"))
    found = engine.generate([[4, 5]], Sampling(max_tokens=3, temperature=0.0))[0]
    name = engine.add([0, *found.tokens[:1]], Sampling(max_tokens=2, temperature=0.0), source=[4, 5])
    tokens = [t.token for _ in range(6) for t in engine.step() if t.name == name and t.token is not None]
    assert tokens == found.tokens[1:]
