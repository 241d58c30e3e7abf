"""The losses of policies and critics: values of TRL and by hand, gradients, padding, and mistakes."""

import json
import pathlib
from typing import Any

import pytest
import torch
from torch import Tensor

from shardfn import rl

GOLDENS = json.loads(pathlib.Path(__file__).with_name("trl_goldens.json").read_text())


def batch(name: str, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    x = {key: torch.tensor(value, dtype=dtype) for key, value in GOLDENS["batches"][name].items()}
    return x | {"lengths": x["lengths"].long()}


def call(loss: Any, x: dict[str, Tensor], arguments: dict[str, Any]) -> Tensor:
    how, more = dict(arguments), dict[str, Any]()
    if "beta" in how:
        more["ref_logprobs_BT"] = x["reference"]
    if "gate" in how:
        kind, *numbers = how.pop("gate")
        more["loss_type"] = getattr(rl, kind)(*numbers)
    if how.pop("sampling", False):
        more["sampling_logprobs_BT"] = x["reference"]
    if "entropy_coef" in how:
        more["entropies_BT"] = x.get("entropies", x["reference"] ** 2)
    if "high_entropy" in how:
        more["loss_mask_BT"] = rl.high_entropy_mask(x["reference"] ** 2, x["lengths"], how.pop("high_entropy"))
    if "off_policy" in how:
        given = x["logprobs"], x["old"], x["advantages"], x["lengths"]
        more["loss_mask_BT"] = rl.off_policy_mask(*given, threshold=how.pop("off_policy"))
    return loss(x["logprobs"], x["old"], x["advantages"], x["lengths"], **how, **more).mean()


@pytest.mark.parametrize("case", [*GOLDENS["grpo"], *GOLDENS["rloo"]], ids=lambda c: f"{c['batch']}-{c['arguments']}")
def test_the_losses_of_trl(case: dict[str, Any]) -> None:
    x = batch(case["batch"])
    x["logprobs"].requires_grad_()
    x["entropies"] = (x["reference"] ** 2).requires_grad_()
    loss = call(rl.grpo if case["arguments"] else rl.rloo, x, case["arguments"])
    grad, of_entropies = torch.autograd.grad(loss, [x["logprobs"], x["entropies"]], allow_unused=True)
    pairs = [(loss, case["loss"]), (grad, case["gradient"])]
    pairs += [] if of_entropies is None else [(of_entropies, case["gradient_of_entropies"])]
    assert (of_entropies is None) == ("gradient_of_entropies" not in case)
    for found, wanted in pairs:
        torch.testing.assert_close(found, torch.tensor(wanted, dtype=torch.float64), rtol=1e-12, atol=1e-12)


def test_ppo_of_deepspeed_chat() -> None:
    # Rewards and advantages of tests/rl/test_rewards.py.
    old = torch.tensor([[-0.5, -0.3, -0.9], [-0.5, -0.3, -0.9]], dtype=torch.float64)
    values = torch.tensor([[0.3, 0.4, 0.5], [0.3, 0.4, 0.5]], dtype=torch.float64)
    advantages = torch.tensor([[4.281375, 4.4225, 4.55], [-1.06, -1.2, 0]], dtype=torch.float64)
    returns = torch.tensor([[4.581375, 4.8225, 5.05], [-0.76, -0.8, 0]], dtype=torch.float64)
    lengths = torch.tensor([3, 1])
    news = torch.tensor([[0.3, -0.4, 0.05], [0.5, -0.3, 0.1]], dtype=torch.float64)
    policy = rl.ppo_policy(old + news[0], old, advantages, lengths)
    value = rl.ppo_value(values + news[1], values, returns, lengths)
    assert round(policy.mean().item(), 9) == -2.863643389 and round(value.mean().item(), 9) == 7.649466018


@pytest.mark.day(3)
@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"loss_type": "grpo", "importance_sampling_level": "sequence"},
        {"loss_type": "dr_grpo", "max_completion_length": 9, "beta": 0.3, "use_bias_correction_kl": False},
        {"beta": 0.3, "estimator": "k2", "epsilon": 0.1, "epsilon_high": 0.4},
        {"beta": 0.3},
        {"delta": 1.25},
        {"loss_type": "sapo"},
        {"loss_type": "luspo"},
        {"entropy_coef": 0.1, "high_entropy": 0.4},
    ],
    ids=str,
)
def test_gradients_are_finite_differences(arguments: dict[str, Any]) -> None:
    x = batch("large")

    def of_policy(logprobs: Tensor) -> Tensor:
        return call(rl.grpo, x | {"logprobs": logprobs}, arguments)

    def of_values(values: Tensor) -> Tensor:
        return rl.ppo_value(values, x["old"], x["reference"] + 1, x["lengths"]).mean()

    def of_answers(logprobs: Tensor) -> Tensor:
        return rl.rloo(logprobs, x["old"], x["advantages"], x["lengths"]).mean()

    for f in (of_policy, of_values, of_answers):
        assert torch.autograd.gradcheck(f, (x["logprobs"].clone().requires_grad_(),))


def test_padding_is_never_used() -> None:
    x = batch("large")
    mask = rl.completion_mask(x["lengths"], 7)
    spoilt = {k: torch.where(mask, x[k], torch.nan) for k in ("logprobs", "old", "reference")}
    results = []
    for one in (x, x | spoilt):
        logprobs = one["logprobs"].clone().requires_grad_()
        one = one | {"logprobs": logprobs}
        losses = [
            call(rl.grpo, one, {"beta": 0.1}),
            call(rl.grpo, one, {"loss_type": "cispo"}),
            call(rl.grpo, one, {"loss_type": "sapo", "entropy_coef": 0.1}),
            call(rl.grpo, one, {"loss_type": "vespo", "sampling": True}),
            call(rl.grpo, one, {"high_entropy": 0.5}),
            call(rl.grpo, one, {"off_policy": 0.2}),
            call(rl.rloo, one, {}),
            rl.ppo_value(logprobs, one["old"], one["reference"], x["lengths"]).mean(),
        ]
        results.append([*losses, *(torch.autograd.grad(loss, logprobs)[0] for loss in losses)])
    assert all(torch.equal(a, b) and not a.isnan().any() for a, b in zip(*results, strict=True))


def test_an_empty_answer_is_a_row_of_loss_zero() -> None:
    zero, one = torch.zeros(2, 3, dtype=torch.float64), torch.ones(2, dtype=torch.float64)
    assert rl.grpo(zero, zero, one, torch.tensor([2, 0]), loss_type="grpo").mean() == -0.5
    assert rl.grpo(zero, zero, one, torch.tensor([2, 0])).mean() == -1
    assert rl.grpo(zero, zero, one, torch.tensor([0, 0])) == (0, 0)


def test_metrics() -> None:
    x = batch("small")
    found = rl.policy_metrics(x["logprobs"], x["old"], x["lengths"], ref_logprobs_BT=x["reference"])
    means = {name: value.mean().item() for name, value in found.items()}
    assert means["exact"] == 0.4 and means["clipped"] == 0.6 and means["length"] == 2.5
    rows = (x["logprobs"] - x["old"]).exp() * rl.kl(x["logprobs"], x["reference"])
    assert means["kl"] == rl.token_mean(rows, x["lengths"]).mean().item()
    own = rl.policy_metrics(x["logprobs"], x["logprobs"], x["lengths"], ref_logprobs_BT=x["reference"])
    assert abs(own["kl"].mean().item() - 0.066980809) < 1e-9


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"loss_type": "reinforce"}, r"loss_type must be one of 'grpo', 'dapo', .*, got 'reinforce'"),
        ({"loss_type": "bnpo"}, r"got 'bnpo'.*is \"dapo\" here"),
        ({"importance_sampling_level": "geometric"}, "must be one of 'token', 'sequence', got 'geometric'"),
        ({"loss_type": "dr_grpo"}, r"for example 256.*got max_completion_length=None and loss_type='dr_grpo'"),
        ({"max_completion_length": 5}, r"got max_completion_length=5 and loss_type='dapo'"),
        ({"loss_type": "dr_grpo", "max_completion_length": 0}, "got max_completion_length=0"),
        ({"loss_type": "sapo", "epsilon": 0.3}, 'epsilon has no effect on "sapo", got epsilon=0.3'),
        ({"loss_type": "vespo", "delta": 2.0}, 'delta is 2.0 with loss_type="vespo"'),
        ({"loss_type": "vespo", "importance_sampling_level": "sequence"}, "ratio is always of the whole answer"),
        ({"gate": ["Sapo", 0.0]}, "sapo temperature_pos must be above 0 and finite, got 0.0"),
        ({"gate": ["Vespo", 1.0, -1.0]}, "vespo lambda_pos must be above 0 and finite, got -1.0"),
        ({"entropy_coef": -0.1}, "entropy_coef must be 0 or more and finite, got -0.1"),
        ({"entropy_coef": 0.0}, "got entropy_coef=0.0 with entropies_BT"),
    ],
    ids=str,
)
def test_mistakes_are_named(arguments: dict[str, Any], message: str) -> None:
    x = batch("small")
    with pytest.raises(ValueError, match=message):
        call(rl.grpo, x, arguments)
    with pytest.raises(ValueError, match=r"got beta=0.1 without ref_logprobs_BT"):
        rl.grpo(x["logprobs"], x["old"], x["advantages"], x["lengths"], beta=0.1)
    with pytest.raises(ValueError, match=r"got beta=0.0 with ref_logprobs_BT"):
        rl.grpo(x["logprobs"], x["old"], x["advantages"], x["lengths"], ref_logprobs_BT=x["old"])


@pytest.mark.parametrize("delta", [None, 3.0])
@pytest.mark.parametrize("advantage", [-1.0, 0.0, 1.0])
def test_a_ratio_that_overflows_makes_no_nan(advantage: float, delta: float | None) -> None:
    old = torch.tensor([[-101.0, -1.0]])  # e^100 is beyond float32
    policy = -torch.ones(1, 2, requires_grad=True)
    own, of_each, two = torch.tensor([advantage]), torch.full((1, 2), advantage), torch.tensor([2])
    largest = 3.0 if advantage < 0 else 1.2
    losses = [
        (rl.grpo(policy, old, own, two, delta=delta), [0.0, -advantage / 2], -advantage * (largest + 1) / 2),
        (rl.ppo_policy(policy, old, of_each, two, delta=delta), [0.0, -advantage / 2], -advantage * (largest + 1) / 2),
        (rl.rloo(policy, old, own, two), [0.0, 0.0], -advantage * 1.2),
    ]
    for loss, gradient, value in losses[:2] if delta else losses:
        (grad,) = torch.autograd.grad(loss.mean(), policy)
        if advantage < 0 and delta is None:  # the loss has no bound
            assert loss.mean() == torch.inf and grad[0, 0] == torch.inf and not grad.isnan().any()
        else:
            torch.testing.assert_close(loss.mean(), torch.tensor(value))
            assert grad.tolist() == [gradient]


def test_a_gate_of_a_huge_ratio_has_no_nan() -> None:
    policy = -torch.ones(1, 2, requires_grad=True)
    for kind in ("sapo", "vespo"):
        loss = rl.grpo(policy, torch.tensor([[-101.0, -1.0]]), torch.tensor([1.0]), torch.tensor([2]), loss_type=kind)
        (grad,) = torch.autograd.grad(loss.mean(), policy)
        assert loss.mean().isfinite() and grad.isfinite().all()


def test_the_coefficient_of_the_entropy_stays_in_its_range() -> None:
    coef, found = 0.0, []
    for entropy in (0.1, 0.2, 0.9, 0.9, 0.9, 0.1):
        coef = rl.adapt_entropy_coef(coef, entropy, 0.5, delta=0.1, most=0.15)
        found.append(round(coef, 9))
    assert found == [0.1, 0.15, 0.05, 0.0, 0.0, 0.1]
    with pytest.raises(ValueError, match=r"least must be at most 0.1, the largest weight, got 0.2"):
        rl.adapt_entropy_coef(0.1, 0.1, 0.1, least=0.2, most=0.1)


def test_the_mask_of_high_entropies_of_empty_answers_is_empty() -> None:
    assert not rl.high_entropy_mask(torch.rand(2, 3), torch.tensor([0, 0]), 0.5).any()
    assert rl.high_entropy_mask(torch.rand(2, 3), torch.tensor([3, 1]), 1.0).sum() == 4


@pytest.mark.parametrize("quantile", [0.1, 0.35, 0.8])
def test_the_mask_of_high_entropies_is_above_the_quantile(quantile: float) -> None:
    entropies, lengths = (
        torch.rand(4, 9, generator=torch.Generator().manual_seed(0)).double(),
        torch.tensor([9, 2, 0, 5]),
    )
    mask = rl.completion_mask(lengths, 9)
    wanted = mask & (entropies >= torch.quantile(entropies[mask], 1 - quantile))
    assert torch.equal(rl.high_entropy_mask(entropies, lengths, quantile), wanted)
