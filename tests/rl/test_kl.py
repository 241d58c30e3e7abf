"""The estimators of divergence: values, and their means over a small vocabulary, with gradients."""

from typing import Any

import pytest
import torch

from shardfn import rl
from tests.rl.test_policy import batch

DRAW = torch.Generator().manual_seed(0)
LOGITS, REFERENCE = (torch.randn(5, dtype=torch.float64, generator=DRAW) for _ in range(2))


def divergence(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    return (p.exp() * (p - q)).sum()


def means(estimator: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Over tokens of the policy: of the value, and of its gradient by the logits."""
    x = LOGITS.clone().requires_grad_()
    p = x.log_softmax(0)
    found = rl.kl(p, REFERENCE.log_softmax(0), estimator=estimator)  # pyright: ignore[reportArgumentType]
    mean = (p.detach().exp() * found).sum()
    return mean.detach(), torch.autograd.grad(mean, x)[0]


def exact(*, reverse: bool) -> tuple[torch.Tensor, torch.Tensor]:
    x, q = LOGITS.clone().requires_grad_(), REFERENCE.log_softmax(0)
    p = x.log_softmax(0)
    value = divergence(q, p) if reverse else divergence(p, q)
    return value.detach(), torch.autograd.grad(value, x)[0]


def test_means_of_values() -> None:
    forward = exact(reverse=False)[0]
    torch.testing.assert_close(means("k1")[0], forward)
    torch.testing.assert_close(means("k3")[0], forward)
    assert (means("k2")[0] - forward).abs() > 1e-3


def test_means_of_gradients() -> None:
    torch.testing.assert_close(means("k1")[1], torch.zeros(5, dtype=torch.float64))
    torch.testing.assert_close(means("k2")[1], exact(reverse=False)[1])
    torch.testing.assert_close(means("k3")[1], exact(reverse=True)[1])


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_a_corrected_divergence_of_an_older_policy_has_the_gradient_of_the_new_one(estimator: str) -> None:
    old, reference = torch.randn(5, dtype=torch.float64, generator=DRAW).log_softmax(0), REFERENCE.log_softmax(0)
    x = LOGITS.clone().requires_grad_()
    total, one, zero = torch.zeros((), dtype=torch.float64), torch.tensor([1]), torch.zeros(1, dtype=torch.float64)
    for token in range(5):
        p, q, r = (logs[token].view(1, 1) for logs in (x.log_softmax(0), old, reference))
        how = {"beta": 1.0, "ref_logprobs_BT": r, "estimator": estimator, "use_bias_correction_kl": True}
        total = total + q.exp().squeeze() * rl.grpo(p, q, zero, one, **how).mean()  # pyright: ignore[reportArgumentType]
    (grad,) = torch.autograd.grad(total, x)
    value, wanted = exact(reverse=False)
    torch.testing.assert_close(total.detach(), value)
    torch.testing.assert_close(grad, wanted)


@pytest.mark.parametrize("estimator", ["k1", "k3"])
@pytest.mark.parametrize("policy", [[0.02, 0.68, 0.3], [0.01, 0.64, 0.35]], ids=["first epoch", "later epoch"])
def test_tokens_of_older_weights_have_the_divergence_of_the_policy_and_its_gradient(
    policy: list[float], estimator: Any
) -> None:
    # Token 0 has become improbable since the draws: by ratios to `old` the divergence would be 9 and 10, not 0.5.
    drawn, old, before = log([0.5, 0.3, 0.2]), log([0.02, 0.68, 0.3]), log([0.45, 0.35, 0.2])
    tokens = torch.tensor([0] * 5 + [1] * 3 + [2] * 2)[:, None]  # each as often as its probability: exact means
    logits, ones = log(policy).requires_grad_(), torch.ones(10, dtype=torch.long)
    new = logits.log_softmax(0)
    how: Any = {"ref_logprobs_BT": before[tokens], "sampling_logprobs_BT": drawn[tokens]}
    truth = divergence(new, before)
    metrics = rl.policy_metrics(new[tokens], old[tokens], ones, **how)
    torch.testing.assert_close(metrics["kl"].mean(), truth.detach())
    how |= {"beta": 1.0, "estimator": estimator, "use_bias_correction_kl": True}
    loss = rl.grpo(new[tokens], old[tokens], torch.zeros(10).double(), ones, **how).mean()
    torch.testing.assert_close(loss, truth)
    found, wanted = (torch.autograd.grad(x, logits, retain_graph=True)[0] for x in (loss, truth))
    torch.testing.assert_close(found, wanted)


def log(probabilities: list[float]) -> torch.Tensor:
    return torch.tensor(probabilities, dtype=torch.float64).log()


def test_one_improbable_token_is_a_spike_without_the_correction() -> None:
    new, old = torch.tensor([[-11.0]]), torch.tensor([[-1.0]])
    spike = rl.kl(new, old).item()
    assert spike > 2e4 and (new - old).exp().item() * spike < 1.01


def test_values() -> None:
    x = batch("small")
    for estimator, wanted in (("k1", -0.12), ("k2", 0.058), ("k3", 0.066980809)):
        rows = rl.kl(x["logprobs"], x["reference"], estimator=estimator)  # pyright: ignore[reportArgumentType]
        assert abs(rl.token_mean(rows, x["lengths"]).mean().item() - wanted) < 1e-9


def test_an_unknown_estimator_is_named() -> None:
    with pytest.raises(ValueError, match='estimator must be "k1", "k2" or "k3", got \'k4\''):
        rl.kl(LOGITS, REFERENCE, estimator="k4")  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("divergence", "wanted"), [(0.2, 0.2), (0.21, 0.201), (0.3, 0.204), (9.0, 0.204), (0.17, 0.197), (0.0, 0.196)]
)
def test_beta_follows_the_divergence(divergence: float, wanted: float) -> None:
    assert abs(rl.follow_divergence(0.2, divergence, 0.2) - wanted) < 1e-12


def test_beta_follows_only_numbers() -> None:
    with pytest.raises(ValueError, match="beta must be above 0 and finite, got 0"):
        rl.follow_divergence(0, 0.1, 0.1)
    with pytest.raises(ValueError, match=r"target must be above 0 and finite, got -0.1"):
        rl.follow_divergence(0.1, 0.1, -0.1)
    with pytest.raises(
        ValueError, match=r"divergence must be finite, got nan for a target of 0.1. Look at the parameters"
    ):
        rl.follow_divergence(0.1, torch.nan, 0.1)
