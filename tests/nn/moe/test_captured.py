"""Covers routers in captured steps: equal to eager ones on every rank, and logits that are not finite."""

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

import shardfn as sf
from shardfn.core import fold_in, normal
from shardfn.nn import moe
from shardfn.testing import distributed

E, D, T = 4, 5, 3
ROUTERS: dict[str, Any] = {
    "top_k": lambda x, **rest: moe.top_k(x, 2, mask=rest["mask"]),
    "switch": lambda x, **rest: moe.switch_top1(x, **rest),
    "gshard": lambda x, **rest: moe.gshard_top2(x, **rest),
    "groups": lambda x, **rest: moe.sigmoid_groups(x, 2, x.new_zeros(E), 2, 1, mask=rest["mask"]),
    "sinkhorn": lambda x, **rest: moe.sinkhorn(x, 2, axes="dp", mask=rest["mask"]),
}
ORDERS = ("position", "choice", "probs", "random", "probs")


def loss(params: Any, batch: Any, key: Tensor) -> Any:
    """Every router with an order of its capacity, as a function of the global batch alone."""
    x, mask = batch["x"].flatten(0, 1), batch["mask"].flatten()
    index = moe.token_numbers(batch["index"], T)
    found = torch.zeros((), dtype=x.dtype)
    loads = {}
    for i, ((name, router), by) in enumerate(zip(ROUTERS.items(), ORDERS, strict=True)):
        own = fold_in(key, i)
        logits = moe.jitter(fold_in(own, 0), x, 0.1, index) @ params["router"]
        routing = router(logits, key=fold_in(own, 1), index=index, mask=mask)
        drawn: dict[str, Any] = {"key": fold_in(own, 2), "index": index} if by == "random" else {}
        kept = moe.apply_capacity(routing, 7, priority=by, axes="dp", renormalise=name != "switch", **drawn)
        weights = torch.zeros_like(logits).scatter_add(1, kept.experts.clamp(min=0), kept.weights)
        found = found + (weights * logits).mean() + 0.1 * moe.balance.switch(routing, axes="dp")
        if name == "gshard":
            loads = {n: sf.WeightedMean(*pair) for n, pair in moe.load(routing, kept, axes="dp").items()}
    return found, loads


def problem() -> tuple[Any, Any]:
    batch = {
        "x": normal(sf.key(2), (8, T, D), dtype=torch.float64),
        "mask": torch.arange(8 * T).view(8, T) % 5 != 1,
        "index": torch.arange(8) + 40,
    }
    return {"router": normal(sf.key(3), (D, E), dtype=torch.float64)}, batch


def plainly(f: Any) -> Any:
    return f


NIGHT = pytest.mark.nightly


@pytest.mark.day("1-plainly")
@pytest.mark.parametrize("wrap", [plainly, pytest.param(sf.remat, marks=NIGHT), pytest.param(sf.jit, marks=NIGHT)])
@distributed(world=[1, 2])
def test_a_step_of_ranks_is_one_of_one_device(world: int, wrap: Any) -> None:
    params, batch = problem()
    bound = functools.partial(loss, key=sf.key(9))
    (value, aux), grads = sf.value_and_grad(bound, has_aux=True)(params, batch)
    mesh = sf.make_mesh({"dp": world})
    step = sf.sharded_step(wrap(bound), sf.optim.sgd(0.1), mesh=mesh, has_aux=True)
    own = {name: x[step.rows(8)] for name, x in batch.items()}
    found, metrics = step.gradients(step.init(params), own)
    torch.testing.assert_close(metrics["loss"], value, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(sf.unshard(found["router"]), grads["router"], rtol=1e-12, atol=1e-12)
    for name, pair in aux.items():
        torch.testing.assert_close(metrics[name].double(), pair.mean(), rtol=1e-6, atol=0)


def plain(params: Any, x: Tensor) -> Tensor:
    return moe.switch_top1(x @ params["router"], name="layers.3.moe").weights.mean()


@pytest.mark.day("1-False", "1-True")
@pytest.mark.parametrize("jit", [False, True])
@distributed(world=[1, 2])
def test_logits_that_are_not_finite_are_refused(world: int, jit: bool) -> None:
    step = sf.sharded_step(sf.jit(plain) if jit else plain, sf.optim.sgd(0.1), mesh=sf.make_mesh({"dp": world}))
    state = step.init({"router": torch.ones(D, E)})
    x = torch.ones(6, D)
    state, _ = step(state, x[step.rows(6)])
    before = sf.unshard(state.params["router"]).clone()
    x[4:, 0] = torch.nan  # of the last rank
    with pytest.raises((ValueError, sf.RankError)) as caught:
        step(state, x[step.rows(6)])
    # On the other rank the error names this one.
    where = " (on the rank at dp 1)" if world > 1 else ""
    rows = "some tokens" if jit else f"2 of {6 // world} tokens"
    text = f"layers.3.moe{where}: the router's logits are not finite in {rows}"
    assert text in str(caught.value)
    assert isinstance(caught.value, ValueError) or "rank 1 raised ValueError" in str(caught.value)
    assert torch.equal(sf.unshard(state.params["router"]), before)
