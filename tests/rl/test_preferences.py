"""The losses of preferences: values by hand and of TRL, and gradients."""

import functools
import json
import pathlib
from typing import Any, cast, get_args

import pytest
import torch
import torch.nn.functional as F

from shardfn import rl
from shardfn.rl._preferences import PairLoss

GOLDENS = json.loads(pathlib.Path(__file__).with_name("trl_goldens.json").read_text())
F64 = torch.float64
ONE = [torch.tensor([x], dtype=F64) for x in (-5.0, -7.0, -5.5, -6.8)]
DRAW = torch.Generator().manual_seed(0)
MANY = [-5 * torch.rand(4, dtype=F64, generator=DRAW) - 0.1 for _ in range(4)]


def test_values() -> None:
    assert round(rl.dpo(*ONE).mean().item(), 9) == 0.658759556
    one, two = torch.tensor([1]), torch.tensor([2])
    ipo: Any = functools.partial(rl.dpo, *ONE, loss_type="ipo")
    assert round(ipo(chosen_lengths_B=one, rejected_lengths_B=one).mean().item(), 9) == 18.49
    found = ipo(chosen_lengths_B=two, rejected_lengths_B=one).mean().item()
    assert round(found, 9) == round((0.5 / 2 + 0.2 - 5) ** 2, 9)
    assert round(rl.dpo(*ONE, loss_type="hinge").mean().item(), 9) == 0.93


def test_smoothing_is_a_mean_of_both_ways_round() -> None:
    chosen, rejected, of_chosen, of_rejected = MANY
    both = [rl.dpo(*MANY).mean(), rl.dpo(rejected, chosen, of_rejected, of_chosen).mean()]
    torch.testing.assert_close(rl.dpo(*MANY, label_smoothing=0.3).mean(), 0.7 * both[0] + 0.3 * both[1])


def batch(name: str) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """The tensors of a golden, and the mask of its answers."""
    x = {key: torch.tensor(value, dtype=F64) for key, value in GOLDENS["batches"][name].items()}
    x["lengths"] = x["lengths"].long()
    return x, rl.completion_mask(x["lengths"], x["old"].shape[1])


@pytest.mark.parametrize("case", GOLDENS["pairs"], ids=lambda c: f"{c['batch']}-{c['arguments']}")
def test_losses_of_pairs_with_the_names_of_trl_have_its_values(case: dict[str, Any]) -> None:
    x, mask = batch(case["batch"])
    policy = [x["logprobs"].requires_grad_(), x["old"].requires_grad_()]
    values = [*policy, x["reference"], x["reference"].flip(0)]
    both = [(p * m).sum(1) for p, m in zip(values, [mask, mask.flip(0)] * 2, strict=True)]
    how = dict(case["arguments"])
    if how["loss_type"] in ("ipo", "sigmoid_norm"):
        how |= {"chosen_lengths_B": x["lengths"], "rejected_lengths_B": x["lengths"].flip(0)}
    loss = rl.dpo(*both, **how).mean()
    grads = torch.autograd.grad(loss, policy)
    for found, wanted in zip((loss, *grads), (case["loss"], *case["gradients"]), strict=True):
        torch.testing.assert_close(found, torch.tensor(wanted, dtype=F64), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("case", GOLDENS["cpo"], ids=lambda c: f"{c['batch']}-{c['arguments']}")
def test_losses_without_a_reference_have_the_values_of_trl(case: dict[str, Any]) -> None:
    x, mask = batch(case["batch"])
    policy, lengths = [x["logprobs"].requires_grad_(), x["old"].requires_grad_()], [x["lengths"], x["lengths"].flip(0)]
    both = [(p * m).sum(1) for p, m in zip(policy, [mask, mask.flip(0)], strict=True)]
    if case["arguments"]["loss_type"] == "simpo":
        both = [x / n for x, n in zip(both, lengths, strict=True)]
    loss = rl.cpo(both[0], both[1], beta=0.3, **case["arguments"]).mean()
    grads = torch.autograd.grad(loss, policy)
    for found, wanted in zip((loss, *grads), (case["loss"], *case["gradients"]), strict=True):
        torch.testing.assert_close(found, torch.tensor(wanted, dtype=F64), rtol=1e-12, atol=1e-12)


def test_exo_is_the_divergence_of_both_distributions() -> None:
    h = 0.3 * ((MANY[0] - MANY[2]) - (MANY[1] - MANY[3]))
    p, q = torch.stack([h.sigmoid(), (-h).sigmoid()]), torch.tensor([[0.8], [0.2]], dtype=F64)
    found = rl.dpo(*MANY, loss_type="exo_pair", beta=0.3, label_smoothing=0.2).mean()
    torch.testing.assert_close(found, (p * (p / q).log()).sum(0).mean(), rtol=1e-13, atol=0)


@pytest.mark.parametrize("alpha", [0.3, 1.0, 2.5])
def test_the_alpha_divergence_is_its_definition(alpha: float) -> None:
    # TRL's has no float64.
    c, r = MANY[0] - MANY[2], MANY[1] - MANY[3]
    f = [x if alpha == 1 else (((alpha - 1) * x).exp() - 1) / (alpha - 1) for x in (c, r)]
    found = rl.dpo(*MANY, f_divergence_type="alpha_divergence", f_alpha_divergence_coef=alpha).mean()
    torch.testing.assert_close(found, -F.logsigmoid(0.1 * (f[0] - f[1])).mean(), rtol=1e-13, atol=0)
    huge = [torch.tensor([x]) for x in (-1.0, -2.0, -500.0, -1.0)]
    loss = rl.dpo(*huge, f_divergence_type="alpha_divergence", f_alpha_divergence_coef=2.5)
    assert loss.mean().isfinite()


@pytest.mark.parametrize(
    ("how", "texts"),
    [
        ({"loss_type": "sigmod"}, ["loss_type must be one of", "got 'sigmod'. Did you mean 'sigmoid'"]),
        ({"loss_type": "sft"}, ["got 'sft'. Add the cross entropy of the chosen answers as a second loss"]),
        ({"loss_type": {}}, ["must name at least one loss"]),
        ({"loss_type": {"sigmoid": 0.0, "hinge": float("inf")}}, ["'sigmoid' must be finite and not 0", "'hinge'"]),
        ({"loss_type": "ipo"}, ["'ipo' must have chosen_lengths_B and rejected_lengths_B"]),
        ({"chosen_lengths_B": torch.ones(4), "rejected_lengths_B": torch.ones(4)}, ["lengths are only for 'ipo'"]),
        ({"loss_type": "hinge", "label_smoothing": 0.1}, ["label_smoothing is only for 'sigmoid'"]),
        ({"loss_type": "exo_pair"}, ["label_smoothing of 'exo_pair' must be above 0 and below 1"]),
        ({"loss_type": "robust", "label_smoothing": 0.5}, ["at least 0 and below 0.5, got 0.5"]),
        ({"f_divergence_type": "kl"}, ["f_divergence_type must be one of 'reverse_kl'", "got 'kl'"]),
        ({"loss_type": "bco_pair", "f_divergence_type": "forward_kl"}, ["f_divergence_type is only for 'sigmoid'"]),
        ({"f_alpha_divergence_coef": 0.7}, ["f_alpha_divergence_coef=0.7 has no effect"]),
        ({"loss_type": "discopop", "discopop_tau": 0.0}, ["discopop_tau must be above 0"]),
    ],
    ids=str,
)
def test_wrong_losses_of_pairs_are_named(how: dict[str, Any], texts: list[str]) -> None:
    with pytest.raises(ValueError, match="(?s)dpo:.*" + ".*".join(texts)):
        rl.dpo(*MANY, **how)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (
            lambda: rl.cpo(*MANY[:2], loss_type=cast(Any, "dpo")),
            "must be one of 'sigmoid', 'simpo', 'hinge', 'ipo', got 'dpo'",
        ),
        (lambda: rl.cpo(*MANY[:2], loss_type="ipo", label_smoothing=0.1), "no effect on 'ipo', got 0.1"),
        (lambda: rl.cpo(*MANY[:2], alpha=float("nan")), "alpha must be finite, got nan"),
        (lambda: rl.cpo(*MANY[:2], simpo_gamma=-1.0), "simpo_gamma must be 0 or more and finite, got -1.0"),
        (lambda: rl.cpo(MANY[0], MANY[1][:2]), r"rejected_B has shape \(2,\); it must be \[B = 4\]"),
        (lambda: rl.kto(MANY[0], MANY[1], MANY[0] > 0), "kl must be passed for loss_type='kto'"),
        (lambda: rl.kto(MANY[0], MANY[1], MANY[0] > 0, MANY[0][0], loss_type="apo_zero_unpaired"), "not for 'apo_ze"),
        (lambda: rl.bradley_terry(*MANY[:2], margin_B=MANY[0][:1]), "margin_B has shape"),
        (lambda: rl.bradley_terry(*MANY[:2], center_rewards_coefficient=-1.0), "must be 0 or more and finite, got -1"),
    ],
)
def test_other_wrong_arguments_are_named(call: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        call()


@pytest.mark.parametrize("case", GOLDENS["rewards"], ids=lambda c: f"{c['batch']}-{c['arguments']}")
def test_the_loss_of_rewards_has_the_values_of_trl(case: dict[str, Any]) -> None:
    x, _ = batch(case["batch"])
    chosen, rejected = x["logprobs"][:, 0].clone().requires_grad_(), x["old"][:, 0].clone().requires_grad_()
    how = dict(case["arguments"])
    more = {"margin_B": x["advantages"].abs()} if how.pop("margin", False) else {}
    loss = rl.bradley_terry(chosen, rejected, **more, **how).mean()
    grad = torch.cat(torch.autograd.grad(loss, [chosen, rejected]))
    for found, wanted in ((loss, case["loss"]), (grad, case["gradient"])):
        torch.testing.assert_close(found, torch.tensor(wanted, dtype=F64), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("case", GOLDENS["kto"], ids=lambda c: f"{c['batch']}-{c['loss_type']}")
def test_kto_has_the_values_of_trl(case: dict[str, Any]) -> None:
    x, mask = batch(case["batch"])
    policy = x["logprobs"].requires_grad_()
    own, reference, other = ((values * mask).sum(1) for values in (policy, x["reference"], x["old"]))
    how: dict[str, Any] = {"loss_type": case["loss_type"], "desirable_weight": 0.7, "undesirable_weight": 1.3}
    kl = (other - (reference - 0.5)).mean() if case["loss_type"] == "kto" else None
    loss = rl.kto(own, reference, x["advantages"] > 0, kl, beta=0.3, **how).mean()
    (grad,) = torch.autograd.grad(loss, policy)
    for found, wanted in ((loss, case["loss"]), (grad, case["gradient"])):
        torch.testing.assert_close(found, torch.tensor(wanted, dtype=F64), rtol=1e-15, atol=1e-15)


def test_the_mean_of_robust_dpo_over_wrong_labels_is_dpo_of_right_ones() -> None:
    chosen, rejected, of_chosen, of_rejected = MANY
    right, wrong = MANY, (rejected, chosen, of_rejected, of_chosen)
    found = [rl.dpo(*pairs, loss_type="robust", label_smoothing=0.3).mean() for pairs in (right, wrong)]
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
    "robust": {"label_smoothing": 0.2},
    "exo_pair": {"label_smoothing": 0.2},
    "ipo": LENGTHS,
    "sigmoid_norm": LENGTHS,
}


@pytest.mark.parametrize("name", ["kto", "orpo", "cpo", *get_args(PairLoss)])
def test_gradients_are_finite_differences(name: str) -> None:
    known = name in ("kto", "orpo", "cpo")
    f: Any = getattr(rl, name) if known else functools.partial(rl.dpo, loss_type=cast(Any, name))
    loss = functools.partial(f, **MORE.get(name, {}))
    xs = [x.clone().requires_grad_() for x in MANY[: 2 if known else 4]]
    assert torch.autograd.gradcheck(lambda *x: loss(*x).mean(), xs)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_loss_of_steps_is_the_cross_entropy_of_torch(dtype: torch.dtype) -> None:
    """As in the models of transformers for classes of tokens, which TRL's `PRMTrainer` trains."""
    logits = torch.randn(3, 7, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype)
    labels = torch.full((3, 7), -100)
    labels[0, [1, 4]], labels[2, 6] = torch.tensor([1, 0]), 1
    x, y = (logits.clone().requires_grad_() for _ in range(2))
    found = rl.process_reward(x, labels)
    want = F.cross_entropy(y.float().view(-1, 2) if dtype != torch.float64 else y.view(-1, 2), labels.view(-1))
    torch.testing.assert_close(found.mean(), want)
    torch.testing.assert_close(*(torch.autograd.grad(z, w)[0] for z, w in ((found.mean(), x), (want, y))))
    assert found.weight == 3
    labels[1, 1] = 2
    with pytest.raises(ValueError, match="labels_BT must be from 0 to 1, or -100, got 2"):
        rl.process_reward(logits, labels)
    with pytest.raises(ValueError, match="must have a row for each of labels_BT"):
        rl.process_reward(logits[:, 1:], labels)
