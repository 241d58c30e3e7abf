"""The estimators of divergence: values, and their means over a small vocabulary, with gradients."""

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


def test_values() -> None:
    x = batch("small")
    for estimator, wanted in (("k1", -0.12), ("k2", 0.058), ("k3", 0.066980809)):
        rows = rl.kl(x["logprobs"], x["reference"], estimator=estimator)  # pyright: ignore[reportArgumentType]
        assert abs(rl.token_mean(rows, x["lengths"]).mean().item() - wanted) < 1e-9


def test_an_unknown_estimator_is_named() -> None:
    with pytest.raises(ValueError, match='estimator is \'k4\'; it must be "k1", "k2" or "k3"'):
        rl.kl(LOGITS, REFERENCE, estimator="k4")  # pyright: ignore[reportArgumentType]
