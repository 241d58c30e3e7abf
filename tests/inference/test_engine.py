"""The engine's calls: results, refusals, failures of single requests, and memory."""

import dataclasses
import gc
import math
import resource
from typing import Any

import pytest
import torch

import shardfn as sf
from shardfn import core
from shardfn.core import tree_map
from shardfn.inference import Completion, Engine, Limits, Runner, Sampling, Token, decoder, limits_of, logprobs
from shardfn.inference._results import append_token
from shardfn.inference._token_queues import TokenQueues
from shardfn.models import gpt
from tests.inference.stories import model
from tests.inference.test_stories import KINDS, LIMITS, runner

GREEDY = Sampling(max_tokens=5, temperature=0.0)


def engine(**changes: Any) -> Engine:
    one = model(tie_embeddings=True)
    return Engine(one.decoder, one.params[0], runner=runner("gpt2"), limits=LIMITS, **changes)


def test_a_stream_yields_the_tokens_of_generate() -> None:
    [whole] = engine().generate([[1, 2, 0]], GREEDY)
    told = list(engine().stream([1, 2, 0], GREEDY))
    assert [t.token for t in told] == whole.tokens and [t.logprob for t in told] == whole.logprobs
    assert [t.finish_reason for t in told] == [None] * 4 + ["length"]


def test_a_stream_that_is_closed_cancels_its_request() -> None:
    one = engine()
    stream = one.stream([1, 2, 0], GREEDY)
    next(stream)
    stream.close()
    told = one.step()
    assert told[-1].finish_reason == "cancelled" and one.idle and one.stats.counts["held"] == 0


def test_a_stream_that_is_closed_before_its_first_token_cancels_its_request() -> None:
    one = engine()
    one.stream([1, 2, 0], GREEDY).close()
    [end] = one.step()
    assert end.finish_reason == "cancelled" and one.idle and one.core.requests == {}
    assert one.add([1, 2, 0], GREEDY, name=end.name) == end.name  # its name is free


def test_a_cancel_loses_no_token() -> None:
    [whole] = engine().generate([[1, 2, 0]], GREEDY)
    one = engine()
    stream = one.stream([1, 2, 0], GREEDY)
    [name] = one.core.requests
    told = [next(stream), next(stream)]  # the next token has been drawn by now
    one.cancel(name)
    told += stream
    assert [t.token for t in told] == [*whole.tokens[:3], None]
    assert [t.finish_reason for t in told] == [None] * 3 + ["cancelled"] and one.idle


def test_prompt_logprobs_name_their_versions() -> None:
    one, scored = engine(), dataclasses.replace(GREEDY, prompt_logprobs=True)
    stream = one.stream([1, 2, 0, 1, 2, 0, 1, 2, 0, 1, 2, 0, 1, 2, 0, 1], scored)  # longer than a step's rows
    made = [Completion([], [], None, [], [], [])]
    first = next(stream)
    append_token(made, first, 16)
    one.update_weights(model(**KINDS["gpt2"][0]).params[1])
    for token in stream:
        append_token(made, token, 16)
    [completion] = made
    assert len(completion.prompt_versions) == len(completion.prompt_logprobs) == 15
    assert completion.prompt_versions == sorted(completion.prompt_versions)
    assert set(completion.prompt_versions) == {0, 1} and set(completion.versions) == {1}


def test_streams_are_read_in_turns_beside_other_calls() -> None:
    one = engine()
    by_hand = one.add([4, 4], GREEDY, name="by hand")
    first, second = one.stream([1, 2], GREEDY), one.stream([3], GREEDY)
    pairs = [(a.token, b.token) for a, b in zip(first, second, strict=True)]
    [between] = one.generate([[5]], Sampling(max_tokens=9, temperature=0.0))
    told = []
    while not one.idle:
        told += one.step()
    alone = [engine().generate([p], GREEDY)[0].tokens for p in ([1, 2], [3], [4, 4])]
    assert [[a for a, _ in pairs], [b for _, b in pairs]] == alone[:2] and len(between.tokens) == 9
    assert [t.token for t in told] == alone[2] and {t.name for t in told} == {by_hand}


def test_a_generate_that_is_interrupted_leaves_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    one, advance = engine(), TokenQueues.advance
    monkeypatch.setattr(
        TokenQueues, "advance", lambda self: advance(self) if len(one.core.requests) < 2 else _interrupt()
    )
    with pytest.raises(KeyboardInterrupt):
        one.generate([[1], [2]], GREEDY)
    monkeypatch.undo()
    told = one.step()
    assert one.core.requests == {} and all(t.finish_reason == "cancelled" for t in told if t.finish_reason)


def _interrupt() -> None:
    raise KeyboardInterrupt


def test_names_of_the_engine_pass_over_given_ones() -> None:
    one = engine()
    one.add([1], GREEDY, name="request-1")
    assert len(one.generate([[1], [2]], GREEDY)) == 2


def test_arguments_of_wrong_types_are_refused_before_the_step() -> None:
    one = engine()
    for time in (1.5, -1, 1 << 63, "x", None):
        with pytest.raises(ValueError, match="must be an integer from 0"):
            one.core.tick(time)  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match="name must be a str, got a list"):
        one.cancel(["a"])  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match=r"sampling is a str. Pass a Sampling"):
        one.generate([[1]], {"max_tokens": 3})  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match=r"prompt must be a sequence of integers.*got a list"):
        one.add([1.5])  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match="colour: a request has priority"):
        one.add([1], colour=b"x")
    assert one.generate([torch.tensor([1, 2])], GREEDY) == one.generate([[1, 2]], GREEDY)  # pyright: ignore


def test_deadlines_end_requests_and_a_drain_refuses_them() -> None:
    one = engine()
    one.core.tick(1000)
    one.step()
    one.add([1], GREEDY, name="late", deadline=500)
    one.add([1], GREEDY, name="in time", deadline=5000)
    one.core.drain()
    one.add([1], GREEDY, name="refused")
    told = []
    while not one.idle:
        told += one.step()
    assert {t.name: t.finish_reason for t in told if t.finish_reason} == {
        "late": "deadline",
        "in time": "length",
        "refused": "refused",
    }


def test_a_runner_of_another_model_is_refused() -> None:
    other = model(tie_embeddings=True, window=2)
    with pytest.raises(ValueError, match="the runner is of another decoder"):
        Engine(other.decoder, other.params[0], limits=LIMITS, runner=runner("gpt2"))


def test_parameters_of_another_model_are_refused_though_panels_are_alike() -> None:
    one = model(**KINDS["llama"][0])
    other = gpt.init(dataclasses.replace(one.config, num_kv_heads=1, vocab_size=11), core.key(0))
    with pytest.raises(ValueError, match=r"(?s)another model.*\['wk'\] is \(6, 24\), and the model's is \(12, 24\)"):
        Engine(one.decoder, other, limits=KINDS["llama"][1], runner=runner("llama"))


def test_versions_that_never_run_are_dropped() -> None:
    one = engine()
    for _ in range(5):
        one.update_weights(model(tie_embeddings=True).params[1])
    assert len(one.core._versions) == 2
    one.step()
    assert len(one.core._versions) == 1 and one.generate([[1]], GREEDY)[0].versions[0] == 5


def test_a_version_runs_between_one_that_came_at_once_and_one_that_waits() -> None:
    one, params = engine(), model(tie_embeddings=True).params
    stream = one.stream([1, 2], GREEDY)
    told = [next(stream)]
    one.update_weights(params[1])
    one.update_weights(params[2], recompute=False)
    told += list(stream)
    assert [t.version for t in told] == [0, 0, 1, 1, 1] and len(one.core._versions) == 1
    assert one.generate([[1]], GREEDY)[0].versions[0] == 2


def test_choices_are_a_list_each_with_draws_of_its_own() -> None:
    [choices] = engine().generate([[1, 2]], Sampling(max_tokens=8, n=3, seed=1))
    assert len({tuple(c.tokens) for c in choices}) > 1
    [again] = engine().generate([[1, 2]], Sampling(max_tokens=8, n=3, seed=1))
    assert again == choices


@pytest.mark.day("presence", "frequency")
@pytest.mark.parametrize("kind", ["repetition", "presence", "frequency"])
def test_penalties_change_draws_and_not_log_probabilities(kind: str) -> None:
    one = model(tie_embeddings=True)
    strong: dict[str, Any] = {f"{kind}_penalty": 5.0 if kind == "repetition" else 2.0}
    [penalised, plain] = engine().generate(
        [[1, 2, 3], [1, 2, 3]],
        [Sampling(max_tokens=8, temperature=0.0, **strong), Sampling(max_tokens=8, temperature=0.0)],
    )
    assert penalised.tokens != plain.tokens
    logits = one.full(0, (1, 2, 3, *penalised.tokens))
    logprobs = logits.double().log_softmax(-1)
    for i, (token, logprob) in enumerate(zip(penalised.tokens, penalised.logprobs, strict=True)):
        assert abs(float(logprobs[2 + i, token]) - logprob) < 1e-5


def test_weights_with_a_nan_end_requests_as_errors() -> None:
    one = model(tie_embeddings=True)
    broken = tree_map(torch.clone, one.params[0])
    broken["position"][7] = math.nan  # only longer sequences read it
    made = Engine(one.decoder, broken, runner=runner("gpt2"), limits=LIMITS).generate(
        [[1, 2], [1] * 6], [Sampling(max_tokens=4, temperature=0.0)] * 2
    )
    assert [m.finish_reason for m in made] == ["length", "error"]
    assert len(made[1].tokens) == 2  # those at positions 6 and 7


@pytest.mark.day(7)
@pytest.mark.parametrize(
    ("prompt", "sampling", "message"),
    [
        ([], {}, "prompt must have from 1 to 27 tokens, got 0"),
        ([1] * 28, {}, "prompt must have from 1 to 27 tokens, got 28"),
        ([1] * 20, {"max_tokens": 9}, "must fit together in the context of 28 tokens, got 20 \\+ 9 = 29"),
        ([1, 13], {}, r"prompt\[1\] must be an integer from 0 to 12.*got 13"),
        ([1], {"temperature": math.nan}, "temperature must be .*got nan"),
        ([1], {"top_p": 0.0}, "top_p must be .*got 0.0"),
        ([1], {"n": 1 << 40}, "n must be .*got 1099511627776"),
        ([1], {"top_logprobs": 21}, "top_logprobs must be an integer from 0 to 20.*got 21"),
        ([1], {"logit_bias": {1: 2.0}}, r"logit_bias must be a tuple of pairs.*got {1: 2.0}"),
        ([1], {"logit_bias": ((13, 2.0),)}, "logit_bias must have tokens from 0 to 12, integers, got 13"),
        ([1], {"logit_bias": ((1, 101),)}, "logit_bias of token 1 must be a number from -100 to 100.*got 101"),
        ([1], {"logit_bias": ((1, math.nan),)}, "logit_bias of token 1 must be a number from -100 to 100, got nan"),
        ([1], {"logit_bias": ((1, 2.0), (1, 2.0))}, "logit_bias has token 1 twice"),
        ([1], {"logit_bias": ((1, 2.0),) * 1025}, "logit_bias must have at most 1024 tokens, got 1025"),
    ],
)
def test_a_request_that_cannot_run_is_refused_at_once(
    prompt: list[int], sampling: dict[str, Any], message: str
) -> None:
    one = engine()
    with pytest.raises(ValueError, match=message):
        one.generate([[1], prompt], [Sampling(), Sampling(**{"max_tokens": 2, **sampling})])
    assert one.idle and one.generate([[1]], GREEDY)


def test_a_name_in_progress_is_refused() -> None:
    one = engine()
    one.add([1], name="a")
    with pytest.raises(ValueError, match="named 'a' is in progress"):
        one.add([1], name="a")


def test_sizes_that_do_not_fit_are_refused() -> None:
    one = model(tie_embeddings=True)
    with pytest.raises(
        ValueError, match=r"(?s)limits.vocab is 14, and the model has 13.*context is 99.*longest sequence has 28"
    ):
        Engine(one.decoder, one.params[0], limits=Limits(vocab=14, context=99, blocks=99))
    with pytest.raises(ValueError, match="holds 0 tokens, fewer than context=28"):
        limits_of(one.decoder, cache_bytes=1000)
    with pytest.raises(ValueError, match="cache_dtype is 'float16'"):
        limits_of(one.decoder, cache_dtype="float16")
    with pytest.raises(ValueError, match="blocks follow from cache_bytes"):
        limits_of(one.decoder, blocks=9)
    with pytest.raises(ValueError, match="cache_dtype is 'float16'"):
        Runner(one.decoder, Limits(13, 28, 9, cache_dtype="float16"))


def test_weights_of_another_model_are_refused() -> None:
    one, other = engine(), gpt.init(gpt.Config(13, 2, 48, 4, max_len=28, tie_embeddings=True), core.key(0))
    with pytest.raises(ValueError, match="another model"):
        one.update_weights(other)
    lacking = dict(model(tie_embeddings=True).params[0])
    del lacking["norm_w"]
    with pytest.raises(ValueError, match="norm_w"):
        one.update_weights(lacking)
    assert one.generate([[1]], GREEDY)


@pytest.mark.nightly
def test_rollouts_have_the_log_probabilities_of_the_training_forward() -> None:
    """Equal bits: the importance ratio of the first epoch is exactly 1."""
    one = model(tie_embeddings=True)
    step = sf.sharded_step(lambda p, batch: gpt.loss(one.config, p, batch), sf.optim.adamw(0.1))
    state, _ = step(step.init(one.params[0]), {"tokens": torch.randint(0, 13, (2, 9))})
    serving = engine()
    serving.update_weights(state.params)
    [rollout] = serving.generate([[1, 2, 3]], Sampling(max_tokens=8, seed=5))
    tokens = torch.tensor([[1, 2, 3, *rollout.tokens]])
    logits = gpt.apply(one.config, sf.unshard(state.params), tokens)[0, 2:-1]
    assert logprobs(logits, tokens[0, 3:]).tolist() == rollout.logprobs and set(rollout.versions) == {1}


@pytest.mark.nightly
def test_training_goes_on_as_if_nothing_was_generated() -> None:
    one = model(tie_embeddings=True)
    step = sf.sharded_step(lambda p, batch: gpt.loss(one.config, p, batch), sf.optim.adamw(0.1))
    batch = {"tokens": torch.arange(18).view(2, 9) % 13}
    plain, between = step.init(one.params[0]), step.init(one.params[0])
    serving = engine()
    for _ in range(2):
        plain, _ = step(plain, batch)
        between, _ = step(between, batch)
        serving.update_weights(between.params)
        serving.generate([[1, 2]], GREEDY)
    for a, b in zip(core.tree_leaves(plain.params), core.tree_leaves(between.params), strict=True):
        assert torch.equal(a.local, b.local)


def test_planned_memory_has_weights_cache_and_step() -> None:
    plan = engine().memory()
    cache = 2 * LIMITS.blocks * LIMITS.block * 2 * 24 * 4
    assert plan.cache == cache and plan.weights > 0 and 0 < plan.step < 1 << 20
    assert str(plan).startswith(f"{plan.total / 2**20:.1f} MiB a rank")


@pytest.mark.nightly
def test_a_request_leaves_no_object_behind() -> None:
    one = engine()

    def ask() -> int:
        one.generate([[i % 13] for i in range(60)], Sampling(max_tokens=1, temperature=0.0))
        gc.collect()
        return len(gc.get_objects())

    ask()
    first = ask()
    assert ask() - first < 20, "objects of finished requests are kept"


@pytest.mark.nightly
def test_many_tiny_requests_do_not_grow_the_process() -> None:
    one = engine()

    def ask(num: int) -> int:
        for _ in range(num // 500):
            one.generate([[i % 13] for i in range(500)], Sampling(max_tokens=1, temperature=0.0))
        gc.collect()
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    warm = ask(10_000)
    assert ask(100_000) - warm <= 1024  # KiB


def test_an_engine_after_a_failed_step_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    one = engine()
    one.add([1, 2])

    def broken(*args: Any, **named: Any) -> Any:
        raise OSError("no more memory")

    monkeypatch.setattr(one.runner, "run", broken)
    with pytest.raises(OSError, match="no more memory"):
        one.step()
    with pytest.raises(RuntimeError, match="Make another engine"):
        one.step()


@pytest.mark.parametrize("call", ["step", "weights", "memory", "warm_up", "update_weights"])
def test_a_closed_engine_refuses_calls_that_need_its_weights(call: str) -> None:
    one = engine()
    one.close()
    with pytest.raises(RuntimeError, match=r"this engine is closed. Make another one"):
        found = getattr(one.core if call == "weights" else one, call)
        found(*[model(tie_embeddings=True).params[0]] * (call == "update_weights"))


def test_a_bucket_is_captured_once_and_quietly(caplog: pytest.LogCaptureFixture) -> None:
    config = gpt.Config(vocab_size=8, num_layers=1, d_model=8, num_heads=1, max_len=8)
    one = Engine(
        decoder(config), gpt.init(config, core.key(0)), limits=Limits(8, 8, 4, block=4, buckets=(1, 2), running=1)
    )
    one.warm_up()
    one.generate([[1, 2], [3]], Sampling(max_tokens=2))
    assert not [r for r in caplog.records if "captured" in r.message and r.levelname == "WARNING"]


def test_tokens_name_their_request() -> None:
    one = engine()
    one.add([1], GREEDY, name="a")
    one.add([2], GREEDY, name="b", priority=1)
    told: list[Token] = []
    while not one.idle:
        told += one.step()
    assert {t.name for t in told} == {"a", "b"} and sum(t.finish_reason == "length" for t in told) == 2
