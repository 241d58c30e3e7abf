"""Covers exact forwards of models of transformers in training: the bits of an engine, gradients, refusals."""

from typing import Any

import pytest
import torch

import shardfn as sf
from shardfn import rl
from shardfn.inference import Engine, Sampling, hf_decoder, limits_of
from shardfn.nn import moe
from shardfn.testing import distributed
from tests.inference.hf_models import MODELS

nightly = pytest.mark.nightly
SERVED = [kind for kind in MODELS if kind != "gemma2"]  # whose attention bounds its scores
KINDS = [k if k in ("gpt2", "llama", "mixtral") else pytest.param(k, marks=nightly) for k in SERVED]
PROMPTS, LENGTH = [[1, 2, 3, 4, 5], [7], [3, 3, 8, 1, 2]], 20


def sampled(model: Any, length: int = LENGTH, **how: Any) -> rl.Rollout:
    """Answers of an exact engine on one device."""
    made, params = hf_decoder(model, batch_invariant=True)
    how = {"limits": limits_of(made, running=6, block=4, buckets=(32,)), "mesh": sf.make_mesh(alone=True)} | how
    sampling = Sampling(max_tokens=8, n=2, stop_tokens=(0,))
    return rl.sample(Engine(made, params, **how), PROMPTS, sampling, key=sf.key(1), length=length)


def logprobs_of(apply: Any, params: Any, x: rl.Rollout) -> torch.Tensor:
    return rl.completion_logprobs(apply(params, input_ids=x.ids, use_cache=False).logits, x.ids, x.spans)


def gradients(apply: Any, params: Any, x: rl.Rollout) -> tuple[torch.Tensor, dict[str, Any]]:
    leaves = {name: p.clone().requires_grad_() for name, p in params.items()}
    found = logprobs_of(apply, leaves, x)
    found.sum().backward()
    return found.detach(), {name: p.grad for name, p in leaves.items()}


@pytest.mark.day("mixtral")
@pytest.mark.parametrize("kind", KINDS)
def test_log_probabilities_are_those_of_the_engine(kind: str) -> None:
    model = MODELS[kind]()
    x = sampled(model)
    params, apply = sf.from_module(model, batch_invariant=True)
    got, exact = gradients(apply, params, x)
    assert torch.equal(got, x.logprobs)
    _, plain = gradients(sf.from_module(model)[1], params, x)
    for name, want in plain.items():
        # In exact arithmetic the bias of keys without positions has no gradient; the scale is that of its layer.
        layer = [x for other, x in plain.items() if other.rpartition(".")[0] == name.rpartition(".")[0]]
        scale = max(float(x.abs().max()) for x in layer)
        torch.testing.assert_close(exact[name], want, rtol=1e-4, atol=1e-4 * scale, msg=name)


@pytest.mark.nightly
def test_compiled_graphs_have_the_bits_of_the_engine() -> None:
    """Rotary tables of 64 rows of 128 are large enough for a compiler, whose cosine is another one."""
    model = MODELS["llama"](hidden_size=32, head_dim=128)
    x = sampled(model, length=64)
    params, apply = sf.from_module(model, batch_invariant=True)

    def loss(params: Any, x: rl.Rollout) -> Any:
        logprobs = logprobs_of(apply, params, x)
        return -logprobs.mean(), rl.policy_metrics(logprobs, x.logprobs, x.lengths)

    step = sf.sharded_step(sf.jit(loss, backend="inductor"), sf.optim.sgd(0.1), has_aux=True)
    _, metrics = step(step.init(params), x)
    assert float(metrics["exact"]) == 1


@nightly
@distributed(world=2, timeout=400)
def test_ratios_of_wide_heads_over_ranks_begin_at_1(world: int) -> None:
    """The default back end of `jit` compiles regions as large as these rotary tables."""
    model = MODELS["llama"](hidden_size=32, head_dim=128, num_hidden_layers=1)
    x = sampled(model, length=64)
    params, apply = sf.from_module(model, batch_invariant=True)

    def loss(params: Any, batch: Any) -> Any:
        x, advantages = batch
        logprobs = logprobs_of(apply, params, x)
        return rl.grpo(logprobs, x.logprobs, advantages, x.lengths), rl.policy_metrics(logprobs, x.logprobs, x.lengths)

    with sf.make_mesh({"dp": world}, device="cpu") as mesh:
        zero = sf.Zero(stage=3, persist_elements=0)
        step = sf.sharded_step(sf.jit(loss), sf.optim.sgd(0.1), mesh=mesh, zero=zero, has_aux=True)
        state, own = step.init(params), step.rows(6)
        batch = sf.tree_map(lambda leaf: leaf[own], (x, torch.linspace(-1, 1, 6)))
        for exact in (True, False):
            state, metrics = step(state, batch)
            assert (float(metrics["exact"]) == 1) == exact


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["mixtral", "llama"])
def test_layers_that_run_again_have_the_same_bits(kind: str) -> None:
    model = MODELS[kind](attention_dropout=0.0)
    params, apply = sf.from_module(model, batch_invariant=True)
    x, found = sampled(model), []
    for again in (False, True):
        if again:
            model.train().activation_checkpointing_enable()
        found.append(gradients(apply, params, x))
    assert torch.equal(found[0][0], found[1][0])
    assert all(torch.equal(grad, found[1][1][name]) for name, grad in found[0][1].items())


def learn(wrap: Any, world: int, stage: int) -> None:
    """Two updates by one rollout; the ratios of the first are 1."""
    model = MODELS["mixtral"](**({} if stage else {"num_hidden_layers": 1}))
    x = sampled(model, record_experts=True)
    params, apply = sf.from_module(model, batch_invariant=True)

    def loss(params: Any, batch: Any) -> Any:
        x, advantages = batch
        logprobs = logprobs_of(apply.replaying(x.expert_ids), params, x)
        metrics = rl.policy_metrics(logprobs, x.logprobs, x.lengths)
        return rl.grpo(logprobs, x.logprobs, advantages, x.lengths), metrics

    with sf.make_mesh({"dp": world}, device="cpu") as mesh:
        zero = sf.Zero(stage=stage, persist_elements=0)
        step = sf.sharded_step(wrap(loss), sf.optim.sgd(0.1), mesh=mesh, zero=zero, has_aux=True)
        state, own = step.init(params), step.rows(6)
        batch = sf.tree_map(lambda leaf: leaf[own], (x, torch.linspace(-1, 1, 6)))
        for exact in (True, False):
            state, metrics = step(state, batch)
            assert (float(metrics["exact"]) == 1) == exact


@pytest.mark.nightly
@pytest.mark.parametrize("wrap", [lambda f: f, sf.jit])
def test_ratios_of_a_step_begin_at_1(wrap: Any) -> None:
    learn(wrap, 1, 0)


@nightly
@pytest.mark.parametrize("stage", [1, 3])
@distributed(world=2)
def test_ratios_over_ranks_begin_at_1(stage: int) -> None:
    learn(lambda f: sf.accumulate(f, 3), 2, stage)


def test_forwards_that_are_not_exact_are_refused() -> None:
    model = MODELS["llama"]()
    with pytest.raises(
        ValueError,
        match=r"batch_invariant=True\) needs batch-invariant attention.*got attention=Blockwise.*Leave out attention=",
    ):
        sf.from_module(model, batch_invariant=True, attention=sf.nn.Blockwise())
    with pytest.raises(ValueError, match=r"got experts=AllReduce.*Use moe.AllReduce\('tp', in_order=True\)"):
        sf.from_module(MODELS["mixtral"](), batch_invariant=True, experts=moe.AllReduce("tp"))
    x = rl.empty_rollout(2, LENGTH, 4)
    params, apply = sf.from_module(model.double(), batch_invariant=True)
    with pytest.raises(TypeError, match=r"float32, as in an engine, got torch\.float64.*Use parameters in float32"):
        apply(params, input_ids=x.ids)
    params, apply = sf.from_module(MODELS["gemma2"](), batch_invariant=True)
    with pytest.raises(ValueError, match="softcap is not computed by a body"):
        apply(params, input_ids=x.ids)
