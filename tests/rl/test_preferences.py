"""The losses of preferences: values by hand, and gradients."""

import functools

import pytest
import torch
import torch.nn.functional as F

from shardfn import rl

F64 = torch.float64
ONE = [torch.tensor([x], dtype=F64) for x in (-5.0, -7.0, -5.5, -6.8)]
DRAW = torch.Generator().manual_seed(0)
MANY = [-5 * torch.rand(4, dtype=F64, generator=DRAW) - 0.1 for _ in range(4)]


def test_values() -> None:
    assert round(rl.dpo(*ONE).mean().item(), 9) == 0.658759556
    assert round(rl.ipo(*ONE).mean().item(), 9) == 18.49
    assert round(rl.hinge(*ONE).mean().item(), 9) == 0.93


def test_smoothing_is_a_mean_of_both_ways_round() -> None:
    chosen, rejected, of_chosen, of_rejected = MANY
    both = [rl.dpo(*MANY).mean(), rl.dpo(rejected, chosen, of_rejected, of_chosen).mean()]
    torch.testing.assert_close(rl.dpo(*MANY, smoothing=0.3).mean(), 0.7 * both[0] + 0.3 * both[1])


@pytest.mark.parametrize("z", [0.4, -3.0])
def test_kto(z: float) -> None:
    wanted, divergence = torch.tensor([True, False, True, False]), torch.tensor(z, dtype=F64)
    found = rl.kto(MANY[0], MANY[2], wanted, divergence, beta=0.5, weights=(1.0, 1.5))
    ahead = 0.5 * (MANY[0] - MANY[2] - max(z, 0))
    rows = [1 - ahead[i].sigmoid() if i % 2 == 0 else 1.5 * (1 - (-ahead[i]).sigmoid()) for i in range(4)]
    torch.testing.assert_close(found.mean(), torch.stack(rows).mean())


def test_orpo() -> None:
    odds = [x.exp() / (1 - x.exp()) for x in MANY[:2]]
    wanted = -0.2 * F.logsigmoid((odds[0] / odds[1]).log()).mean()
    torch.testing.assert_close(rl.orpo(MANY[0], MANY[1], beta=0.2).mean(), wanted)


@pytest.mark.parametrize("name", ["dpo", "ipo", "hinge", "kto", "orpo"])
def test_gradients_are_finite_differences(name: str) -> None:
    kto = functools.partial(rl.kto, wanted_B=torch.tensor([True, False, True, False]), divergence=torch.tensor(0.2))
    loss = kto if name == "kto" else getattr(rl, name)
    num = 2 if name in ("kto", "orpo") else 4
    xs = [x.clone().requires_grad_() for x in MANY[:num]]
    assert torch.autograd.gradcheck(lambda *x: loss(*x).mean(), xs)
