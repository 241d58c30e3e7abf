"""The losses of preferences: values by hand and of TRL, and gradients."""

import functools
import json
import pathlib
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from shardfn import rl

GOLDENS = json.loads(pathlib.Path(__file__).with_name("trl_goldens.json").read_text())
F64 = torch.float64
ONE = [torch.tensor([x], dtype=F64) for x in (-5.0, -7.0, -5.5, -6.8)]
DRAW = torch.Generator().manual_seed(0)
MANY = [-5 * torch.rand(4, dtype=F64, generator=DRAW) - 0.1 for _ in range(4)]


def test_values() -> None:
    assert round(rl.dpo(*ONE).mean().item(), 9) == 0.658759556
    one, two = torch.tensor([1]), torch.tensor([2])
    ipo: Any = rl.ipo
    assert round(ipo(*ONE, one, one).mean().item(), 9) == 18.49
    assert round(ipo(*ONE, two, one).mean().item(), 9) == round((0.5 / 2 + 0.2 - 5) ** 2, 9)
    assert round(rl.hinge(*ONE).mean().item(), 9) == 0.93


def test_smoothing_is_a_mean_of_both_ways_round() -> None:
    chosen, rejected, of_chosen, of_rejected = MANY
    both = [rl.dpo(*MANY).mean(), rl.dpo(rejected, chosen, of_rejected, of_chosen).mean()]
    torch.testing.assert_close(rl.dpo(*MANY, label_smoothing=0.3).mean(), 0.7 * both[0] + 0.3 * both[1])


def batch(name: str) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """The tensors of a golden, and the mask of its answers."""
    x = {key: torch.tensor(value, dtype=F64) for key, value in GOLDENS["batches"][name].items()}
    x["lengths"] = x["lengths"].long()
    return x, rl.completion_mask(x["lengths"], x["old"].shape[1])


@pytest.mark.parametrize("case", GOLDENS["pairs"], ids=lambda c: f"{c['batch']}-{c['trl']}")
def test_losses_of_pairs_with_the_names_of_trl_have_its_values(case: dict[str, Any]) -> None:
    x, mask = batch(case["batch"])
    policy = [x["logprobs"].requires_grad_(), x["old"].requires_grad_()]
    values = [*policy, x["reference"], x["reference"].flip(0)]
    both = [(p * m).sum(1) for p, m in zip(values, [mask, mask.flip(0)] * 2, strict=True)]
    lengths = (x["lengths"], x["lengths"].flip(0)) if case["loss_of"] == "ipo" else ()
    loss = getattr(rl, case["loss_of"])(*both, *lengths, **case["arguments"]).mean()
    grads = torch.autograd.grad(loss, policy)
    for found, wanted in zip((loss, *grads), (case["loss"], *case["gradients"]), strict=True):
        torch.testing.assert_close(found, torch.tensor(wanted, dtype=F64), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("case", GOLDENS["kto"], ids=lambda c: c["batch"])
def test_kto_has_the_values_of_trl(case: dict[str, Any]) -> None:
    x, mask = batch(case["batch"])
    policy = x["logprobs"].requires_grad_()
    own, reference, other = ((values * mask).sum(1) for values in (policy, x["reference"], x["old"]))
    divergence = (other - (reference - 0.5)).mean()
    loss = rl.kto(
        own, reference, x["advantages"] > 0, divergence, beta=0.3, desirable_weight=0.7, undesirable_weight=1.3
    ).mean()
    (grad,) = torch.autograd.grad(loss, policy)
    for found, wanted in ((loss, case["loss"]), (grad, case["gradient"])):
        torch.testing.assert_close(found, torch.tensor(wanted, dtype=F64), rtol=1e-15, atol=1e-15)


def test_the_mean_of_robust_dpo_over_wrong_labels_is_dpo_of_right_ones() -> None:
    chosen, rejected, of_chosen, of_rejected = MANY
    right, wrong = MANY, (rejected, chosen, of_rejected, of_chosen)
    found = [rl.robust_dpo(*pairs, label_smoothing=0.3).mean() for pairs in (right, wrong)]
    torch.testing.assert_close(0.7 * found[0] + 0.3 * found[1], rl.dpo(*MANY).mean())


@pytest.mark.parametrize("z", [0.4, -3.0])
def test_kto(z: float) -> None:
    wanted, divergence = torch.tensor([True, False, True, False]), torch.tensor(z, dtype=F64)
    found = rl.kto(MANY[0], MANY[2], wanted, divergence, beta=0.5, undesirable_weight=1.5)
    ahead = 0.5 * (MANY[0] - MANY[2] - max(z, 0))
    rows = [1 - ahead[i].sigmoid() if i % 2 == 0 else 1.5 * (1 - (-ahead[i]).sigmoid()) for i in range(4)]
    torch.testing.assert_close(found.mean(), torch.stack(rows).mean())


def test_weights_of_kto_are_not_rounded() -> None:
    zero, wanted = torch.zeros(2, dtype=F64), torch.tensor([True, False])
    found = rl.kto(zero, zero, wanted, torch.tensor(0.0, dtype=F64), desirable_weight=0.1, undesirable_weight=0.2)
    assert found.total.item() == 0.1 / 2 + 0.2 / 2


def test_orpo() -> None:
    odds = [x.exp() / (1 - x.exp()) for x in MANY[:2]]
    wanted = -0.2 * F.logsigmoid((odds[0] / odds[1]).log()).mean()
    torch.testing.assert_close(rl.orpo(MANY[0], MANY[1], beta=0.2).mean(), wanted)


LENGTHS = {"chosen_lengths_B": torch.tensor([3, 1, 0, 2]), "rejected_lengths_B": torch.tensor([1, 4, 2, 2])}
MORE: dict[str, dict[str, Any]] = {
    "kto": {"desirable_B": torch.tensor([True, False, True, False]), "kl": torch.tensor(0.2)},
    "robust_dpo": {"label_smoothing": 0.2},
    "ipo": LENGTHS,
}


@pytest.mark.parametrize("name", ["dpo", "robust_dpo", "ipo", "hinge", "kto", "orpo"])
def test_gradients_are_finite_differences(name: str) -> None:
    loss = functools.partial(getattr(rl, name), **MORE.get(name, {}))
    num = 2 if name in ("kto", "orpo") else 4
    xs = [x.clone().requires_grad_() for x in MANY[:num]]
    assert torch.autograd.gradcheck(lambda *x: loss(*x).mean(), xs)
