"""Covers balance losses: published values, padding, and gradients over ranks and microbatches."""

from typing import Any

import pytest
import torch
from torch import Tensor

import shardfn as sf
from shardfn.core import Axes, normal
from shardfn.nn import moe
from shardfn.nn.moe import balance
from shardfn.testing import distributed

FOUR = torch.tensor([[2.0, 1, 0, -1], [3, 0, 0, 0.5], [0, 2, 1, -2], [1, 0.5, 0, 2]], dtype=torch.float64)
BIAS = torch.tensor([0, 0.3, 0, -0.1])


def close(got: Tensor, want: float) -> None:
    torch.testing.assert_close(got, torch.tensor(want, dtype=got.dtype), rtol=0, atol=1e-6)


def test_published_values() -> None:
    routing, deepseek = moe.top_k(FOUR, 2), moe.sigmoid_groups(FOUR, 2, BIAS)
    close(balance.switch(routing), 1.167847)
    close(balance.mixtral(routing), 2.335693)
    close(balance.z(routing), 7.080271)
    close(balance.sequence(deepseek, 1), 1.075297)


def test_mixtral_joins_layers() -> None:
    layers = [moe.top_k(FOUR, 2), moe.top_k(FOUR.flip(1), 2)]
    close(balance.mixtral(layers), 2.121262)
    close(balance.mixtral(layers[1]), 2.335693)
    short = [moe.top_k(FOUR[:3], 2), moe.top_k(FOUR.flip(1)[:3], 2)]
    torch.testing.assert_close(balance.mixtral(layers, mask=torch.arange(4) < 3), balance.mixtral(short))


def test_equally_busy_experts_have_the_least_value() -> None:
    logits = torch.eye(4, dtype=torch.float64) * 3
    routing = moe.switch_top1(logits)
    for loss in (balance.switch, balance.gshard, balance.mixtral):
        close(loss(routing), 1.0)
    close(balance.sequence(moe.switch_top1(logits.repeat(3, 1)), 3), 1.0)


def test_padding_does_not_count() -> None:
    close(balance.mixtral(moe.top_k(FOUR, 2, mask=torch.arange(4) < 3)), 2.451279)
    mask = torch.arange(4) < 3
    padded, short = moe.top_k(torch.where(mask[:, None], FOUR, torch.nan), 2, mask=mask), moe.top_k(FOUR[:3], 2)
    for loss in (balance.switch, balance.gshard, balance.mixtral, balance.z, lambda r: balance.sequence(r, 1)):
        torch.testing.assert_close(loss(padded), loss(short))
    torch.testing.assert_close(balance.switch(moe.top_k(FOUR, 2), mask=mask), balance.switch(short))


def test_sequences_are_apart() -> None:
    routing = moe.top_k(torch.cat([FOUR, FOUR.flip(1)]), 2)
    close(balance.sequence(routing, 2), 1.167847)
    masked = balance.sequence(routing, 2, mask=torch.arange(8) < 4)
    close(masked, 1.167847 / 2)
    with pytest.raises(ValueError, match="8 tokens are not those of num_sequences=3 sequences of one length"):
        balance.sequence(routing, 3)


@pytest.mark.nightly
def test_gradients_are_finite_differences() -> None:
    x = normal(sf.key(1), (6, 4), dtype=torch.float64).requires_grad_()
    mask = torch.arange(6) != 2
    for router in (moe.switch_top1, lambda x, mask: moe.sigmoid_groups(x, 2, mask=mask)):
        for loss in (balance.switch, balance.gshard, balance.mixtral, balance.z, lambda r: balance.sequence(r, 2)):
            assert torch.autograd.gradcheck(lambda x, router=router, loss=loss: loss(router(x, mask=mask)), (x,))


def _loss(params: Any, x: Tensor, axes: Axes) -> Tensor:
    """Every balance loss, each with a weight of its own, beside a mean over rows."""
    logits = x @ params["router"]
    routing = moe.top_k(logits, 2)
    found = [loss(routing, axes=axes) for loss in (balance.switch, balance.gshard, balance.mixtral, balance.z)]
    found += [balance.sequence(moe.sigmoid_groups(logits, 2), 1, axes=axes)]
    return (routing.weights * logits[:, :2]).square().mean() + sum((i + 1) * x for i, x in enumerate(found))


def own(params: Any, x: Tensor) -> Tensor:
    return _loss(params, x, None)


def of_the_batch(params: Any, x: Tensor) -> Tensor:
    return _loss(params, x, "dp")


def _on_one_device(loss: Any, params: Any, x: Tensor, world: int, of: int) -> tuple[Tensor, Tensor]:
    """The mean and the gradient over the parts that the balance treats apart."""
    microbatches = [torch.cat(parts) for parts in zip(*(rows.chunk(of) for rows in x.chunk(world)), strict=True)]
    parts = microbatches if loss is of_the_batch else [p for m in microbatches for p in m.chunk(world)]
    found = [sf.value_and_grad(loss)(params, part) for part in parts]
    return torch.stack([value for value, _ in found]).mean(), torch.stack([g["router"] for _, g in found]).mean(0)


NIGHT = pytest.mark.nightly
DAY = [(own, 3, False), (of_the_batch, 1, True)]
CASES = [
    pytest.param(loss, of, jit, marks=() if (loss, of, jit) in DAY else NIGHT)
    for loss in (own, of_the_batch)
    for of in (1, 3)
    for jit in (False, True)
]


@pytest.mark.day("1-own-3-False")
@pytest.mark.parametrize(("loss", "of", "jit"), CASES)
@distributed(world=[1, 2])
def test_the_router_has_the_gradient_of_one_device(world: int, loss: Any, of: int, jit: bool) -> None:
    x = normal(sf.key(2), (12, 5), dtype=torch.float64)
    params = {"router": normal(sf.key(3), (5, 4), dtype=torch.float64)}
    accumulated = sf.accumulate(loss, of)
    stepped = sf.jit(accumulated) if jit else accumulated
    step = sf.sharded_step(stepped, sf.optim.sgd(0.1), mesh=sf.make_mesh({"dp": world}), zero=sf.Zero(stage=2 + jit))
    grads, metrics = step.gradients(step.init(params), x[step.rows(12)])
    value, want = _on_one_device(loss, params, x, world, of)
    torch.testing.assert_close(metrics["loss"], value, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(sf.unshard(grads["router"]), want, rtol=1e-12, atol=1e-12)


def weighted(params: Any, batch: Any) -> sf.WeightedMean:
    """Ranks with unequal numbers of tokens: each counts with its tokens, and so does the balance."""
    x, mask = batch["x"], batch["mask"]
    routing = moe.top_k(x @ params["router"], 2, mask=mask)
    tokens = mask.sum()
    total = (routing.weights * x[:, :2]).square().sum()
    return sf.WeightedMean(total + tokens * balance.switch(routing, axes="dp"), tokens)


@pytest.mark.day("8")
@pytest.mark.parametrize("tokens", [8, 6])  # the last rank has two of them, or none
@distributed(world=2)
def test_ranks_with_unequal_numbers_of_tokens_are_one_device(world: int, tokens: int) -> None:
    batch = {"x": normal(sf.key(2), (12, 5), dtype=torch.float64), "mask": torch.arange(12) < tokens}
    params = {"router": normal(sf.key(3), (5, 4), dtype=torch.float64)}
    step = sf.sharded_step(weighted, sf.optim.sgd(0.1), mesh=sf.make_mesh({"dp": world}))
    grads, metrics = step.gradients(step.init(params), {name: x[step.rows(12)] for name, x in batch.items()})
    value, want = sf.value_and_grad(lambda p, b: weighted(p, b).mean())(params, batch)
    torch.testing.assert_close(metrics["loss"], value, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(sf.unshard(grads["router"]), want["router"], rtol=1e-12, atol=1e-12)


@distributed(world=2)
def test_a_sequence_may_be_cut(world: int) -> None:
    logits = normal(sf.key(5), (2, 6, 4), dtype=torch.float64)
    mesh = sf.make_mesh({"sp": world})
    with sf.collectives.bind_mesh(mesh):
        part = logits.chunk(world, 1)[mesh.coords["sp"]].flatten(0, 1)
        found = balance.sequence(moe.top_k(part, 2), 2, axes="sp")
    torch.testing.assert_close(found, balance.sequence(moe.top_k(logits.flatten(0, 1), 2), 2))


@pytest.mark.parametrize("centred", [False, True])
def test_a_bias_moves_by_the_sign(centred: bool) -> None:
    moved = moe.bias_update(torch.zeros(4, dtype=torch.float64), torch.tensor([2, 4, 1, 1]), 0.5, centred=centred)
    assert moved.tolist() == ([-0.125, -0.625, 0.375, 0.375] if centred else [0, -0.5, 0.5, 0.5])
    third = torch.full((3,), 1 << 40)  # a mean that float32 would not hold
    assert moe.bias_update(torch.ones(3), third + torch.tensor([0, 1, -1]), 0.5).tolist() == [1, 0.5, 1.5]
