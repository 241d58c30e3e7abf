"""Experts of the draws in training: an engine records them, and the training forward replays them."""

import dataclasses
import functools
from typing import Any

import pytest
import torch

import shardfn as sf
from shardfn import rl
from shardfn.inference import Engine, Ngram, Runner, Sampling, decoder, limits_of
from shardfn.models import gpt, moe
from shardfn.testing import distributed
from tests.inference.drafters import Adversary, Bush

EXPERTS = moe.Experts(num=16, balance=0.0)
CONFIG = moe.mixtral_like(
    vocab_size=19,
    num_layers=2,
    d_model=16,
    num_heads=2,
    num_kv_heads=1,
    d_ff=16,
    max_len=24,
    experts=EXPERTS,
    batch_invariant=True,
)
DENSE = dataclasses.replace(CONFIG, experts=None)
PROMPTS = [[3, 4, 5, 6, 7, 3, 4, 5, 6, 7], [8], [3, 4, 5, 6, 7, 2]]
SAMPLING, LENGTH = Sampling(max_tokens=8, n=2, stop_tokens=(0,)), 20


def params(config: gpt.Config = CONFIG, seed: int = 0) -> Any:
    """Parameters with routers that choose among all experts."""
    made = gpt.init(config, sf.key(seed))
    for block in made["blocks"]:
        if "router" in block:
            block["router"] = 8 * block["router"]
    return made


def limits(model: Any, **how: Any) -> Any:
    return limits_of(model, running=6, block=4, buckets=(32,), **how)


@functools.cache
def runner() -> Runner:
    return Runner(MODEL, limits(MODEL))


MODEL = decoder(CONFIG)


def engine_of(params: Any) -> Engine:
    return Engine(MODEL, params, limits=limits(MODEL), runner=runner(), record_experts=True)


def sampled(params: Any, engine: Engine | None = None) -> rl.Rollout:
    engine = engine_of(params) if engine is None else engine
    return rl.sample(engine, PROMPTS, SAMPLING, key=sf.key(1), length=LENGTH)


def known(x: rl.Rollout) -> torch.Tensor:
    """The tokens that were computed: all but the last one of each row."""
    return torch.arange(x.ids.shape[1]) < (x.prompts + x.lengths - 1)[:, None]


def check_routes(x: rl.Rollout, params: Any) -> None:
    own = gpt.choices(CONFIG, params, x.ids)
    assert torch.equal(x.expert_ids[known(x)].long(), own[known(x)])
    assert bool((x.expert_ids[~known(x)] == -1).all()) and len(own[known(x)].unique()) > 8


@pytest.mark.nightly
def test_recorded_experts_are_those_of_the_training_forward() -> None:
    x = sampled(params())
    assert x.expert_ids.shape == (6, LENGTH, 2, 2) and x.expert_ids.dtype == torch.int16
    check_routes(x, params())


def test_a_replay_of_the_own_choices_has_the_bits_of_the_forward() -> None:
    x, found = sampled(params()), []
    for chosen in (None, x.expert_ids):
        own = sf.tree_map(lambda p: p.clone().requires_grad_(), params())
        logits = gpt.apply(CONFIG, own, x.ids, chosen=chosen)
        logprobs = rl.completion_logprobs(logits, x.ids, x.spans)
        assert torch.equal(logprobs, x.logprobs)
        logprobs.sum().backward()
        found.append([p.grad for p in sf.tree_leaves(own)])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_a_replay_keeps_the_experts_of_weights_that_are_rounded() -> None:
    exact = params()
    for block in exact["blocks"]:  # pairs of experts whose scores are near
        block["router"][1::2] = block["router"][::2] * (1 + 1e-3 * torch.linspace(-1, 1, 16))
    x = sampled(sf.tree_map(lambda p: p.bfloat16().float(), exact))
    at = known(x)
    assert not torch.equal(gpt.choices(CONFIG, exact, x.ids)[at], x.expert_ids[at].long())
    replayed = gpt.choices(CONFIG, exact, x.ids, chosen=x.expert_ids)
    assert torch.equal(replayed[at], x.expert_ids[at].long())
    assert bool((replayed[~at] == -1).all())


def test_experts_of_cached_blocks_are_known() -> None:
    engine = engine_of(params())
    first, again = sampled(params(), engine), sampled(params(), engine)
    assert engine.stats.counts["cached"] > 0 and torch.equal(first.expert_ids, again.expert_ids)
    other = params(seed=5)
    engine.update_weights(other)
    check_routes(sampled(other, engine), other)


@pytest.mark.nightly
def test_experts_of_preempted_requests_are_known() -> None:
    small = dataclasses.replace(limits(MODEL), blocks=10)
    tight = Engine(MODEL, params(), limits=small, record_experts=True)
    assert torch.equal(sampled(params(), tight).expert_ids, sampled(params()).expert_ids)


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["ngram", "chain", "tree", "shared"])
def test_drafts_change_no_experts(kind: str) -> None:
    x, sizes = sampled(params()), limits_of(MODEL, running=6, block=4, buckets=(48,), drafts=24)
    rows = zip(x.ids, x.prompts + x.lengths, strict=True)
    truth = {(f"request-{i // 2}", i % 2): row[:num].tolist() for i, (row, num) in enumerate(rows)}
    drafters = {"ngram": Ngram(), "chain": Adversary(19, truth, 2), "tree": Bush(19, truth), "shared": Bush(19, truth)}
    engine = Engine(MODEL, params(), limits=sizes, drafter=drafters[kind], record_experts=True)
    for again in range(1 + (kind == "shared")):  # moved experts of cached blocks are those that the next request has
        drafted = sampled(params(), engine)
        assert torch.equal(x.expert_ids, drafted.expert_ids) and torch.equal(x.logprobs, drafted.logprobs), again
    assert kind == "ngram" or engine.stats.speculation.accepted > 8


def test_conversations_have_the_experts_of_all_turns() -> None:
    how: dict[str, Any] = {"call_tokens": range(1, 6), "key": sf.key(2), "length": LENGTH}
    found = rl.converse(engine_of(params()), PROMPTS, SAMPLING, lambda prompt, answer: [11, 12], **how)
    x = found.rollout
    at = torch.arange(LENGTH) < x.places.amax(1, keepdim=True)  # the last token is never computed
    assert found.calls.max() > 1
    assert torch.equal(x.expert_ids[at].long(), gpt.choices(CONFIG, params(), x.ids)[at])
    assert bool((x.expert_ids[~at] == -1).all())


@pytest.mark.nightly
def test_experts_are_recorded_at_another_temperature() -> None:
    model = rl.with_temperature(MODEL, 0.7)
    x = sampled(None, Engine(model, params(), limits=limits(model), record_experts=True))
    logits = gpt.apply(CONFIG, params(), x.ids, chosen=x.expert_ids) / 0.7
    assert torch.equal(rl.completion_logprobs(logits, x.ids, x.spans), x.logprobs)


def test_a_step_learns_with_replayed_experts() -> None:
    def loss(params: Any, batch: Any) -> Any:
        x, advantages = batch
        logits = gpt.apply(CONFIG, params, x.ids, chosen=x.expert_ids)
        logprobs = rl.completion_logprobs(logits, x.ids, x.spans)
        metrics = rl.policy_metrics(logprobs, x.logprobs, x.lengths)
        return rl.grpo(logprobs, x.logprobs, advantages, x.lengths), metrics

    step = sf.sharded_step(sf.accumulate(loss, 2), sf.optim.sgd(0.1), has_aux=True)
    state, x = step.init(params()), sampled(params())
    for exact in (True, False):
        state, metrics = step(state, (x, torch.linspace(-1, 1, 6)))
        assert (float(metrics["exact"]) == 1) == exact


def test_mistakes_are_named() -> None:
    x = sampled(params())
    with pytest.raises(
        ValueError, match=r"record_experts is True, and the decoder has expert_shape=\(0, 0\).*Leave it out"
    ):
        Engine(decoder(DENSE), gpt.init(DENSE, sf.key(0)), record_experts=True)
    with pytest.raises(ValueError, match=r"chosen has shape \(6, 20, 2, 2\).* The config has no experts"):
        gpt.apply(DENSE, gpt.init(DENSE, sf.key(0)), x.ids, chosen=x.expert_ids)
    with pytest.raises(ValueError, match=r"k=2 choices in 2 layers with experts, so chosen must be \(6, 20, 2, 2\)"):
        gpt.apply(CONFIG, params(), x.ids, chosen=x.expert_ids[..., :1])
    with pytest.raises(ValueError, match="choices: the config has experts=None"):
        gpt.choices(DENSE, gpt.init(DENSE, sf.key(0)), x.ids)


@pytest.mark.nightly
@distributed(world=2)
def test_ranks_of_one_engine_record_the_experts_of_one_device(world: int) -> None:
    mesh, one = sf.make_mesh({"tp": world}), sf.make_mesh(alone=True)
    cut = dataclasses.replace(EXPERTS, exchange=sf.nn.moe.AllReduce("tp", in_order=True))
    model = decoder(dataclasses.replace(CONFIG, num_kv_heads=2, experts=cut), tp="tp")
    whole = dataclasses.replace(CONFIG, num_kv_heads=2)
    wanted = Engine(decoder(whole), params(whole), mesh=one, limits=limits(decoder(whole)), record_experts=True)
    engine = Engine(model, params(whole), mesh=mesh, limits=limits(model), record_experts=True)
    for a, b in zip(sampled(None, engine), sampled(None, wanted), strict=True):
        assert torch.equal(a.nan_to_num(), b.nan_to_num())
