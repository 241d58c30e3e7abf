"""Answers of older weights: their truncated weights, and draws beside a step that learns."""

import concurrent.futures
import functools
import itertools
from typing import Any

import pytest
import torch

import shardfn as sf
from shardfn import rl
from shardfn.inference import Engine, Runner, Sampling, decoder, limits_of
from shardfn.models import gpt

CONFIG = gpt.Config.llama_like(
    vocab_size=19, num_layers=1, d_model=16, num_heads=2, d_ff=16, max_len=12, batch_invariant=True
)
SAMPLING, LENGTH = Sampling(max_tokens=6, n=4, stop_tokens=(0,)), 12
PROMPTS = [[3, 4, 5], [8], [3, 4, 9, 1], [11, 2]]
MODEL = decoder(CONFIG)
LIMITS = limits_of(MODEL, running=8, buckets=(32,))
runner = functools.cache(lambda: Runner(MODEL, LIMITS))


def test_weights_are_ratios_up_to_a_bound() -> None:
    behaviour = torch.tensor([[-1.0, -2.0, -3.0], [-1.0, -1.0, -torch.inf]])
    old = torch.tensor([[-1.0, -3.0, -1.0], [-0.5, 300.0, torch.nan]], requires_grad=True)
    lengths, how = torch.tensor([3, 1]), {"sampling_logprobs_BT": behaviour, "importance_sampling_clip_max": 1.5}
    policy = old.detach().requires_grad_()
    (grad,) = torch.autograd.grad(rl.ppo_policy(policy, old, torch.ones(2, 3), lengths, **how).total, policy)
    wanted = torch.tensor([[1.0, torch.tensor(-1.0).exp(), 1.5], [1.5, 0.0, 0.0]])
    assert torch.equal(-grad, wanted)
    weight = rl.policy_metrics(policy, old, lengths, **how)["weight"]
    assert torch.equal(weight.total, wanted.sum()) and not weight.total.requires_grad


@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "cispo"])
def test_answers_of_the_newest_weights_leave_the_bits_of_losses_and_metrics(loss_type: Any) -> None:
    draw = functools.partial(torch.randn, generator=torch.Generator().manual_seed(0))
    old, reference, advantages, lengths = draw(3, 5), draw(3, 5), draw(3), torch.tensor([5, 0, 2])
    found = []
    for behaviour in (None, old.clone()):
        policy = (old + 0.3 * torch.linspace(-1, 1, 5)).requires_grad_()
        how: dict[str, Any] = {"ref_logprobs_BT": reference, "sampling_logprobs_BT": behaviour}
        more = {"loss_type": loss_type, "beta": 0.1, "use_bias_correction_kl": True}
        losses = [
            rl.grpo(policy, old, advantages, lengths, **how, **more),
            rl.ppo_policy(policy, old, reference, lengths, sampling_logprobs_BT=behaviour),
        ]
        torch.stack([loss.total for loss in losses]).sum().backward()
        metrics = rl.policy_metrics(policy, old, lengths, **how)
        assert (metrics.pop("weight").mean() == 1) if behaviour is not None else "weight" not in metrics
        found.append([*sf.tree_leaves((losses, metrics)), policy.grad])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("name", ["grpo", "ppo_policy", "policy_metrics"])
def test_a_bound_that_does_not_bound_is_refused(name: str) -> None:
    x, one = torch.zeros(1, 1), torch.tensor([1])
    call: Any = {
        "grpo": functools.partial(rl.grpo, x, x, x[0], one),
        "ppo_policy": functools.partial(rl.ppo_policy, x, x, x, one),
        "policy_metrics": functools.partial(rl.policy_metrics, x, x, one),
    }[name]
    with pytest.raises(
        ValueError, match=rf"{name}: importance_sampling_clip_max=3.0 has no effect without sampling_logprobs_BT"
    ):
        call(importance_sampling_clip_max=3.0)
    with pytest.raises(
        ValueError, match=rf"{name}: importance_sampling_clip_max must be positive, for example 2.0, got 0"
    ):
        call(sampling_logprobs_BT=x, importance_sampling_clip_max=0)
    with pytest.raises(
        ValueError, match=rf"(?s){name}: .*sampling_logprobs_BT has shape \(1,\); it must be \[B = 1, T = 1\]"
    ):
        call(sampling_logprobs_BT=x[0])


def test_padding_of_older_weights_is_never_used() -> None:
    draw = functools.partial(torch.randn, generator=torch.Generator().manual_seed(0))
    old, reference, advantages, lengths = draw(2, 3), draw(2, 3), draw(2), torch.tensor([3, 1])
    mask, found = rl.completion_mask(lengths, 3), []
    for padding in (0.0, torch.nan, -torch.inf):
        policy = (old + 0.1).requires_grad_()
        behaviour = torch.where(mask, old - 0.2, padding)
        how: dict[str, Any] = {"ref_logprobs_BT": reference, "sampling_logprobs_BT": behaviour}
        loss = rl.grpo(policy, old, advantages, lengths, beta=0.1, use_bias_correction_kl=True, **how)
        loss.total.backward()
        found.append([*sf.tree_leaves((loss, rl.policy_metrics(policy, old, lengths, **how))), policy.grad])
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))


def test_the_mean_gradient_of_tokens_of_older_weights_is_that_of_the_policy() -> None:
    """All pairs of tokens of a vocabulary of 3, each with its probability when it was drawn: an exact mean."""
    behaviour, policy = torch.tensor([0.5, 0.3, 0.2]).double().log(), torch.tensor([0.2, 0.3, 0.5]).double().log()
    rewards = torch.tensor([1.0, -2.0, 0.5]).double()
    answers = torch.tensor(list(itertools.product(range(3), repeat=2)))
    gradients = {}
    for name, by in {"policy": policy, "behaviour": behaviour}.items():
        logits = policy.clone().requires_grad_()
        logprobs, drawn = logits.log_softmax(0)[answers], by[answers]
        lengths = torch.full((9,), 2)
        weights = (policy[answers] - drawn).exp()
        loss_BT = -(logprobs - policy[answers]).exp() * weights * rewards[answers]
        assert torch.allclose(
            rl.ppo_policy(
                logprobs,
                policy[answers],
                rewards[answers],
                lengths,
                sampling_logprobs_BT=drawn,
                importance_sampling_clip_max=10.0,
            ).mean(),
            loss_BT.mean(),
        )
        (loss_BT * drawn.sum(1, keepdim=True).exp()).sum().backward()
        gradients[name] = logits.grad
    torch.testing.assert_close(gradients["policy"], gradients["behaviour"], rtol=1e-12, atol=1e-12)


def loss(params: Any, batch: Any) -> Any:
    rollout, advantages, old = batch
    logprobs = rl.completion_logprobs(gpt.apply(CONFIG, params, rollout.ids), rollout.ids, rollout.spans)
    metrics = rl.policy_metrics(logprobs, old, rollout.lengths, sampling_logprobs_BT=rollout.logprobs)
    return rl.grpo(logprobs, old, advantages, rollout.lengths, sampling_logprobs_BT=rollout.logprobs), metrics


def logprobs(params: Any, rollout: rl.Rollout) -> torch.Tensor:
    return rl.completion_logprobs(gpt.apply(CONFIG, params, rollout.ids), rollout.ids, rollout.spans)


def learn(beside: bool) -> tuple[Any, list[rl.Rollout]]:
    """Two iterations of two updates, whose answers are drawn by a thread meanwhile, or before."""
    step = sf.sharded_step(loss, sf.optim.sgd(0.5), has_aux=True)
    state, found = step.init(gpt.init(CONFIG, sf.key(0))), list[rl.Rollout]()
    engine = Engine(MODEL, sf.unshard(state.params), limits=LIMITS, runner=runner())
    engine.warm_up()

    def draw(i: int) -> rl.Rollout:
        return rl.sample(engine, PROMPTS, SAMPLING, key=sf.fold_in(sf.key(7), i), length=LENGTH)

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        coming = None
        for i in range(2):
            rollout = None if coming is None else coming.result()
            version = engine.update_weights(sf.unshard(state.params))
            rollout = draw(i) if rollout is None else rollout
            rl.check_versions(rollout, version, behind=1)
            if i:
                assert set(rollout.versions[rollout.versions >= 0].tolist()) == {version - 1}
                with pytest.raises(ValueError, match=f"was drawn by version {version - 1}, and from {version} to"):
                    rl.check_versions(rollout, version)
            coming = pool.submit(draw, i + 1)
            if not beside:
                coming.result()
            old = step.apply(logprobs, state, rollout)
            assert torch.equal(old, rollout.logprobs) == (i == 0)
            rewards = (rollout.ids == 5).sum(1).float() + rollout.lengths
            for epoch in range(2):
                state, metrics = step(state, (rollout, rl.group_advantages(rewards, SAMPLING.n), old))
                assert (float(metrics["exact"]) == 1) == (epoch == 0)
            found.append(rollout)
    return sf.unshard(state.params), found


@pytest.mark.nightly
def test_draws_beside_a_step_have_the_bits_of_draws_before_it() -> None:
    for a, b in zip(*(sf.tree_leaves(learn(beside)) for beside in (True, False)), strict=True):
        assert torch.equal(a.nan_to_num(), b.nan_to_num())
