"""Losses over microbatches and ranks: one gradient for each way to cut a batch of answers of unequal lengths."""

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

import shardfn as sf
from shardfn import rl
from shardfn.testing import distributed
from tests.rl.test_policy import batch

ROWS, WIDTH, VOCAB = 8, 7, 11
LENGTHS = [7, 1, 4, 0, 2, 6, 7, 3]


def rollouts() -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=draw)

    tokens = torch.randint(0, VOCAB, (ROWS, WIDTH), generator=draw)
    return {
        "x": normal(ROWS, WIDTH, 5),
        "tokens": tokens,
        "old": -2.4 + 0.3 * normal(ROWS, WIDTH),
        "reference": -2.4 + 0.3 * normal(ROWS, WIDTH),
        "advantages": normal(ROWS),
        "rewards": normal(ROWS, WIDTH),
        "lengths": torch.tensor(LENGTHS),
    }


def logprobs(params: Any, x: dict[str, Tensor]) -> Tensor:
    return (x["x"] @ params["w"]).log_softmax(-1).gather(-1, x["tokens"][..., None])[..., 0]


def of_grpo(params: Any, x: dict[str, Tensor], **how: Any) -> Any:
    return rl.grpo(
        logprobs(params, x), x["old"], x["advantages"], x["lengths"], ref_logprobs_BT=x["reference"], beta=0.1, **how
    )


def of_ppo(params: Any, x: dict[str, Tensor]) -> Any:
    advantages, _ = rl.gae(x["rewards"], x["reference"], x["lengths"])
    return rl.ppo_policy(logprobs(params, x), x["old"], advantages, x["lengths"])


def of_values(params: Any, x: dict[str, Tensor]) -> Any:
    return rl.ppo_value((x["x"] @ params["w"])[..., 0], x["old"], x["rewards"], x["lengths"])


def of_answers(params: Any, x: dict[str, Tensor]) -> Any:
    return rl.rloo(logprobs(params, x), x["old"], x["advantages"], x["lengths"])


def of_pairs(params: Any, x: dict[str, Tensor]) -> Any:
    sums = (logprobs(params, x) * rl.completion_mask(x["lengths"], WIDTH)).sum(1)
    return rl.dpo(sums, x["old"].sum(1), x["reference"].sum(1), x["rewards"].sum(1))


def of_transport(params: Any, x: dict[str, Tensor], axis: Any = None) -> Any:
    sums = (logprobs(params, x) * rl.completion_mask(x["lengths"], WIDTH)).sum(1)
    others = x["old"].sum(1), x["reference"].sum(1), x["rewards"].sum(1)
    return rl.dpo(sums, *others, loss_type={"aot": 0.5, "aot_unpaired": 1.0, "bco_pair": 0.3}, axis=axis)


def of_masked(params: Any, x: dict[str, Tensor], axis: Any = None) -> Any:
    logits = (x["x"] @ params["w"]).log_softmax(-1)
    entropies = -(logits.exp() * logits).sum(-1)
    mask = rl.high_entropy_mask(entropies, x["lengths"], 0.4, axis=axis)
    advantages = rl.whiten(x["rewards"], x["lengths"], axis=axis)[:, 0]
    how = {"entropies_BT": entropies, "entropy_coef": 0.1, "loss_mask_BT": mask, "loss_type": "sapo"}
    return rl.grpo(logprobs(params, x), x["old"], advantages, x["lengths"], **how)


# Losses that compare rows of all ranks, so that a batch is not cut into microbatches.
COMPARED = {"transport": of_transport, "masked": of_masked}
LOSSES = {
    "batch": of_grpo,
    "luspo": functools.partial(of_grpo, loss_type="luspo", importance_sampling_level="sequence"),
    "sapo": functools.partial(of_grpo, loss_type="sapo"),
    "vespo": functools.partial(of_grpo, loss_type="vespo"),
    "sequence": functools.partial(of_grpo, loss_type="grpo"),
    "constant": functools.partial(of_grpo, loss_type="dr_grpo", max_completion_length=9),
    "gspo": functools.partial(of_grpo, loss_type="grpo", importance_sampling_level="sequence"),
    "ppo_policy": of_ppo,
    "ppo_value": of_values,
    "rloo": of_answers,
    "dpo": of_pairs,
}


@pytest.mark.nightly
@distributed(world=[1, 2, 4])
def test_every_cut_has_the_gradient_of_the_whole_batch(world: int) -> None:
    mesh, whole = sf.make_mesh({"dp": world}), rollouts()
    draw = torch.Generator().manual_seed(1)
    params = {"w": torch.randn(5, VOCAB, dtype=torch.float64, generator=draw) / 2}
    for name, loss in LOSSES.items():
        value, wanted = sf.value_and_grad(lambda p, x, f=loss: f(p, x).mean())(params, whole)
        for parts in (1, 2, 4):
            if ROWS // world % parts:
                continue
            step = sf.sharded_step(sf.accumulate(loss, parts), sf.optim.sgd(1.0), mesh=mesh, zero=3 if world > 1 else 0)
            own = {key: x[step.rows(ROWS)] for key, x in whole.items()}
            state, metrics = step(step.init(params), own)
            torch.testing.assert_close(metrics["loss"].double(), value, msg=f"{name}, {parts}")
            found = params["w"] - sf.unshard(state.params)["w"]
            torch.testing.assert_close(found, wanted["w"], rtol=1e-10, atol=1e-12, msg=f"{name}, {parts}")


@pytest.mark.nightly
@distributed(world=[1, 2, 4])
def test_losses_that_compare_the_rows_of_all_ranks_have_the_gradient_of_one_device(world: int) -> None:
    mesh, whole = sf.make_mesh({"dp": world}), rollouts()
    draw = torch.Generator().manual_seed(1)
    params = {"w": torch.randn(5, VOCAB, dtype=torch.float64, generator=draw) / 2}
    for name, loss in COMPARED.items():
        value, wanted = sf.value_and_grad(lambda p, x, f=loss: f(p, x).mean())(params, whole)
        axis = "dp" if world > 1 else None
        step = sf.sharded_step(functools.partial(loss, axis=axis), sf.optim.sgd(1.0), mesh=mesh, zero=3 if axis else 0)
        own = {key: x[step.rows(ROWS)] for key, x in whole.items()}
        state, metrics = step(step.init(params), own)
        torch.testing.assert_close(metrics["loss"].double(), value, msg=name)
        found = params["w"] - sf.unshard(state.params)["w"]
        torch.testing.assert_close(found, wanted["w"], rtol=1e-10, atol=1e-12, msg=name)


def test_a_mixture_with_pretraining_is_a_step_of_two_losses() -> None:
    x, text = rollouts(), batch("large")["lengths"] % VOCAB
    params = {"w": torch.linspace(-1, 1, 5 * VOCAB, dtype=torch.float64).view(5, VOCAB)}

    def pretraining(params: Any, tokens: Tensor) -> Tensor:
        return 27.8 * torch.nn.functional.cross_entropy(params["w"], tokens)

    step = sf.sharded_step({"policy": of_ppo, "text": pretraining}, sf.optim.sgd(1.0))
    state, metrics = step(step.init(params), {"policy": x, "text": text})
    total, grads = sf.value_and_grad(lambda p: of_ppo(p, x).mean() + pretraining(p, text))(params)
    torch.testing.assert_close(metrics["loss"].double(), total)
    torch.testing.assert_close(sf.unshard(state.params)["w"], params["w"] - grads["w"])


def test_the_average_of_deepspeed_chat_is_that_of_the_optimizer() -> None:
    params = {"w": torch.ones(3, dtype=torch.float64)}
    tx = sf.optim.average_params(sf.optim.sgd(1.0), decay=0.992)
    state, average = tx.init(params), params["w"].clone()
    for i in range(3):
        updates, state = tx.update({"w": torch.full((3,), 0.5 + i, dtype=torch.float64)}, state, params)
        params = {"w": params["w"] + updates["w"]}
        average = torch.lerp(params["w"], average, 0.992)
        torch.testing.assert_close(state.average["w"], average)
