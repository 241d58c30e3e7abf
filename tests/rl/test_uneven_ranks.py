"""Rollouts of ranks whose answers end at different times, or that have no prompt; recorded values are recomputed."""

import functools
from typing import Any

import pytest
import torch

import shardfn as sf
from shardfn import rl
from shardfn.inference import Sampling
from shardfn.models import gpt
from shardfn.testing import distributed
from tests.rl.test_sample import CONFIG, engine_of

PROMPTS = [[3, 4, 5], [8], [9, 1, 2, 3, 4]]
SAMPLING = Sampling(max_tokens=12, n=2, stop_tokens=(0, 1, 2, 3))
LENGTH = 24


def logprobs(params: Any, x: rl.Rollout) -> torch.Tensor:
    return rl.completion_logprobs(gpt.apply(CONFIG, params, x.ids), x.ids, x.spans)


def loss(params: Any, batch: Any) -> Any:
    x, advantages = batch
    found = logprobs(params, x)
    return rl.grpo(found, x.logprobs, advantages, x.lengths), rl.policy_metrics(found, x.logprobs, x.lengths)


def iterate(mesh: sf.Mesh, prompts: slice, stage: int) -> tuple[rl.Rollout, Any, Any]:
    params = gpt.init(CONFIG, sf.key(0))
    zero = sf.Zero(stage=stage, persist_elements=0)
    step = sf.sharded_step(loss, sf.optim.sgd(0.5), mesh=mesh, zero=zero, has_aux=True)
    engine, state = engine_of(CONFIG, params, mesh=sf.make_mesh(alone=True)), step.init(params)
    engine.update_weights(sf.unshard(state.params))
    x = rl.sample(engine, PROMPTS[prompts], SAMPLING, key=sf.key(7), start=prompts.start, length=LENGTH)
    x = x._replace(rewards=(x.ids == 5).sum(1).float() + x.lengths)
    state, metrics = step(state, (x, rl.group_advantages(x.rewards, SAMPLING.n)))
    return x, sf.unshard(state.params), {name: float(value) for name, value in metrics.items()}


@functools.cache
def of_one_device() -> tuple[rl.Rollout, Any, Any]:
    return iterate(sf.make_mesh(alone=True), slice(0, 3), 0)


@pytest.mark.parametrize("stage", [pytest.param(0, marks=pytest.mark.nightly), 3])
@distributed(world=[2, pytest.param(4, marks=pytest.mark.nightly)])
def test_a_rank_without_a_prompt(world: int, stage: int) -> None:
    mesh = sf.make_mesh({"dp": world})
    prompts = [slice(0, 3), *(slice(3, 3) for _ in range(world - 1))][mesh.rank]
    if world == 4:
        prompts = (slice(0, 1), slice(1, 1), slice(1, 2), slice(2, 3))[mesh.rank]
    x, params, metrics = iterate(mesh, prompts, stage)
    whole, wanted, expected = of_one_device()
    assert len(set(whole.lengths.tolist())) > 2  # answers end at different times
    for a, b in zip(x, whole, strict=True):
        assert torch.equal(a, b[2 * prompts.start : 2 * prompts.stop])
    assert metrics["exact"] == expected["exact"] == 1
    for a, b in zip(sf.tree_leaves(params), sf.tree_leaves(wanted), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.nightly
def test_log_probabilities_under_the_recorded_version_are_those_recorded() -> None:
    versions = [gpt.init(CONFIG, sf.key(i)) for i in range(3)]
    engine = engine_of(CONFIG, versions[0])
    for i, params in enumerate(versions):
        version = engine.update_weights(params) if i else 0
        x = rl.sample(engine, PROMPTS, SAMPLING, key=sf.key(i), length=LENGTH)
        rl.check_versions(x, version)
        rl.check_first_ratios(logprobs(versions[version], x), x)
        with pytest.raises(ValueError, match=f"by version {version}"):
            rl.check_first_ratios(logprobs(versions[version - 1], x), x)


@pytest.mark.nightly
def test_log_probabilities_do_not_depend_on_padding() -> None:
    params = gpt.init(CONFIG, sf.key(0))
    x = rl.sample(engine_of(CONFIG, params), PROMPTS, SAMPLING, key=sf.key(1), length=LENGTH)
    whole, other = logprobs(params, x), x._replace(ids=x.ids.clone())
    for row in range(len(x.ids)):
        end = int(x.prompts[row] + x.lengths[row])
        other.ids[row, end:] = 1 + row  # stop tokens among them
        alone = rl.Rollout(*(leaf[row : row + 1] for leaf in x))._replace(ids=x.ids[row : row + 1, :end])
        assert torch.equal(logprobs(params, alone)[0], whole[row])
    assert torch.equal(logprobs(params, other), whole)
