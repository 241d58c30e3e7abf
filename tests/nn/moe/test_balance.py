"""Covers balance losses: published values, padding, and gradients over ranks and microbatches."""

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import shardfn as sf
from shardfn.core import Axes, normal
from shardfn.nn import moe
from shardfn.testing import distributed

LOSSES: dict[str, Callable[[moe.Routing, Axes], Tensor]] = {
    "switch": lambda routing, axes: moe.balance.switch(routing, axes=axes),
}

FOUR = [[2.0, 1, 0, -1], [3, 0, 0, 0.5], [0, 2, 1, -2], [1, 0.5, 0, 2]]


def draw(shape: tuple[int, ...]) -> Tensor:
    return normal(sf.key(len(shape) + shape[0]), shape, dtype=torch.float64)


def test_switch_by_hand() -> None:
    routing = moe.top_k(torch.tensor(FOUR, dtype=torch.float64), 2)
    assert abs(moe.balance.switch(routing).item() - 1.167847) < 1e-6
    assert abs(moe.balance.switch(moe.top_k(torch.tensor(FOUR[:3], dtype=torch.float64), 2)).item() - 1.2256395) < 1e-6


def test_padding_does_not_count() -> None:
    logits, mask = torch.tensor(FOUR, dtype=torch.float64), torch.tensor([True, True, True, False])
    padded = torch.where(mask[:, None], logits, torch.nan)
    torch.testing.assert_close(
        moe.balance.switch(moe.top_k(padded, 2, mask=mask)), moe.balance.switch(moe.top_k(logits[:3], 2))
    )


def _rows(rank: int, world: int, microbatch: int, of: int, num: int) -> slice:
    """The rows of one microbatch of a rank, of `num` rows."""
    own = num // world
    size = own // of
    return slice(rank * own + microbatch * size, rank * own + (microbatch + 1) * size)


@distributed(world=[1, 2])
def test_gradients_of_the_router_are_those_of_one_device(world: int) -> None:
    mesh, x = sf.make_mesh({"dp": world}), draw((12, 5))
    params = {"router": draw((5, 4))}
    for name in LOSSES:
        for axes, of, jit in itertools.product((None, "dp"), (1, 3), (False, True)):

            def loss(params: Any, x: Tensor, name: str = name, axes: Axes = axes) -> Tensor:
                logits = x @ params["router"]
                routing = moe.top_k(logits, 2)
                return (routing.weights * logits[:, :2]).square().mean() + LOSSES[name](routing, axes)

            own = sf.accumulate(loss, of)
            step = sf.sharded_step(sf.jit(own) if jit else own, sf.optim.sgd(0.1), mesh=mesh)
            grads, metrics = step.gradients(step.init(params), x[step.rows(12)])
            want, value = _on_one_device(loss, params, x, axes, world, of)
            torch.testing.assert_close(metrics["loss"], value, rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(sf.unshard(grads["router"]), want, rtol=1e-12, atol=1e-12, msg=f"{name} {axes}")


def _on_one_device(loss: Any, params: Any, x: Tensor, axes: Axes, world: int, of: int) -> tuple[Tensor, Tensor]:
    """The gradient and the mean of the losses of the parts that the balance treats apart."""
    pieces = [[x[_rows(r, world, m, of, len(x))] for r in range(world)] for m in range(of)]
    parts = [torch.cat(p) for p in pieces] if axes else [x for p in pieces for x in p]
    found = [sf.value_and_grad(loss)(params, part) for part in parts]
    grads = torch.stack([g["router"] for _, g in found]).mean(0)
    return grads, torch.stack([value for value, _ in found]).mean()
