"""Covers the load of experts: values by hand, and as metrics of a step over ranks and microbatches."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import shardfn as sf
from shardfn.core import normal
from shardfn.nn import moe
from shardfn.testing import distributed


def means(found: dict[str, tuple[Tensor, Tensor]]) -> dict[str, float]:
    return {name: (total / weight).item() for name, (total, weight) in found.items()}


def test_values_by_hand() -> None:
    logits = torch.tensor([[2.0, 1, 0, 0], [3, 0, 0, 0], [1, 0, 0, 0], [0, 9, 0, 0]], dtype=torch.float64)
    routing = moe.switch_top1(logits)
    found = means(moe.load(routing, moe.apply_capacity(routing, 2)))
    assert found["max_load"] == 3.0
    assert found["dead"] == 2.0
    assert found["dropped"] == 0.25
    assert abs(means(moe.load(moe.top_k(torch.zeros(3, 8), 2)))["entropy"] - math.log(8)) < 1e-6


def test_padding_is_not_measured() -> None:
    logits, mask = normal(sf.key(0), (7, 4), dtype=torch.float64), torch.arange(7) % 2 == 0
    routing, short = moe.top_k(logits, 2, mask=mask), moe.top_k(logits[mask], 2)
    kept = [moe.apply_capacity(r, 1) for r in (routing, short)]
    a, b = means(moe.load(routing, kept[0])), means(moe.load(short, kept[1]))
    assert all(abs(a[name] - b[name]) < 1e-14 for name in a)


def loss(params: Any, x: Tensor) -> Any:
    routing = moe.top_k(x @ params["router"], 2)
    found = moe.load(routing, moe.apply_capacity(routing, 2), axes="dp")
    return routing.weights.square().mean(), {name: sf.WeightedMean(*pair) for name, pair in found.items()}


@distributed(world=[1, 2])
def test_metrics_of_a_step_are_those_of_the_batch(world: int) -> None:
    x = normal(sf.key(2), (12, 5), dtype=torch.float64)
    params = {"router": normal(sf.key(3), (5, 4), dtype=torch.float64)}
    step = sf.sharded_step(loss, sf.optim.sgd(0.1), mesh=sf.make_mesh({"dp": world}), has_aux=True)
    _, metrics = step(step.init(params), x[step.rows(12)])
    want = means(moe.load(moe.top_k(x @ params["router"], 2)))
    for name in ("max_load", "dead", "entropy"):
        assert abs(metrics[name].item() - want[name]) < 1e-6  # metrics are float32
    kept = [moe.apply_capacity(moe.top_k(part @ params["router"], 2), 2) for part in x.chunk(world)]
    dropped = sum(int((k.experts < 0).sum()) for k in kept)
    assert abs(metrics["dropped"].item() - dropped / 24) < 1e-6


def test_other_choices_are_those_that_the_other_routing_lacks() -> None:
    logits, mask = normal(sf.key(4), (50, 6)), torch.arange(50) % 3 > 0
    routing, other = moe.top_k(logits, 2, mask=mask), moe.top_k(logits + normal(sf.key(5), (50, 6)), 2)
    sets = [(set(a) - {-1}, set(b)) for a, b in zip(routing.experts.tolist(), other.experts.tolist(), strict=True)]
    total, weight = moe.other_choices(routing, other)
    assert (total.item(), weight.item()) == (sum(len(a - b) for a, b in sets), 2 * int(mask.sum()))
    assert 0 < total < weight
    turned = other._replace(experts=other.experts.flip(1))
    assert moe.other_choices(other, turned)[0] == 0
    with pytest.raises(ValueError, match=r"of 50 and 49 tokens\. Both must be of the same"):
        moe.other_choices(routing, moe.top_k(logits[1:], 2))


def counting(params: Any, x: Tensor) -> Any:
    """The choices of a router in bfloat16, beside those in float32."""
    routing, narrow = moe.top_k(x @ params["router"], 2), moe.top_k(x.bfloat16() @ params["router"].bfloat16(), 2)
    return routing.weights.square().mean(), {"other": sf.WeightedMean(*moe.other_choices(routing, narrow))}


@distributed(world=[1, 2])
def test_other_choices_under_bfloat16_are_a_metric_of_the_batch(world: int) -> None:
    x, params = normal(sf.key(2), (1000, 8)), {"router": normal(sf.key(3), (8, 16))}
    step = sf.sharded_step(
        sf.accumulate(counting, 2), sf.optim.sgd(0.1), mesh=sf.make_mesh({"dp": world}), has_aux=True
    )
    _, metrics = step(step.init(params), x[step.rows(1000)])
    want = counting(params, x)[1]["other"].mean()
    assert 0 < want < 0.05
    torch.testing.assert_close(metrics["other"], want, rtol=1e-6, atol=0)
