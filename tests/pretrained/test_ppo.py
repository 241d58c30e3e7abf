"""Covers PPO of language models: parts of the state, the average, equal metrics on any ranks, and refusals."""

import dataclasses
from typing import Any

import pytest
import torch

import shardfn as sf
from shardfn import optim, rl
from shardfn.inference import Sampling
from shardfn.models import gpt
from shardfn.pretrained import GPTModel, make_ppo
from shardfn.testing import distributed

CONFIG = gpt.Config.llama_like(
    vocab_size=16, num_layers=1, d_model=32, num_heads=4, d_ff=64, max_len=16, tie_embeddings=True, batch_invariant=True
)
VALUES = dataclasses.replace(CONFIG, tie_embeddings=False)
RULES = {"actor": optim.adamw(1e-2), "critic": optim.adamw(2e-2)}
TOKENS = torch.arange(20).view(2, 10) % 16


def models_of(**changed: Any) -> dict[str, GPTModel]:
    configs = {"actor": CONFIG, "critic": VALUES, "reward": VALUES}
    made = {name: GPTModel(x, gpt.init(x, sf.key(i))) for i, (name, x) in enumerate(configs.items())}
    return {name: x for name, x in (made | changed).items() if x is not None}


def make(mesh: sf.Mesh, **how: Any) -> Any:
    how = {"ptx_coef": 0.5, "ema": 0.75, "zero": sf.Zero(stage=3, persist_elements=0)} | how
    return make_ppo(models_of(), RULES, Sampling(max_tokens=4, n=2), mesh=mesh, running=8, **how)


def train(mesh: sf.Mesh, **how: Any) -> list[dict[str, float]]:
    (ppo, state), found = make(mesh, **how), list[dict[str, float]]()
    own = ppo.policy.step.rows(2)
    for n in range(2):
        rollout = ppo.policy.sample(state, [[3, 1], [7]], sf.fold_in(sf.key(0), n), length=8)
        rewards = ppo.reward(state, rollout.ids, rollout.prompts + rollout.lengths)
        batch = ppo.ppo.experience(ppo.policy.step, state, rollout._replace(rewards=rewards))
        state, metrics = ppo.update(state, batch, {"tokens": TOKENS[own]})
        found.append({name: float(x) for name, x in metrics.items()})
    found.append({"average": sum(float(x.double().square().sum()) for x in sf.tree_leaves(ppo.average(state)))})
    return found


@pytest.mark.nightly
@distributed(world=2)
def test_ranks_learn_as_one() -> None:
    for mine, other in zip(train(sf.make_mesh({"dp": 2})), train(sf.make_mesh(alone=True)), strict=True):
        assert mine == pytest.approx(other, rel=1e-4, abs=1e-6, nan_ok=True)


@pytest.mark.nightly
@distributed(world=2)
def test_ranks_learn_adapters_as_one() -> None:
    ranks, alone = (train(mesh, lora=2) for mesh in (sf.make_mesh({"dp": 2}), sf.make_mesh(alone=True)))
    for mine, other in zip(ranks, alone, strict=True):
        assert mine == pytest.approx(other, rel=1e-4, abs=1e-6, nan_ok=True)


def test_the_parts_of_a_state() -> None:
    ppo, state = make(sf.make_mesh(alone=True))
    kinds = {name: {x.memory_kind for x in sf.tree_leaves(x)} for name, x in state.params.items()}
    assert kinds == {name: {"host" if name == "reference" else "device"} for name in kinds} and len(kinds) == 4
    first = sf.tree_map(torch.clone, sf.unshard(state.params))
    rollout = ppo.policy.sample(state, [[3, 1], [7]], sf.key(0))
    batch = ppo.ppo.experience(ppo.policy.step, state, rollout._replace(rewards=torch.tensor([1.0, 0.0, 2.0, 0.5])))
    state, metrics = ppo.update(state, batch, {"tokens": TOKENS})
    assert metrics["actor/exact"] == 1 and metrics["actor/kl"] == 0 and metrics["actor/divergence"].abs() < 1e-6
    total = metrics["actor/loss"] + metrics["critic/loss"] + metrics["ptx/loss"]
    assert torch.allclose(metrics["loss"], total) and torch.equal(metrics["ptx/loss"], 0.5 * metrics["ptx/text"])
    after = sf.unshard(state.params)
    for name, learns in {"actor": True, "critic": True, "reference": False, "reward": False}.items():
        pairs = zip(sf.tree_leaves(first[name]), sf.tree_leaves(after[name]), strict=True)
        assert all(torch.equal(x, y) != learns for x, y in pairs), name
    for a, x, y in zip(*map(sf.tree_leaves, (ppo.average(state), first["actor"], after["actor"])), strict=True):
        torch.testing.assert_close(a, 0.75 * x + 0.25 * y, rtol=1e-6, atol=1e-7)
    with pytest.raises(ValueError, match=r"text must be given exactly if ptx_coef is above 0, got ptx_coef=0.5 and no"):
        ppo.update(state, batch)


def test_adapters_learn_and_the_base_is_the_reference() -> None:
    ppo, state = make(sf.make_mesh(alone=True), lora=2, ptx_coef=0.0)
    assert sorted(state.params) == ["actor", "critic", "reward"]
    first = sf.tree_map(torch.clone, sf.unshard(state.params))
    rollout = ppo.policy.sample(state, [[3, 1], [7]], sf.key(0))
    batch = ppo.ppo.experience(ppo.policy.step, state, rollout._replace(rewards=torch.tensor([1.0, 0.0, 2.0, 0.5])))
    state, metrics = ppo.update(state, batch)
    assert metrics["actor/divergence"].abs() < 1e-6 and metrics["actor/kl"].abs() < 1e-6
    after = sf.unshard(state.params)
    for name, part, learns in (
        ("actor", "base", 0),
        ("critic", "base", 0),
        ("actor", "lora", 1),
        ("critic", "lora", 1),
    ):
        pairs = zip(
            *(map(torch.linalg.vector_norm, sf.tree_leaves(x[name][part])) for x in (first, after)), strict=True
        )
        assert any(x != y for x, y in pairs) == bool(learns), (name, part)
    whole = ppo.policy.merge(state)
    again = ppo.ppo.experience(ppo.policy.step, state, rollout)
    ids, spans = rollout.ids, rollout.spans
    drawn = rl.completion_logprobs(ppo.ppo.actor(after["actor"], ids), ids, spans)
    for found, params in ((again.ref_logprobs, first["actor"]["base"]), (drawn, whole)):
        wanted = rl.completion_logprobs(gpt.apply(CONFIG, params, ids), ids, spans)
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    average = ppo.average(state)
    assert sf.tree_leaves(average)[0].shape == sf.tree_leaves(whole)[0].shape
    with pytest.raises(ValueError, match=r"must be the base of the actor with adapters, got lora=2 and a reference"):
        make_ppo(models_of(reference=models_of()["actor"]), RULES, Sampling(max_tokens=4), lora=2)


def wrong_models(**changed: Any) -> Any:
    return make_ppo(models_of(**changed), RULES, Sampling(max_tokens=4), mesh=sf.make_mesh(alone=True))


def test_models_that_do_not_fit_are_named() -> None:
    wide = dataclasses.replace(VALUES, d_model=64)
    with pytest.raises(ValueError, match=r"critic\['embed'\] must have the shape \(16, 64\) .*got \(16, 32\)"):
        wrong_models(critic=models_of()["critic"]._replace(config=wide))
    other = dataclasses.replace(VALUES, vocab_size=20)
    with pytest.raises(ValueError, match="'reward' has 20 tokens, and the actor has 16: take a model with the actor's"):
        wrong_models(reward=GPTModel(other, gpt.init(other, sf.key(0))))
    with pytest.raises(ValueError, match="'critic' is missing in models"):
        wrong_models(critic=None)
    with pytest.raises(ValueError, match=r"must be actor, critic, reference or reward, got \['rewards'\]"):
        wrong_models(rewards=models_of()["reward"])
    mesh = sf.make_mesh(alone=True)
    with pytest.raises(ValueError, match=r"ptx_coef must be 0 or more and finite, got -0\.5"):
        make(mesh, ptx_coef=-0.5)
    for decay in (1.0, -0.1):
        with pytest.raises(ValueError, match=rf"average_params: decay={decay} must be a number in \[0, 1\)"):
            make(mesh, ema=decay)
    with pytest.raises(ValueError, match=r"make_ppo: the mesh must have only the axis 'dp'"):
        make(sf.make_mesh({"tp": 1}, alone=True))
