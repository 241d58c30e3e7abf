"""Rollouts by the engine: their log probabilities are the trainer's to the last bit, and mistakes are named."""

import dataclasses
import functools
import itertools
import re
from typing import Any

import pytest
import torch

import shardfn as sf
from shardfn import P, rl
from shardfn.core import Mesh
from shardfn.inference import Engine, Grammar, Sampling, decoder, limits_of
from shardfn.models import gpt
from shardfn.testing import distributed

CONFIG = gpt.Config.llama_like(
    vocab_size=19, num_layers=2, d_model=32, num_heads=4, num_kv_heads=2, d_ff=48, max_len=24, batch_invariant=True
)
PROMPTS = [[3, 4, 5, 6, 7], [8], [3, 4, 9, 1, 2, 3, 4, 5, 6], [11, 2]]
SAMPLING = Sampling(max_tokens=7, n=2, stop_tokens=(0, 1))
LENGTH = 18
STAGES = [0, *(pytest.param(stage, marks=pytest.mark.nightly) for stage in (1, 2)), 3]


def loss(config: gpt.Config, params: Any, batch: Any, *, axis: str | None = None, **how: Any) -> Any:
    rollout, advantages = batch
    logits = gpt.apply(config, params, rollout.ids, axis=axis, **how)
    logits = sf.all_gather_invariant(logits, axis, dim=-1, size=config.vocab_size)
    logprobs = rl.completion_logprobs(logits, rollout.ids, rollout.spans)
    metrics = rl.policy_metrics(logprobs, rollout.logprobs, rollout.lengths)
    return rl.grpo(logprobs, rollout.logprobs, advantages, rollout.lengths), metrics


def loss_at_answers(config: gpt.Config, params: Any, batch: Any) -> Any:
    rollout, advantages = batch
    logits = gpt.apply(config, params, rollout.ids, at=rl.completion_positions(rollout.ids, rollout.spans))
    logprobs = rl.logprobs_at(logits, rollout.ids, rollout.spans)
    metrics = rl.policy_metrics(logprobs, rollout.logprobs, rollout.lengths)
    return rl.grpo(logprobs, rollout.logprobs, advantages, rollout.lengths), metrics


def engine_of(config: gpt.Config, params: Any, *, tp: str | None = None, mesh: Mesh | None = None) -> Engine:
    one = decoder(config, tp=tp)
    return Engine(one, params, mesh=mesh, limits=limits_of(one, running=8, buckets=(32,)))


def iterate(step: Any, engine: Engine, params: Any, *, dp: slice = slice(0, 4)) -> list[rl.Rollout]:
    """Rollouts of two iterations; the ratios of each are exactly 1 before its update, and not any more after it."""
    state, rollouts = step.init(params), []
    for i in range(2):
        version = engine.update_weights(state.params if engine.mesh.size > 1 else sf.unshard(state.params))
        key = sf.fold_in(sf.key(7), i)
        rollout = rl.sample(engine, PROMPTS[dp], SAMPLING, key=key, start=dp.start, length=LENGTH)
        rl.check_versions(rollout, version)
        rewards = (rollout.ids == 5).sum(1).float() + rollout.lengths
        batch = (rollout, rl.group_advantages(rewards, SAMPLING.n))
        state, metrics = step(state, batch)
        assert float(metrics["exact"]) == 1 and float(metrics["ratio"]) == 1, metrics
        state, metrics = step(state, batch)
        assert float(metrics["exact"]) < 1
        rollouts.append(rollout)
    return rollouts


@functools.cache
def of_one_device() -> list[rl.Rollout]:
    alone, params = sf.make_mesh(alone=True), gpt.init(CONFIG, sf.key(0))
    step = sf.sharded_step(functools.partial(loss, CONFIG), sf.optim.sgd(0.5), mesh=alone, has_aux=True)
    return iterate(step, engine_of(CONFIG, params, mesh=alone), params)


@pytest.mark.nightly
@pytest.mark.parametrize("stage", STAGES)
@distributed(world=[1, 2, 4])
def test_first_ratios_are_one_on_any_ranks(world: int, stage: int) -> None:
    mesh, params = sf.make_mesh({"dp": world}), gpt.init(CONFIG, sf.key(0))
    how: dict[str, Any] = {"mesh": mesh, "zero": sf.Zero(stage=stage, persist_elements=0), "has_aux": True}
    step = sf.sharded_step(functools.partial(loss, CONFIG), sf.optim.sgd(0.5), **how)
    dp, rows = step.rows(len(PROMPTS)), step.rows(2 * len(PROMPTS))
    found = iterate(step, engine_of(CONFIG, params, mesh=sf.make_mesh(alone=True)), params, dp=dp)
    for a, b in zip(found[0], of_one_device()[0], strict=True):
        assert torch.equal(a.nan_to_num(), b[rows].nan_to_num())


@pytest.mark.nightly
@pytest.mark.parametrize("stage", STAGES)
@distributed(world=2)
def test_first_ratios_are_one_under_tensor_parallelism(world: int, stage: int) -> None:
    mesh, params = sf.make_mesh({"tp": world}), gpt.init(CONFIG, sf.key(0))
    how: dict[str, Any] = {"mesh": mesh, "specs": gpt.specs(CONFIG, tp="tp"), "batch": P(), "has_aux": True}
    one = functools.partial(loss, CONFIG, axis="tp")
    step = sf.sharded_step(one, sf.optim.sgd(0.5), zero=sf.Zero(stage=stage, axis="tp", persist_elements=0), **how)
    found = iterate(step, engine_of(CONFIG, step.init(params).params, tp="tp", mesh=mesh), params)
    for a, b in zip(found[0], of_one_device()[0], strict=True):
        assert torch.equal(a.nan_to_num(), b.nan_to_num())


@pytest.mark.day("remat")
@pytest.mark.parametrize("how", ["accumulate", "remat", pytest.param("jit", marks=pytest.mark.nightly), "tied"])
def test_first_ratios_are_one_under_transforms(how: str) -> None:
    small = gpt.Config(vocab_size=19, num_layers=2, d_model=32, num_heads=4, max_len=24, tie_embeddings=True)
    config = dataclasses.replace(small, batch_invariant=True) if how == "tied" else CONFIG
    one: Any = functools.partial(loss, config, **({"wrap": sf.remat} if how == "remat" else {}))
    one = sf.accumulate(one, 4) if how == "accumulate" else sf.jit(one) if how == "jit" else one
    params = gpt.init(config, sf.key(0))
    step = sf.sharded_step(one, sf.optim.sgd(0.5), has_aux=True)
    iterate(step, engine_of(config, params), params)


@pytest.mark.nightly
@pytest.mark.parametrize("jit", [False, True])
def test_first_ratios_are_one_of_logits_at_answers_only(jit: bool) -> None:
    params, one = gpt.init(CONFIG, sf.key(0)), functools.partial(loss_at_answers, CONFIG)
    step = sf.sharded_step(sf.jit(one) if jit else one, sf.optim.sgd(0.5), has_aux=True)
    iterate(step, engine_of(CONFIG, params), params)


@pytest.mark.nightly
def test_answers_do_not_depend_on_the_rank_that_draws_them() -> None:
    engine, key = engine_of(CONFIG, gpt.init(CONFIG, sf.key(0))), sf.key(3)
    whole = rl.sample(engine, PROMPTS, SAMPLING, key=key, length=LENGTH)
    parts = [rl.sample(engine, [p], SAMPLING, key=key, start=i, length=LENGTH) for i, p in enumerate(PROMPTS)]
    for name in rl.Rollout._fields[:5]:
        assert torch.equal(getattr(whole, name), torch.cat([getattr(part, name) for part in parts]))
    others = rl.sample(engine, PROMPTS, SAMPLING, key=sf.key(4), length=LENGTH)
    assert not torch.equal(whole.ids, others.ids)
    for row, (prompt, _) in enumerate(itertools.product(PROMPTS, range(2))):
        assert whole.tokens(row)[0] == prompt
        ended = whole.tokens(row)[1][-1] in (0, 1)
        assert bool(whole.ended[row]) == ended and (ended or whole.lengths[row] == 7)


@pytest.mark.nightly
def test_mistakes_are_named() -> None:
    params = gpt.init(CONFIG, sf.key(0))
    engine = engine_of(CONFIG, params)
    unusual = {"temperature": 0.7, "top_k": 5, "top_p": 0.9, "presence_penalty": 1.0, "logit_bias": ((3, 1.0),)}
    for name, value in unusual.items():
        words = re.escape(f"{name} is {value}; answers would be drawn from another distribution")
        with pytest.raises(ValueError, match=words):
            rl.sample(engine, [[1]], Sampling(**{name: value}), key=sf.key(0))
    with pytest.raises(ValueError, match=r"sample: the sampling must have no grammar.*Pass grammar=None"):
        rl.sample(engine, [[1]], Sampling(max_tokens=2, grammar=Grammar.regex("a*")), key=sf.key(0))
    with pytest.raises(ValueError, match=r"got 20 tokens in prompts\[1\] and up to 7 in answers, together 27"):
        rl.sample(engine, [[1], [2] * 20], SAMPLING, key=sf.key(0))
    with pytest.raises(TypeError, match=r"sample: key is 3.*sf.key\(3\)"):
        rl.sample(engine, [[1]], SAMPLING, key=3)  # pyright: ignore[reportArgumentType]
    engine.update_weights(sf.tree_map(lambda x: x * torch.nan, params))
    with pytest.raises(RuntimeError, match="row 0 ended as 'error' after 0 tokens; its logits are not finite"):
        rl.sample(engine, [[1]], SAMPLING, key=sf.key(0))
