"""Covers mistakes in learning from rewards, and bad values that are counted and never make a loss NaN."""

import functools
import math
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

import shardfn as sf
from shardfn import rl
from shardfn.inference import Engine, Sampling, decoder, limits_of
from shardfn.models import gpt
from shardfn.testing import distributed
from tests.mistakes import Mistake, cases, check, check_on_all_ranks

CONFIG = gpt.Config(vocab_size=16, num_layers=1, d_model=32, num_heads=4, max_len=12, batch_invariant=True, dropout=0.2)
SAMPLING = Sampling(max_tokens=4, n=2)
PAIR = [torch.ones(1)] * 4
ONE, TWO = torch.ones(1, 2), torch.tensor([2])


@functools.cache
def engine() -> Engine:
    model = decoder(CONFIG)
    return Engine(
        model,
        gpt.init(CONFIG, sf.key(0)),
        mesh=sf.make_mesh(alone=True),
        limits=limits_of(model, running=4, buckets=(16,)),
    )


def sample(prompt: Any = (3, 4), sampling: Sampling = SAMPLING, **how: Any) -> rl.Rollout:
    return rl.sample(engine(), [[5], list(prompt)], sampling, **{"key": sf.key(1), **how})


def logprobs(rollout: rl.Rollout, *, params: Any = None, key: Any = None) -> torch.Tensor:
    params = gpt.init(CONFIG, sf.key(0)) if params is None else params
    logits = gpt.apply(CONFIG, params, rollout.ids, key=key, index_B=torch.arange(len(rollout.ids)))
    return rl.completion_logprobs(logits, rollout.ids, rollout.spans)


def _completions(completions: Any, **rest: Any) -> Any:
    """Takes the arguments of TRL's reward functions."""
    return [1.0] * len(completions)


def with_dropout() -> None:
    rollout = sample()
    rl.check_first_ratios(logprobs(rollout), rollout)
    rl.check_first_ratios(logprobs(rollout, key=sf.key(2)), rollout)


def of_other_weights() -> None:
    rollout = sample()
    rl.check_first_ratios(logprobs(rollout, params=gpt.init(CONFIG, sf.key(3))), rollout)


def score(**how: Any) -> Any:
    return rl.score(lambda prompt, answer: 1.0, rl.empty_rollout(2, 8, 4), **how)


def spoilt() -> Any:
    model, params = decoder(CONFIG), gpt.init(CONFIG, sf.key(0))
    nan = sf.tree_map(lambda x: x * math.nan, params)
    own = Engine(model, nan, mesh=sf.make_mesh(alone=True), limits=limits_of(model, running=4, buckets=(16,)))
    return rl.sample(own, [[3]], SAMPLING, key=sf.key(0))


MISTAKES = [
    Mistake("dropout is active in the actor", with_dropout,
            ValueError, "Row 0 has ... at token 0 in training, but ... by version 0. ... tokens differ",
            "Turn dropout off in the actor (module.eval() before from_module, or no key)"),
    Mistake("the prompt fills the context", lambda: sample(range(12)),
            ValueError,
            "rows of 12 and the engine's context of 12, got 12 tokens in prompts[1] and up to 4 in answers, "
            "together 16",
            "leave the prompt out"),
    Mistake("the prompt fills the context of an engine with longer rows", lambda: sample(range(12), length=40),
            ValueError,
            "rows of 40 and the engine's context of 12, got 12 tokens in prompts[1] and up to 4 in answers, "
            "together 16",
            "Pass a longer length, limits of a longer context or fewer max_tokens"),
    Mistake("the tokenizers of actor and reward model differ",
            lambda: rl.check_tokenizers({"a": 0, "b": 1, "c": 2}, {"a": 0, "c": 1}),
            ValueError, "2 ids differ. For example id 1 is 'b' of 3 tokens for the actor, and 'c' of 2 for the",
            "Decode answers with the actor's tokenizer"),
    Mistake("old log probabilities are those of other weights", of_other_weights,
            ValueError, "Row 0 has ... at token 0 in training, but ... when it was drawn, by version 0",
            "call update_weights before sample"),
    Mistake("answers are of an earlier version", lambda: rl.check_versions(sample(), 3),
            ValueError, "the answer of row 0 was drawn by version 0, and from 3 to 3 are expected",
            "Draw it again after update_weights"),
    Mistake("a prompt is empty", lambda: sample(()),
            ValueError, "prompts[1] has no tokens", "Begin it with a token"),
    Mistake("the weights are not finite", spoilt,
            RuntimeError, "row 0 ended as 'error' after 0 tokens", "look at the parameters"),
    Mistake("answers are drawn among the most probable tokens",
            lambda: sample(sampling=Sampling(max_tokens=4, top_k=5)),
            ValueError, "top_k is 5; answers would be drawn from another distribution", "Use top_k=0"),
    Mistake("the key is a number", lambda: sample(key=3),
            TypeError, "sample: key is 3", "sf.key(3)"),
    Mistake("there is no time for a reward", lambda: score(seconds=0),
            ValueError, "score: seconds and workers must be positive and finite", "got 0 and 1"),
    Mistake("values are given for other rows", lambda: score(given=[1, 2, 3]),
            ValueError, "3 values are given for 2 rows", "Pass one for each"),
    Mistake("the reward function has the arguments of TRL",
            lambda: rl.score(_completions, rl.empty_rollout(2, 8, 4)),
            UserWarning, "it failed for all 2 answers (raised 2), so nothing is learnt ... row 0 raised TypeError",
            "It is called as reward(prompt, answer), with lists of ids"),
    Mistake("a reward is never finite",
            lambda: rl.score(lambda *rest: math.nan, rl.empty_rollout(3, 8, 4), [1, 2, 3]),
            UserWarning, "it failed for all 3 answers (invalid 3)", "and the row's entry of given"),
    Mistake("rewards are not computed", lambda: rl.group_advantages(rl.empty_rollout(4, 8, 4).rewards, 2),
            UserWarning, "all 4 rewards are missing (NaN or infinite), so all advantages are 0", "by rollout = rl.sc"),
    Mistake("answers are never better than one another",
            lambda: functools.reduce(lambda x, _: x.update(torch.tensor(1.0)), range(2), rl.RewardSignal(patience=2)),
            UserWarning, "2 rollouts in a row had only advantages of 0", "Look at the rewards"),
    Mistake("a group is cut", lambda: rl.group_advantages(torch.zeros(5), 2),
            ValueError, "5 rewards and groups of 2", "Pass whole groups"),
    Mistake("the constant of a mean is left out",
            lambda: rl.grpo(-ONE, -ONE, torch.ones(1), TWO, loss_type="dr_grpo"),
            ValueError, "must have max_completion_length, for example 256", "got max_completion_length=None"),
    Mistake("an answer of a pair is empty", lambda: rl.orpo(-torch.ones(2), torch.tensor([-1.0, -0.0])),
            ValueError, "orpo: rejected_B[1] is -0.0; odds need mean log probabilities below 0",
            "leave out pairs in which an answer is empty"),
    Mistake("pairs have no weight", lambda: rl.dpo(*[torch.ones(1)] * 4, loss_type="hinge", beta=0.0),
            ValueError, "dpo: beta must be above 0 and finite", "got 0.0"),
    Mistake("half of the labels are wrong", lambda: rl.dpo(*PAIR, loss_type="robust", label_smoothing=0.5),
            ValueError, "label_smoothing of 'robust' must be at least 0 and below 0.5", "got 0.5"),
    Mistake("the part of wrong pairs is a percentage", lambda: rl.dpo(*[torch.ones(1)] * 4, label_smoothing=10),
            ValueError, "dpo: label_smoothing must be from 0 to 1", "got 10"),
    Mistake("a discount grows", lambda: rl.gae(-ONE, -ONE, TWO, gamma=1.05),
            ValueError, "gae: gamma must be from 0 to 1", "got 1.05"),
    Mistake("scores are clipped to nothing",
            lambda: rl.kl_rewards(-ONE, -ONE, torch.ones(1), TWO, clip_reward_value=0.0),
            ValueError, "kl_rewards: clip_reward_value must be above 0 and finite", "got 0.0"),
    Mistake("there is no reference for a divergence", lambda: rl.grpo(-ONE, -ONE, torch.ones(1), TWO, beta=0.1),
            ValueError, "beta and ref_logprobs_BT must be passed together", "got beta=0.1 without ref_logprobs_BT"),
    Mistake("a ratio is clipped above its end", lambda: rl.rloo(-ONE, -ONE, torch.ones(1), TWO, epsilon_high=-0.28),
            ValueError, "rloo: epsilon must be above 0 and at most 1, and epsilon_high pos", "got epsilon=0.2 and"),
    Mistake("the largest ratio is within the clip", lambda: rl.ppo_policy(-ONE, -ONE, ONE, TWO, delta=1.1),
            ValueError, "ppo_policy: delta must be finite and at least 1.2", "got 1.1"),
    Mistake("the largest ratio is that of the clip already",
            lambda: rl.grpo(-ONE, -ONE, torch.ones(1), TWO, loss_type="cispo", epsilon=1.0, delta=6.0),
            ValueError, 'delta is 6.0 with loss_type="cispo"', "Remove"),
    Mistake("a weight would become negative", lambda: rl.follow_divergence(0.1, 0.1, 0.1, rate=6.0),
            ValueError, "follow_divergence: rate times most must be below 1", "got 6.0 and 0.2"),
]  # fmt: skip

# Each number by its function and argument: a call with it, and whether it may be 0, and more than 1.
CLIP_MAX = "importance_sampling_clip_max"
KTO = torch.ones(1), torch.ones(1), torch.tensor([True]), torch.tensor(0.0)
RANGES: dict[tuple[str, str], tuple[Callable[[Any], Any], bool, bool]] = {
    ("ppo_policy", "epsilon"): (lambda x: rl.ppo_policy(-ONE, -ONE, ONE, TWO, epsilon=x), False, False),
    ("ppo_policy", CLIP_MAX): (
        lambda x: rl.ppo_policy(-ONE, -ONE, ONE, TWO, sampling_logprobs_BT=-ONE, **{CLIP_MAX: x}), False, True),
    ("ppo_value", "cliprange"): (lambda x: rl.ppo_value(ONE, ONE, ONE, TWO, cliprange=x), False, True),
    ("grpo", "epsilon"): (lambda x: rl.grpo(-ONE, -ONE, torch.ones(1), TWO, epsilon=x), False, False),
    ("grpo", CLIP_MAX): (
        lambda x: rl.grpo(-ONE, -ONE, torch.ones(1), TWO, sampling_logprobs_BT=-ONE, **{CLIP_MAX: x}), False, True),
    ("grpo", "beta"): (
        lambda x: rl.grpo(-ONE, -ONE, torch.ones(1), TWO, ref_logprobs_BT=-ONE if x else None, beta=x), True, True),
    ("rloo", "epsilon"): (lambda x: rl.rloo(-ONE, -ONE, torch.ones(1), TWO, epsilon=x), False, False),
    ("policy_metrics", "epsilon"): (lambda x: rl.policy_metrics(-ONE, -ONE, TWO, epsilon=x), False, False),
    ("policy_metrics", CLIP_MAX): (
        lambda x: rl.policy_metrics(-ONE, -ONE, TWO, sampling_logprobs_BT=-ONE, **{CLIP_MAX: x}), False, True),
    ("group_advantages", "eps"): (lambda x: rl.group_advantages(torch.ones(2), 2, eps=x), False, True),
    ("gae", "gamma"): (lambda x: rl.gae(ONE, ONE, TWO, gamma=x), True, False),
    ("gae", "lam"): (lambda x: rl.gae(ONE, ONE, TWO, lam=x), True, False),
    ("kl_rewards", "kl_coef"): (lambda x: rl.kl_rewards(-ONE, -ONE, torch.ones(1), TWO, kl_coef=x), True, True),
    ("kl_rewards", "clip_reward_value"): (
        lambda x: rl.kl_rewards(-ONE, -ONE, torch.ones(1), TWO, clip_reward_value=x), False, True),
    ("dpo", "beta"): (lambda x: rl.dpo(*PAIR, beta=x), False, True),
    ("dpo", "label_smoothing"): (lambda x: rl.dpo(*PAIR, label_smoothing=x), True, False),
    ("cpo", "beta"): (lambda x: rl.cpo(*PAIR[:2], beta=x), False, True),
    ("cpo", "simpo_gamma"): (lambda x: rl.cpo(*PAIR[:2], loss_type="simpo", simpo_gamma=x), True, True),
    ("bradley_terry", "center_rewards_coefficient"): (
        lambda x: rl.bradley_terry(*PAIR[:2], center_rewards_coefficient=x), True, True),
    ("off_policy_mask", "threshold"): (
        lambda x: rl.off_policy_mask(-ONE, -ONE, torch.ones(1), TWO, threshold=x), False, True),
    ("high_entropy_mask", "quantile"): (lambda x: rl.high_entropy_mask(ONE, TWO, x), False, False),
    ("whiten", "eps"): (lambda x: rl.whiten(ONE, TWO, eps=x), False, True),
    ("decoupled_advantages", "eps"): (lambda x: rl.decoupled_advantages(torch.ones(2, 1), 2, eps=x), False, True),
    ("kto", "beta"): (lambda x: rl.kto(*KTO, beta=x), False, True),
    ("kto", "desirable_weight"): (lambda x: rl.kto(*KTO, desirable_weight=x), True, True),
    ("kto", "undesirable_weight"): (lambda x: rl.kto(*KTO, undesirable_weight=x), True, True),
    ("orpo", "beta"): (lambda x: rl.orpo(-ONE[0], -ONE[0], beta=x), False, True),
    ("follow_divergence", "beta"): (lambda x: rl.follow_divergence(x, 0.1, 0.1), False, True),
    ("follow_divergence", "target"): (lambda x: rl.follow_divergence(0.1, 0.1, x), False, True),
    ("follow_divergence", "rate"): (lambda x: rl.follow_divergence(0.1, 0.1, 0.1, rate=x, most=0.1), False, True),
    ("follow_divergence", "most"): (lambda x: rl.follow_divergence(0.1, 0.1, 0.1, rate=0.1, most=x), False, True),
    ("check_first_ratios", "tolerance"): (
        lambda x: rl.check_first_ratios(torch.zeros(1, 2), rl.empty_rollout(1, 8, 2), tolerance=x), True, True),
    ("check_versions", "behind"): (lambda x: rl.check_versions(rl.empty_rollout(1, 8, 2), 3, behind=x), True, True),
    ("with_temperature", "temperature"): (lambda x: rl.with_temperature(decoder(CONFIG), x), False, True),
}  # fmt: skip


@pytest.mark.parametrize(("function", "argument"), RANGES)
def test_numbers_out_of_range_are_refused(function: str, argument: str) -> None:
    call, zero, more = RANGES[function, argument]
    for right in (1.0, *([0.0] if zero else []), *([5.0] if more else [])):
        call(right)
    for wrong in (-0.2, math.nan, *([] if zero else [0.0]), *([] if more else [1.5])):
        with pytest.raises(
            ValueError, match=rf"{function}: {argument} must be .*got .*{re.escape(str(wrong))}"
        ) as caught:
            call(wrong)
        assert "must be" in str(caught.value)
    if argument != CLIP_MAX:  # which then has no bound
        with pytest.raises(ValueError, match=rf"{function}: {argument} must be .*got .*inf"):
            call(math.inf)


@pytest.mark.day(4)
@pytest.mark.parametrize("mistake", cases(MISTAKES))
def test_a_mistake_is_refused_with_its_remedy(mistake: Mistake) -> None:
    check(mistake)


@pytest.mark.nightly
@distributed(world=2)
def test_all_ranks_refuse_a_mistake() -> None:
    check_on_all_ranks(MISTAKES)


def rewards(prompt: list[int], answer: list[int]) -> float:
    """The first group raises, hangs and is NaN; the second is equal; the third has one empty answer."""
    row = prompt[0]
    if row == 0:
        raise KeyError("no solution")
    while row == 1:
        pass
    return math.nan if row == 2 else float(len(answer)) if row >= 8 else 5.0


def test_bad_rewards_are_counted_and_make_no_nan() -> None:
    rollout = rl.empty_rollout(12, 8, 4)
    ids, one = rollout.ids.clone(), torch.ones(12, dtype=torch.int64)
    ids[:, 0] = torch.arange(12)
    lengths = torch.tensor([4, 1, 2, 3, 4, 1, 2, 3, 0, 1, 2, 4])
    rollout = rollout._replace(ids=ids, prompts=one, lengths=lengths, logprobs=torch.full((12, 4), -1.0))
    found, counts, first = rl.score(rewards, rollout, seconds=0.3)
    assert counts == {"raised": 1, "late": 1, "invalid": 1, "died": 0} and first.startswith("row 0 raised KeyError")
    for baseline in ("mean", "others"):
        advantages = rl.group_advantages(found.rewards, 4, baseline=baseline)
        assert advantages[:8].tolist() == [0.0] * 8 and advantages[8:].isfinite().all() and advantages[11] > 0
    advantages = rl.group_advantages(found.rewards, 4)
    for loss_type in ("dapo", "grpo"):
        policy = found.logprobs.clone().requires_grad_()
        loss = rl.grpo(policy, found.logprobs, advantages, found.lengths, loss_type=loss_type)
        loss.mean().backward()
        grad = policy.grad
        assert loss.mean().isfinite() and grad is not None and grad.isfinite().all()
        assert not grad[:9].any() and bool(grad[11].all())  # no reward, equal rewards, no token
    metrics = {name: float(x.mean()) for name, x in rl.rollout_metrics(found).items()}
    assert [round(12 * metrics[kind]) for kind in rl.FAILURES] == [1, 1, 1, 0]
    assert metrics["missing"] == 3 / 12 and all(map(math.isfinite, metrics.values()))


def test_a_signal_is_missed_only_after_rollouts_in_a_row() -> None:
    rollout, advantages = rl.empty_rollout(4, 8, 4), torch.tensor([0.0, 0.0, 0.5, -0.5])
    flat = [float(rl.rollout_metrics(rollout, x)["flat"].mean()) for x in (torch.zeros(4), advantages)]
    assert flat == [1.0, 0.5] and "flat" not in rl.rollout_metrics(rollout)
    signal, warned = rl.RewardSignal(patience=2), []
    for part in (flat[0], flat[1], *[flat[0]] * 5):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            signal = signal.update(part)
        warned.append(len(caught))
    assert warned == [0, 0, 0, 1, 0, 1, 0] and signal.waited == 5


def test_a_captured_step_has_advantages_of_missing_rewards_without_a_warning() -> None:
    def loss(w: torch.Tensor, rewards: torch.Tensor) -> torch.Tensor:
        return (w * rl.group_advantages(rewards, 2)).sum()

    step = sf.sharded_step(sf.jit(loss), sf.optim.sgd(1.0))
    state, _ = step(step.init(torch.tensor(1.0)), torch.full((4,), math.nan))
    assert state.params.full_tensor() == 1


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_reward_of_a_model_that_is_not_finite_is_missing(bad: float) -> None:
    rewards = torch.tensor([bad, 1.0, 2.0, 3.0, bad, bad, 5.0, bad])
    for baseline in ("mean", "others"):
        found = rl.group_advantages(rewards, 4, baseline=baseline, scale_rewards="none")
        one = rl.group_advantages(rewards[1:4], 3, baseline=baseline, scale_rewards="none")
        assert found.tolist() == [0.0, *one.tolist(), 0.0, 0.0, 0.0, 0.0]
    metrics = rl.rollout_metrics(rl.empty_rollout(8, 4, 2)._replace(rewards=rewards))
    assert float(metrics["missing"].mean()) == 4 / 8 and float(metrics["reward"].mean()) == 11 / 4


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_bad_rewards_of_a_critic_make_no_nan(bad: float) -> None:
    scores, lengths = torch.tensor([bad, 1.0, 2.0]), torch.tensor([2, 0, 4])
    rewards = rl.kl_rewards(torch.full((3, 4), -1.0), torch.full((3, 4), -1.0), scores, lengths)
    assert rewards.tolist() == [[0.0] * 4, [0.0] * 4, [0.0, 0.0, 0.0, 2.0]]
    advantages, returns = rl.gae(rewards, torch.zeros(3, 4), lengths)
    assert advantages.isfinite().all() and not advantages[:2].any() and not returns[:2].any()
