"""PPO with four models in one state: equal to one device on any ranks, and its memory is that of the analysis."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

import shardfn as sf
from shardfn import rl
from shardfn.core import Mesh
from shardfn.models import gpt
from shardfn.testing import distributed

ROWS, LENGTH, WIDTH = 8, 12, 6
CONFIG = gpt.Config.llama_like(
    vocab_size=17, num_layers=2, d_model=32, num_heads=4, num_kv_heads=2, d_ff=48, max_len=LENGTH
)
MODELS = ("actor", "critic", "reference", "reward")
LEARNING = ("actor", "critic")


def params_of(config: gpt.Config, dtype: torch.dtype) -> dict[str, Any]:
    inits = {name: gpt.init(config, sf.key(i)) for i, name in enumerate(MODELS)}
    inits["reference"] = sf.tree_map(torch.clone, inits["actor"])
    return sf.tree_map(lambda x: x.to(dtype), inits)


def rollout_of(iteration: int, dtype: torch.dtype, *, rows: int = ROWS, length: int = LENGTH) -> rl.Rollout:
    """Fixed answers of all lengths, an empty one and one of the whole width among them."""
    draw = torch.Generator().manual_seed(iteration)
    lengths = torch.randint(0, WIDTH + 1, (rows,), generator=draw)
    lengths[0], lengths[1] = 0, WIDTH
    rollout = rl.empty_rollout(rows, length, WIDTH)
    ids = torch.randint(0, CONFIG.vocab_size, (rows, length), generator=draw)
    prompts = torch.randint(1, length - WIDTH + 1, (rows,), generator=draw)
    return rollout._replace(
        ids=ids,
        prompts=prompts,
        lengths=lengths,
        places=(prompts[:, None] + torch.arange(WIDTH)) * rl.completion_mask(lengths, WIDTH),
        logprobs=rollout.logprobs.to(dtype),
        rewards=rollout.rewards.to(dtype),
    )


class Loop:
    """The losses and the step of one mesh."""

    def __init__(self, config: gpt.Config, mesh: Mesh, *, zero: sf.Zero, host: bool = True, one: bool = False) -> None:
        self.config = config
        plain = gpt.specs(config)
        on_host = sf.tree_map(lambda spec: sf.Sharding(spec, memory_kind="host"), plain)
        only = {name: {other: other == name for other in MODELS} for name in LEARNING}
        losses = {"actor": sf.Objective(self.of_actor, only["actor"])}
        losses["critic"] = sf.Objective(self.of_critic, only["critic"])
        rule = sf.optim.chain(sf.optim.clip_by_global_norm(0.5), sf.optim.adamw(1e-2))
        self.step = sf.sharded_step(
            sf.jit(self.of_both, backend="graph") if one else losses,
            sf.optim.multi_transform(
                {name: rule for name in LEARNING}, {name: "critic" if name == "critic" else "actor" for name in MODELS}
            ),
            trainable={name: name in LEARNING for name in MODELS},
            specs={name: on_host if host and name == "reference" else plain for name in MODELS},
            mesh=mesh,
            zero=zero,
        )

    def logprobs(self, params: Any, x: rl.Rollout) -> Tensor:
        return rl.completion_logprobs(gpt.apply(self.config, params, x.ids), x.ids, x.spans)

    def values(self, params: Any, x: rl.Rollout) -> Tensor:
        values = gpt.apply(self.config, params, x.ids)[..., 0]
        return rl.completion_values(values, x.spans)

    def before(self, params: Any, x: rl.Rollout) -> Any:
        scores = rl.last_values(gpt.apply(self.config, params["reward"], x.ids)[..., 0], x.prompts + x.lengths)
        found = self.logprobs(params["actor"], x), self.logprobs(params["reference"], x)
        return scores, *found, self.values(params["critic"], x)

    def batch(self, state: Any, x: rl.Rollout) -> dict[str, Any]:
        scores, old, reference, values = self.step.apply(self.before, state, x)
        rewards = rl.kl_rewards(old, reference, scores, x.lengths)
        advantages, returns = rl.gae(rewards, values, x.lengths)
        x = x._replace(logprobs=old, rewards=scores)
        one = {"rollout": x, "values": values, "advantages": advantages, "returns": returns}
        return {"actor": one, "critic": one}

    def of_actor(self, params: Any, batch: Any) -> Any:
        x = batch["rollout"]
        return rl.ppo_policy(self.logprobs(params["actor"], x), x.logprobs, batch["advantages"], x.lengths)

    def of_critic(self, params: Any, batch: Any) -> Any:
        values = self.values(params["critic"], batch["rollout"])
        return rl.ppo_value(values, batch["values"], batch["returns"], batch["rollout"].lengths)

    def of_both(self, params: Any, batch: Any) -> Tensor:
        return self.of_actor(params, batch).mean() + self.of_critic(params, batch).mean()


def trained(mesh: Mesh, zero: sf.Zero) -> Any:
    """The parameters after three iterations of two epochs each, and the rewards of all rows."""
    loop = Loop(CONFIG, mesh, zero=zero)
    state, rewards = loop.step.init(params_of(CONFIG, torch.float64)), []
    for i in range(3):
        rows = loop.step.rows(ROWS)
        batch = loop.batch(state, sf.tree_map(lambda x, rows=rows: x[rows], rollout_of(i, torch.float64)))
        rewards.append(sf.unshard(rl.as_global(batch["actor"]["rollout"].rewards, mesh, "dp")))
        for _ in range(2):
            state, _ = loop.step(state, batch)
    kinds = {name: {x.memory_kind for x in sf.tree_leaves(x)} for name, x in state.params.items()}
    assert kinds == {name: {"host" if name == "reference" else "device"} for name in MODELS}
    return {"params": sf.unshard(state.params), "rewards": rewards}


@pytest.mark.nightly
@pytest.mark.parametrize("stage", [0, 3])
@distributed(world=[2, 4])
def test_four_models_equal_one_device(world: int, stage: int) -> None:
    zero = sf.Zero(stage=stage, persist_elements=0)
    one, found = trained(sf.make_mesh(alone=True), sf.Zero()), trained(sf.make_mesh({"dp": world}), zero)
    first = params_of(CONFIG, torch.float64)
    for name in LEARNING:
        for x, y in zip(*map(sf.tree_leaves, (first[name], one["params"][name])), strict=True):
            assert not torch.equal(x, y)
    for name in ("reference", "reward"):
        for x, y in zip(*map(sf.tree_leaves, (first[name], found["params"][name])), strict=True):
            assert torch.equal(x, y)
    for x, y in zip(sf.tree_leaves(one), sf.tree_leaves(found), strict=True):
        torch.testing.assert_close(y, x, rtol=1e-10, atol=1e-10)


def captured(config: gpt.Config, mesh: Mesh, *, host: bool) -> tuple[Any, Any, Any, Any]:
    """A step of both losses, its state and batch, and the analysis of its graph."""
    loop = Loop(config, mesh, zero=sf.Zero(stage=3, persist_elements=0), host=host, one=True)
    state = loop.step.init(params_of(config, torch.float32))
    x = rollout_of(0, torch.float32, rows=4 * mesh.size, length=config.max_len)
    rows = loop.step.rows(4 * mesh.size)
    batch = loop.batch(state, sf.tree_map(lambda x: x[rows].clone(), x))["actor"]  # a view would keep all rows alive
    return loop.step, state, batch, loop.step.lower(state, batch).memory_analysis()


@pytest.mark.nightly
@distributed(world=[1, 2])
def test_memory_is_that_of_the_analysis(world: int) -> None:
    config = dataclasses.replace(CONFIG, num_layers=1, d_model=128, d_ff=1024, max_len=64)
    mesh, bytes_of_one = sf.make_mesh({"dp": world}), 4 * gpt.num_params(config)
    step, state, batch, on_host = captured(config, mesh, host=True)
    state, _ = step(state, batch)
    with sf.memory.ledger() as book:  # of the second run
        sf.tree_map(lambda x: book.count(x.held, x.memory_kind), (state.params, state.opt_state))
        book.count(batch, "device")
        state, _ = step(state, batch)
    assert 0.99 * on_host.by_memory["device"] <= book.peak("device") <= on_host.by_memory["device"]
    assert book.peak("host") == on_host.by_memory["host"] >= 0.99 * bytes_of_one / world
    *_, on_device = captured(config, mesh, host=False)
    saved = on_device.by_memory["device"] - on_host.by_memory["device"]
    assert abs(saved - bytes_of_one / world) <= 0.05 * bytes_of_one / world
