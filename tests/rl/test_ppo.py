"""Covers PPO of one state: TRL's numbers, a text as a second loss, equal results on any ranks, and refusals."""

import functools
import json
import pathlib
from typing import Any

import pytest
import torch
from torch import Tensor

import shardfn as sf
from shardfn import optim, rl
from shardfn.core import Mesh
from shardfn.models import gpt
from shardfn.testing import distributed
from tests.rl.test_four_models import CONFIG, LENGTH, ROWS, params_of, rollout_of

GOLDEN = json.loads(pathlib.Path(__file__).with_name("trl_ppo_goldens.json").read_text())
PLAIN = rl.PPO(lambda logits, ids: logits, lambda values, ids: values, gamma=0.99, clip_reward_value=None)


def golden(name: str) -> Tensor:
    return torch.tensor(GOLDEN[name], dtype=torch.int64 if name == "lengths" else torch.float64)


def of_two_tokens(name: str) -> Tensor:
    """Logits [B, T + 1, 2] by which the first token has the golden log probabilities."""
    log = torch.nn.functional.pad(golden(name), (0, 1), value=-0.5)
    return torch.stack([log, (-log.expm1()).log()], -1)


def test_equals_trl() -> None:
    rollout = rl.empty_rollout(3, 5, 4, dtype=torch.float64)
    rollout = rollout._replace(prompts=torch.ones(3, dtype=torch.int64), lengths=golden("lengths"))
    places = (1 + torch.arange(4)) * rl.completion_mask(rollout.lengths, 4)
    rollout = rollout._replace(logprobs=golden("old"), rewards=golden("scores"), places=places)
    only = {"actor": True, "critic": True, "reference": False}
    how = {"mesh": sf.make_mesh(alone=True), "trainable": only, "has_aux": True}
    step = sf.sharded_step(PLAIN.objectives(), optim.sgd(0.1), **how)
    values, new_values = (torch.nn.functional.pad(golden(name), (0, 1)) for name in ("values", "new_values"))
    old = {"actor": of_two_tokens("old"), "critic": values, "reference": of_two_tokens("reference")}
    batch = PLAIN.experience(step, step.init(sf.tree_map(torch.clone, old)), rollout)
    torch.testing.assert_close(batch.advantages, golden("advantages"), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(batch.returns, golden("returns"), rtol=1e-12, atol=1e-12)

    new = {**old, "actor": of_two_tokens("new"), "critic": new_values}
    state = step.init(sf.tree_map(torch.clone, new))
    grads, metrics = step.gradients(state, {"actor": batch, "critic": batch})
    for loss, name in (("actor", "policy"), ("critic", "value")):
        torch.testing.assert_close(metrics[f"{loss}/loss"], golden(name), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(grads["critic"].full_tensor()[:, :4], golden("value_grad"), rtol=1e-12, atol=1e-12)
    of_logits = golden("policy_grad") * -golden("new").expm1()  # d log p / d logit = 1 - p
    torch.testing.assert_close(grads["actor"].full_tensor()[:, :4, 0], of_logits, rtol=1e-12, atol=1e-12)


def value(params: Any, ids: Tensor) -> Tensor:
    return gpt.apply(CONFIG, params, ids)[..., 0]


def text(params: Any, batch: Any) -> Any:
    return gpt.loss(CONFIG, params, batch)


def trained(mesh: Mesh, zero: sf.Zero) -> Any:
    """Parameters after two iterations with a text, and the metrics."""
    ppo = rl.PPO(functools.partial(gpt.apply, CONFIG), value, text, ptx_coef=0.3)
    params = {name: x for name, x in params_of(CONFIG, torch.float64).items() if name != "reward"}
    only = {name: name != "reference" for name in params}
    rule = optim.chain(optim.clip_by_global_norm(0.5), optim.adamw(1e-2))
    rule = optim.multi_transform(
        {"actor": rule, "critic": rule}, {x: "critic" if x == "critic" else "actor" for x in only}
    )
    step = sf.sharded_step(
        ppo.objectives(),
        rule,
        trainable=only,
        specs=dict.fromkeys(only, gpt.specs(CONFIG)),
        mesh=mesh,
        zero=zero,
        has_aux=True,
    )
    state, own, seen = step.init(params), step.rows(ROWS), []
    for i in range(2):
        draw = torch.Generator().manual_seed(i)
        rollout = rollout_of(i, torch.float64)._replace(rewards=torch.randn(ROWS, generator=draw, dtype=torch.float64))
        tokens = torch.randint(0, CONFIG.vocab_size, (ROWS, LENGTH), generator=draw)
        rollout = sf.tree_map(lambda x: x[own], rollout)
        batch = ppo.experience(step, state, rollout, kl_coef=0.2)
        for _ in range(2):
            state, metrics = step(state, {"actor": batch, "critic": batch, "ptx": {"tokens": tokens[own]}})
            seen.append({name: x.double() for name, x in metrics.items()})
    return {"params": sf.unshard(state.params), "metrics": seen}


@pytest.mark.nightly
@distributed(world=2)
def test_ranks_learn_as_one() -> None:
    one = trained(sf.make_mesh(alone=True), sf.Zero())
    two = trained(sf.make_mesh({"dp": 2}), sf.Zero(stage=3, persist_elements=0))
    for x, y in zip(sf.tree_leaves(one), sf.tree_leaves(two), strict=True):
        torch.testing.assert_close(y, x, rtol=1e-9, atol=1e-9, equal_nan=True)


def test_a_text_adds_its_gradient() -> None:
    objectives = rl.PPO(functools.partial(gpt.apply, CONFIG), value, text, ptx_coef=0.3).objectives()
    params, batch = params_of(CONFIG, torch.float64), {"tokens": torch.arange(12).view(2, 6)}
    leaf = params["actor"]["embed"].requires_grad_()
    loss, metrics = objectives["ptx"].loss(params, batch)
    plain = text(params["actor"], batch)
    assert metrics["text"].mean() == plain.mean() and loss.mean() == 0.3 * plain.mean()
    grads = [torch.autograd.grad(x.mean(), leaf)[0] for x in (loss, plain)]
    torch.testing.assert_close(grads[0], 0.3 * grads[1], rtol=1e-12, atol=1e-15)
    assert objectives["ptx"].trainable == {"actor": True, "critic": False, "reference": False}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"ptx": text, "ptx_coef": -0.1}, "PPO: ptx_coef must be 0 or more and finite, got -0.1"),
        ({"ptx_coef": 0.1}, r"ptx and ptx_coef must be given together, got ptx=None and ptx_coef=0.1"),
        ({"ptx": text}, "ptx and ptx_coef must be given together"),
        ({"gamma": 1.1}, "PPO: gamma must be from 0 to 1, got 1.1"),
        ({"epsilon": 0.0}, "PPO: epsilon must be above 0"),
    ],
)
def test_refusals(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rl.PPO(PLAIN.actor, PLAIN.critic, **given)
