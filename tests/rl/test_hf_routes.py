"""Experts of draws by unmodified models of transformers: an engine records them, the training forward replays them."""

from typing import Any

import pytest
import torch

import shardfn as sf
from shardfn import rl
from shardfn.inference import Engine, hf_decoder, limits_of
from shardfn.testing import distributed
from tests.inference.hf_models import MODELS
from tests.modules.test_batch_invariant_module import LENGTH, gradients, logprobs_of, sampled
from tests.rl.test_routes import known

KINDS = ["mixtral", "qwen3_moe", pytest.param("olmoe", marks=pytest.mark.nightly)]


def choices(model: Any, apply: Any, params: Any, ids: torch.Tensor) -> torch.Tensor:
    """The experts [B, T, m, k] of a training forward."""
    found: list[torch.Tensor] = []
    modules = [m for m in model.modules() if type(m).__name__.endswith("Experts")]
    hooks = [m.register_forward_pre_hook(lambda _, args: found.append(args[1])) for m in modules]
    with torch.no_grad():
        apply(params, input_ids=ids, use_cache=False)
    for hook in hooks:
        hook.remove()
    return torch.stack(found, 1).unflatten(0, ids.shape)


@pytest.mark.nightly
@pytest.mark.parametrize("kind", KINDS)
def test_an_engine_records_the_experts_of_the_training_forward(kind: str) -> None:
    model = MODELS[kind]()
    x = sampled(model, record_experts=True)
    params, apply = sf.from_module(model, batch_invariant=True)
    own, at = choices(model, apply, params, x.ids), known(x)
    assert x.expert_ids.shape == own.shape and hf_decoder(model)[0].expert_shape == tuple(own.shape[2:])
    assert torch.equal(x.expert_ids[at].long(), own[at]) and len(own[at].unique()) > 2
    assert bool((x.expert_ids[~at] == -1).all())


@pytest.mark.day("mixtral")
@pytest.mark.parametrize("kind", KINDS)
def test_a_replay_has_the_log_probabilities_of_the_engine(kind: str) -> None:
    model = MODELS[kind]()
    x = sampled(model, record_experts=True)
    params, apply = sf.from_module(model, batch_invariant=True)
    wanted = gradients(apply, params, x)
    got = gradients(apply.replaying(x.expert_ids), params, x)
    assert torch.equal(got[0], x.logprobs) and torch.equal(wanted[0], x.logprobs)
    for name, grad in wanted[1].items():
        torch.testing.assert_close(got[1][name], grad, rtol=1e-5, atol=1e-5 * float(grad.abs().max()), msg=name)


@pytest.mark.nightly
@pytest.mark.parametrize("kind", KINDS)
def test_a_replay_by_functions_of_torch_is_near(kind: str) -> None:
    model = MODELS[kind]()
    x = sampled(model, record_experts=True)
    params, apply = sf.from_module(model)
    replayed = logprobs_of(apply.replaying(x.expert_ids), params, x)
    torch.testing.assert_close(replayed, x.logprobs, rtol=0, atol=1e-4)
    metrics = {name: float(m.mean()) for name, m in rl.mismatch_metrics(replayed, x.logprobs, x.lengths).items()}
    assert 0 < metrics["mismatch"] < metrics["mismatch_most"] < 1e-4 and 0 < metrics["mismatched"] <= 1
    exact = logprobs_of(sf.from_module(model, batch_invariant=True)[1].replaying(x.expert_ids), params, x)
    assert not any(float(m.mean()) for m in rl.mismatch_metrics(exact, x.logprobs, x.lengths).values())


def near_ties(model: Any) -> None:
    """Gives neighbouring experts scores that are near one another, in all layers."""
    for name, p in model.named_parameters():
        if name.endswith("gate.weight"):
            factors = 1 + 1e-3 * torch.linspace(-1, 1, p.shape[1])
            p.data[1::2] = p.data[: 2 * (len(p) // 2) : 2] * factors


@pytest.mark.nightly
@pytest.mark.parametrize("kind", KINDS)
def test_a_replay_keeps_the_experts_of_weights_that_are_rounded(kind: str) -> None:
    model = MODELS[kind]()
    near_ties(model)
    params, apply = sf.from_module(model)
    rounded = {name: p.bfloat16().float() for name, p in params.items()}
    made, _ = hf_decoder(model, batch_invariant=True)
    limits = limits_of(made, running=6, block=4, buckets=(32,))
    engine = Engine(made, rounded, limits=limits, record_experts=True)
    prompts = [[i % 13, (5 * i + 1) % 13, 3, (7 * i) % 13, 2, 9] for i in range(12)]
    x = rl.sample(engine, prompts, sf.inference.Sampling(max_tokens=8, n=2), key=sf.key(1), length=LENGTH)
    at = known(x)
    assert not torch.equal(choices(model, apply, params, x.ids)[at], x.expert_ids[at].long())
    replayed = choices(model, apply.replaying(x.expert_ids), params, x.ids)
    assert torch.equal(replayed[at], x.expert_ids[at].long())


@pytest.mark.nightly
@distributed(world=2)
def test_ranks_of_one_engine_record_the_experts_of_one_device(world: int) -> None:
    model, mesh = MODELS["mixtral"](), sf.make_mesh({"tp": world})
    wanted = sampled(model, record_experts=True)
    made, params = hf_decoder(model, tp="tp")
    limits = limits_of(made, running=6, block=4, buckets=(32,))
    x = sampled_by(Engine(made, params, mesh=mesh, limits=limits, record_experts=True))
    for a, b in zip(x, wanted, strict=True):
        assert torch.equal(a.nan_to_num(), b.nan_to_num())


def sampled_by(engine: Engine) -> rl.Rollout:
    sampling = sf.inference.Sampling(max_tokens=8, n=2, stop_tokens=(0,))
    return rl.sample(engine, [[1, 2, 3, 4, 5], [7], [3, 3, 8, 1, 2]], sampling, key=sf.key(1), length=LENGTH)


def test_a_model_without_experts_has_no_routes() -> None:
    made, params = hf_decoder(MODELS["llama"]())
    with pytest.raises(
        ValueError, match=r"record_experts is True, and the decoder has expert_shape=\(0, 0\).*with experts"
    ):
        Engine(made, params, record_experts=True)
